"""The options and the course of the passes that solve for the least error of what a layer returns.

    relied      statistics, as far as the tokens carry them              Hessian, damping, drift correction
    by_solution a target for each layer, then `solver`, a function of tensors from `compress.solvers`
    borne_out   with very few tokens: which of its solutions a layer gets
    figures     what the record says

`passes.gptq` says why, with the equations.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from compress.base.collectives import Comm
from compress.base.errors import InputError, one_of
from compress.base.threads import one_thread
from compress.passes.protocol.base import Pass
from compress.passes.protocol.sites import Site
from compress.passes.protocol.solve import Solve, solve_stacked
from compress.passes.protocol.stages import Decide
from compress.solvers.column_sweep import ActOrder, Ordered, ordered
from compress.solvers.gptq import POLISH_DAMP
from compress.solvers.loss import quadratic
from compress.solvers.outliers import has_outliers, share_of_outliers
from compress.solvers.statistics.hessian import Hessian, HessianResult, Precision, precision
from compress.solvers.statistics.input_statistics import StatisticFactory
from compress.solvers.targets import Correction, aimed, check_drift, drift_correction
from compress.weights.decision import Figures
from compress.weights.matrix import Matrix

# What a layer may get, the careful ones first: plain rounding, everything but the drift correction, everything.
Solution = Literal["rounding", "gptq without drift", "gptq"]
SOLUTIONS: tuple[Solution, ...] = get_args(Solution)
# Rows of a layer by which its solutions are judged: what one row gains resembles what the others do.
JUDGED_ROWS = 128
# Multiplications of the sweeps of a site, from which several threads are worth it.
WORTH_THREADS = 2**28


@dataclass(frozen=True)
class Relied:
    """Statistics as they are relied on, and what follows from them for all layers of a site: H as it is visited, the
    drift correction (None: there is nothing to correct) and the damping of refit and descent."""

    statistics: HessianResult
    ordered: Ordered
    correction: Correction | None
    polish_damp: float

    @property
    def hessian(self) -> Tensor:
        return self.statistics.hessian


@dataclass(frozen=True)
class Aimed:
    """The weight of a layer, the values [N, K] that it aims at, and the share of the drift correction in those."""

    weight: Matrix
    target: Tensor
    drift: float


@dataclass(frozen=True, kw_only=True)
class SecondOrder(Pass):
    """A pass that solves column by column for the least error of a layer's output."""

    # What the record calls the loss of `nearest`, and the solutions of a layer.
    nearest_loss: ClassVar[str] = "rtn_loss"
    called: ClassVar[Mapping[Solution, str]] = {solution: solution for solution in SOLUTIONS}

    damp: float = 0.01
    """above 0, up to 1: added to the diagonal of H, as a share of its mean; raised where that is not enough."""

    drift: float = 1.0
    """0 to 1: how much of the change of a layer's input is made up for, of what `shrink` leaves; 0 is the paper."""

    act_order: ActOrder = "none"
    """Visit columns by falling diag(H): with scales fixed beforehand (static), or inside groups and the groups."""

    shrink: bool = True
    """Rely on statistics only as far as the calibration tokens carry."""

    statistics: Precision = "float32"
    """The dtype in which H is summed, and codes are solved."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.damp <= 1:
            raise InputError(f"damp {self.damp}; allowed: above 0, at most 1 (0.01 is usual)")
        check_drift(self.drift)
        one_of("act_order", self.act_order, get_args(ActOrder))
        precision(self.statistics)

    @property
    @abstractmethod
    def group_length(self) -> int | None:
        """Inputs that share a scale; None: all of them."""

    @abstractmethod
    def nearest(self, site: Site, name: str, dtype: torch.dtype) -> Matrix:
        """A layer's weight, as it is now, rounded to nearest: what it gets where nothing better is borne out."""

    @abstractmethod
    def rows(self, site: Site, name: str, target_NK: Tensor, relied: Relied) -> dict[str, Tensor]:
        """The arguments of `solver` that have a row for each output of a layer."""

    @abstractmethod
    def solver(self, site: Site, relied: Relied) -> Solve:
        """The function that solves rows of a site: solve(scale_dtype=, **rows)."""

    @property
    def together(self) -> int:
        """So many rows in a row depend on each other."""
        return 1

    def needs(self) -> Mapping[str, StatisticFactory]:
        made = partial(Hessian, dtype=precision(self.statistics), reference=self.drift > 0)
        return {**super().needs(), "hessian": made}

    def without_reference(self) -> Pass:
        return replace(self, drift=0.0) if self.calibrated else self

    @property
    def decide_stage(self) -> Decide:
        return replace(super().decide_stage, reference=self.drift > 0)

    def solved(self, site: Site) -> dict[str, tuple[Matrix, Figures]]:
        """{layer: (its weight, figures)}."""
        with one_thread(_is_small(site)):
            return self._solved(site)

    def _solved(self, site: Site) -> dict[str, tuple[Matrix, Figures]]:
        statistics: HessianResult = site.stats["hessian"]
        chosen: dict[str, Solution] = dict.fromkeys(site.weights, "gptq")
        if self.shrink and statistics.few:
            chosen = dict.fromkeys(site.weights, "rounding")
            if statistics.halves:
                chosen = borne_out(site, statistics.halves, self._by_every_solution)
        relied = self.relied(statistics)
        found: dict[str, tuple[Matrix, Figures]] = {}
        for solution in sorted(set(chosen.values())):
            part = site.rows({n: slice(None) for n in site.weights if chosen[n] == solution})
            for name, one in self.by_solution(part, relied, solution).items():
                figures = self.figures(site, name, one, relied)
                found[name] = one.weight, {**figures, "solution": self.called[solution]}
        return {name: found[name] for name in site.weights}

    def relied(self, statistics: HessianResult) -> Relied:
        """Values computed once from the statistics of a site, for all of its layers."""
        if self.shrink:
            statistics = statistics.shrunk()
        hessian = statistics.hessian
        noise = statistics.noise
        # Of the part that is relied on.
        share = 1 - statistics.shrinkage if self.shrink else 1.0
        seen = ordered(hessian, self.damp, self.act_order, self.group_length)
        correction = drift_correction(statistics, seen.factor.damp + noise * self.shrink) if self.drift else None
        return Relied(statistics, seen, correction, POLISH_DAMP + share * noise)

    def _by_every_solution(self, site: Site, statistics: HessianResult) -> Iterator[tuple[Solution, dict[str, Matrix]]]:
        relied = self.relied(statistics)
        for solution in SOLUTIONS:
            if relied.correction is not None or solution != "gptq without drift":
                yield solution, {n: one.weight for n, one in self.by_solution(site, relied, solution).items()}

    def by_solution(self, site: Site, relied: Relied, solution: Solution) -> dict[str, Aimed]:
        """The site's layers by one solution. Passes whose weights have further terms extend it."""
        hessian = relied.hessian
        weights = {n: site.wanted(n).to(hessian.dtype) for n in site.weights}
        if solution == "rounding":
            return {n: Aimed(self.nearest(site, n, hessian.dtype), w, 0.0) for n, w in weights.items()}
        aims = {n: (w, 0.0) for n, w in weights.items()}
        if relied.correction is not None and solution == "gptq":
            how = (relied.correction, hessian, self.drift, self.shrink)
            aims = {n: aimed(site.comm, w, *how) for n, w in weights.items()}
            relied.correction.forget()
        rows = {n: self.rows(site, n, target, relied) for n, (target, _) in aims.items()}
        found = self.solve(site, rows, relied)
        return {n: Aimed(found[n], target, share) for n, (target, share) in aims.items()}

    def solve(self, site: Site, rows: Mapping[str, Mapping[str, Tensor]], relied: Relied) -> dict[str, Matrix]:
        """`solver` over the rows of all layers, each rank its share."""
        return solve_stacked(site, rows, self.solver(site, relied), self.together)

    def compared(self, site: Site, name: str, dtype: torch.dtype) -> dict[str, Matrix]:
        """{figure: the weight whose loss it is} of the weights that the record compares a layer's with."""
        return {self.nearest_loss: self.nearest(site, name, dtype)}

    def figures(self, site: Site, name: str, solved: Aimed, relied: Relied) -> dict[str, float | int | str]:
        """A layer's figures for the record."""
        hessian, target = relied.hessian, solved.target
        energy = quadratic(site.comm, target, hessian) or 1.0
        losses = {
            figure: quadratic(site.comm, target - weight.dequantize(hessian.dtype), hessian) / energy
            for figure, weight in {"loss": solved.weight, **self.compared(site, name, hessian.dtype)}.items()
        }
        return {
            **losses,
            "damp": relied.ordered.factor.damp,
            "dead_channels": int((hessian.diagonal() <= 0).sum()),
            "tokens": relied.statistics.tokens,
            "shrinkage": relied.statistics.shrinkage if self.shrink else 0.0,
            "drift": solved.drift,
            **({"outliers": share_of_outliers(solved.weight)} if has_outliers(solved.weight) else {}),
        }


