"""The options and the course of the passes that solve for the least error of what a layer returns.

    problem     statistics, as far as the tokens carry them              Hessian, damping, drift correction
    solve       a target for each layer, then `solve_rows`, by `compress.solvers`
    prove       with very few tokens: which of its solutions a layer gets
    figures     what the record says

`passes.gptq` says why, with the equations.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from compress.base.collectives import Comm
from compress.base.errors import one_of
from compress.base.threads import one_thread
from compress.passes.protocol.base import Pass
from compress.passes.protocol.sites import Site
from compress.passes.protocol.solve import Rows, solve_stacked
from compress.passes.protocol.stages import Decide
from compress.solvers.hessian_with_drift import (
    POLISH_DAMP,
    ActOrder,
    Problem,
    check_reliance,
    drift_correction,
    quadratic,
)
from compress.solvers.outliers import has_outliers, share_of_outliers
from compress.solvers.statistics.hessian import Hessian, HessianResult, Precision, precision
from compress.solvers.statistics.input_statistics import StatisticFactory
from compress.weights.decision import Decision, Figures
from compress.weights.matrix import Matrix

# A layer's weight, and its own figures.
Result = tuple[Matrix, Figures]
# The values [N, K] that a layer aims at, and the share of the drift correction in them.
Target = tuple[Tensor, float]
# Solutions, the careful ones first: plain rounding, everything but the drift correction, everything.
Solution = Literal["rounding", "gptq without drift", "gptq"]
SOLUTIONS: tuple[Solution, ...] = get_args(Solution)
# Rows of a layer by which its solutions are judged: what one row gains resembles what the others do.
JUDGED_ROWS = 128
# Weights that are solved at a time where the device is short of memory: of each there are some ten copies.
AT_ONCE = 2**24
# Multiplications of the sweeps of a site, from which several threads are worth it.
WORTH_THREADS = 2**28


@dataclass(frozen=True, kw_only=True)
class SecondOrder(Pass):
    """A pass that solves column by column for the least error of a layer's output."""

    # What the record calls the loss of `nearest`, and the solutions of a layer.
    nearest_loss: ClassVar[str] = "rtn_loss"
    called: ClassVar[Mapping[Solution, str]] = {solution: solution for solution in SOLUTIONS}

    damp: float = 0.01
    """above 0, up to 1: damping, as a share of the mean diagonal of H; raised where needed."""

    drift: float = 1.0
    """0 to 1: how much to correct for the change of a layer's input by earlier quantized layers; 0: as in the paper."""

    act_order: ActOrder = "none"
    """Order of columns. none: as they are; static: by decreasing diag(H), scales fixed first; group: the same inside
    each group, then the groups."""

    shrink: bool = True
    """Regularize the statistics where there are few calibration tokens."""

    statistics: Precision = "float32"
    """Dtype in which H is summed and codes are solved."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_reliance(self.damp, self.drift, self.statistics)
        one_of("act_order", self.act_order, get_args(ActOrder))

    @property
    @abstractmethod
    def group_length(self) -> int | None:
        """Inputs that share a scale; None: all of them."""

    @abstractmethod
    def nearest(self, site: Site, name: str, dtype: torch.dtype) -> Matrix:
        """A layer's weight, as it is now, rounded to nearest: its solution where nothing better is borne out."""

    def rows(self, site: Site, name: str, target_NK: Tensor, problem: Problem) -> dict[str, Tensor]:
        """Arguments of `solve_rows` that have a row for each output of a layer, its target among them."""
        return {"weight_NK": target_NK}

    @abstractmethod
    def solve_rows(self, site: Site, problem: Problem, scale_dtype: torch.dtype, **rows: Any) -> Matrix:
        """Solve rows of the site's layers, by functions of tensors from `compress.solvers`."""

    @property
    def together(self) -> int:
        """Number of consecutive rows solved together."""
        return 1

    def needs(self) -> Mapping[str, StatisticFactory]:
        hessian = partial(Hessian, dtype=precision(self.statistics), reference=self.drift > 0)
        return {**super().needs(), "hessian": hessian}

    def without_reference(self) -> Pass:
        return replace(self, drift=0.0) if self.calibrated else self

    @property
    def decide_stage(self) -> Decide:
        return replace(super().decide_stage, reference=self.drift > 0)

    def apply(self, site: Site) -> dict[str, Decision]:
        return {name: Decision(*result) for name, result in self.solve_site(site).items()}

    def solve_site(self, site: Site) -> dict[str, Result]:
        """{layer: (its weight, figures)}."""
        with one_thread(_is_small(site)):
            statistics: HessianResult = site.stats["hessian"]
            chosen: dict[str, Solution] = dict.fromkeys(site.weights, "gptq")
            if self.shrink and statistics.few:
                chosen = dict.fromkeys(site.weights, "rounding")
                if statistics.halves:
                    chosen = self.prove(site, statistics.halves)
            problem = self.problem(statistics)
            results: dict[str, Result] = {}
            for solution in sorted(set(chosen.values())):
                part = site.rows({n: slice(None) for n in site.weights if chosen[n] == solution})
                targets = self.targets(part, problem, solution)
                # Of the solutions, the first alone needs it, and it is as large as H.
                problem = replace(problem, correction=None)
                for name, (weight, own) in self.solve(part, problem, targets, solution).items():
                    figures = self.figures(site, name, weight, targets[name], problem)
                    results[name] = weight, {**figures, **own, "solution": self.called[solution]}
        return {name: results[name] for name in site.weights}

    def problem(self, statistics: HessianResult) -> Problem:
        """The problem of all layers of a site, from its statistics as far as they are relied on."""
        waits = statistics.waits
        # While its matrices wait on the host, one copy of H.
        statistics = statistics.shrunk() if self.shrink else replace(statistics, held=statistics.hessian)
        noise = statistics.noise
        # Of the part that is relied on.
        share = 1 - statistics.shrinkage if self.shrink else 1.0
        order = self.act_order, self.group_length
        problem = Problem.of(statistics.hessian, self.damp, *order, POLISH_DAMP + share * noise)
        problem = problem.aside() if waits else problem
        if not self.drift:
            return problem
        return replace(problem, correction=drift_correction(statistics, problem.damp + noise * self.shrink))

    def prove(self, site: Site, halves: Sequence[HessianResult]) -> dict[str, Solution]:
        """For every layer the boldest solution that, found by either half of the tokens, is better on the other.

        The loss on the tokens that codes were fitted to says nothing here: it falls with everything that is fitted,
        noise included. Half the tokens serve a solution worse than all of them, so what passes is safe.
        """
        part = site.rows({n: slice(None, None, -(-len(w) // JUDGED_ROWS)) for n, w in site.weights.items()})
        own = {key: value for key, value in part.stats.items() if key != "curvature"}  # the layer's own loss is judged
        part = replace(part, stats=own)
        losses: dict[str, dict[Solution, list[float]]] = {n: {} for n in site.weights}
        for fitted, judge in zip(halves, reversed(halves), strict=True):
            problem = self.problem(fitted)
            for solution in SOLUTIONS if problem.correction is not None else (SOLUTIONS[0], SOLUTIONS[-1]):
                targets = self.targets(part, problem, solution)
                for name, (weight, _) in self.solve(part, problem, targets, solution).items():
                    loss = loss_on(site.comm, part.wanted(name).to(judge.hessian.dtype), weight, judge)
                    losses[name].setdefault(solution, []).append(loss)
        return {name: boldest(of_layer) for name, of_layer in losses.items()}

    def targets(self, site: Site, problem: Problem, solution: Solution) -> dict[str, Target]:
        """{layer: its target by a solution}."""
        weights = {n: site.wanted(n).to(problem.hessian.dtype) for n in site.weights}
        if problem.correction is None or solution != "gptq":
            return {n: (w, 0.0) for n, w in weights.items()}
        how = (problem.hessian, self.drift, self.shrink)
        targets = {n: problem.correction.target(site.comm, w, *how) for n, w in weights.items()}
        problem.correction.forget()
        return targets

    def solve(
        self, site: Site, problem: Problem, targets: Mapping[str, Target], solution: Solution
    ) -> dict[str, Result]:
        """The site's layers by one solution, with figures of a pass's own. Passes whose weights have further terms
        extend it."""
        if solution == "rounding":
            return {n: (self.nearest(site, n, problem.hessian.dtype), {}) for n in site.weights}
        solved = self.solve_targets(site, {n: target for n, (target, _) in targets.items()}, problem)
        return {name: (weight, {}) for name, weight in solved.items()}

    def solve_targets(self, site: Site, targets: Mapping[str, Tensor], problem: Problem) -> dict[str, Matrix]:
        """`solve_rows` over the rows of all layers, each rank its share."""
        rows: dict[str, Rows] = {n: self.rows(site, n, target, problem) for n, target in targets.items()}
        most = AT_ONCE if problem.waits else None
        return solve_stacked(site, rows, partial(self.solve_rows, site, problem), self.together, most)

    def references(self, site: Site, name: str, dtype: torch.dtype) -> dict[str, Matrix]:
        """{figure: the weight whose loss it is} of the weights that the record compares a layer's with."""
        return {self.nearest_loss: self.nearest(site, name, dtype)}

    def figures(self, site: Site, name: str, weight: Matrix, target: Target, problem: Problem) -> Figures:
        """A layer's figures for the record."""
        hessian, statistics = problem.hessian, site.stats["hessian"]
        energy = quadratic(site.comm, target[0], hessian) or 1.0
        losses = {
            figure: quadratic(site.comm, target[0] - other.dequantize(hessian.dtype), hessian) / energy
            for figure, other in {"loss": weight, **self.references(site, name, hessian.dtype)}.items()
        }
        return {
            **losses,
            "damp": problem.damp,
            "dead_channels": int((hessian.diagonal() <= 0).sum()),
            "tokens": statistics.tokens,
            "shrinkage": statistics.shrinkage if self.shrink else 0.0,
            "drift": target[1],
            **({"outliers": share_of_outliers(weight)} if has_outliers(weight) else {}),
        }


def _is_small(site: Site) -> bool:
    """True on a CPU for layers whose sweeps several threads would not shorten."""
    sweeps = [rows * columns**2 for rows, columns in (weight.shape for weight in site.weights.values())]
    on_cpu = all(weight.device.type == "cpu" for weight in site.weights.values())
    return on_cpu and sum(sweeps) < WORTH_THREADS


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