def _is_small(site: Site) -> bool:
    """True on a CPU for layers whose sweeps several threads would not shorten."""
    sweeps = [rows * columns**2 for rows, columns in (weight.shape for weight in site.weights.values())]
    on_cpu = all(weight.device.type == "cpu" for weight in site.weights.values())
    return on_cpu and sum(sweeps) < WORTH_THREADS


def borne_out(
    site: Site,
    halves: Sequence[HessianResult],
    solve: Callable[[Site, HessianResult], Iterable[tuple[Solution, Mapping[str, Matrix]]]],
) -> dict[str, Solution]:
    """For every layer the boldest solution that, found by either half of the tokens, is better on the other.

    The loss on the tokens that codes were fitted to says nothing here: it falls with everything that is fitted, noise
    included. Half the tokens serve a solution worse than all of them, so what passes is safe.

    `solve(site, statistics)` gives (solution, codes of all layers), the most careful solution first.
    """
    part = site.rows({n: slice(None, None, -(-len(w) // JUDGED_ROWS)) for n, w in site.weights.items()})
    losses: dict[str, dict[Solution, list[float]]] = {n: {} for n in site.weights}
    for fitted, judge in zip(halves, reversed(halves), strict=True):
        for solution, solved in solve(part, fitted):
            for name, weight in solved.items():
                loss = loss_on(site.comm, part.wanted(name).to(judge.hessian.dtype), weight, judge)
                losses[name].setdefault(solution, []).append(loss)
    return {name: boldest(found) for name, found in losses.items()}


def loss_on(comm: Comm, weight_NK: Tensor, weight: Matrix, judge: HessianResult) -> float:
    """Mean over tokens of |X_ref W^T - X Q^T|^2, less the part of it that does not depend on Q."""
    error = weight_NK - weight.dequantize(weight_NK.dtype)
    loss = quadratic(comm, error, judge.hessian)
    if judge.drift is None:
        return loss
    mine = comm.rows_of(len(error))
    return loss + 2 * float(comm.all_reduce(((weight_NK[mine] @ judge.drift) * error[mine]).sum()))


def boldest(losses: Mapping[Solution, Sequence[float]]) -> Solution:
    """The last of the solutions, careful ones first, that has a lower loss on every half than the one it replaces."""
    chosen, *bolder = losses
    for other in bolder:
        if all(new < old for new, old in zip(losses[other], losses[chosen], strict=True)):
            chosen = other
    return chosen
