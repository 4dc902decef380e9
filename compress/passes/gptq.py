"""GPTQ: round column by column, each column making up for the errors before it (arXiv 2210.17323).

Shapes: N outputs, K inputs, G groups, T tokens. X_q [T, K] is the layer's input behind the quantized prefix, X the same
input in the original model. H = X_q^T X_q and M = (X - X_q)^T X_q, both means over tokens.

    minimise over Q on the grid     |X W^T - X_q Q^T|^2  =  tr((W* - Q) H (W* - Q)^T) + const,    W* = W + W M H^-1

Paper -> code: the algorithm, a function of tensors -> `columns.gptq`; H^-1's Cholesky rows -> `sweep.Factor.upper`
(LDLQ form, same codes); percdamp -> `damp`; act_order -> `act_order`; lazy batch updates -> the blocks of
`sweep.sweep`.

Departs from the paper:
- `drift` aims at W* rather than W: it repairs, in this layer, what quantizing the layers before it did to its input.
  The target W + a W D, D = M (H + damp)^-1, is GPTQ at a = 0 and the exact optimum at a = 1. Close relatives are GPTAQ
  (arXiv 2504.02692) and Qronos (arXiv 2505.11695).
- `shrink`: H and D are estimates from T tokens. With few of them (T < 4 K, say) the codes fit what these tokens happen
  to have in common, and do worse than rounding on others. Three closed forms, which fade as T / K grows, prevent it:
  H is shrunk towards its diagonal by as much as lowers its expected squared error the most (Ledoit and Wolf 2004; see
  `calibration.hessian.Hessian`). D is a ridge regression, whose best damping is K / T over the ratio of signal to noise
  (Dobriban and Wager 2018, arXiv 1507.03003): K / T is added. Of that D, a layer aims at the share a that is no noise.
  Z, which is D from the difference between two halves of the tokens (`contrast`), has the noise of D and nothing else:

      E tr(W D H D^T W^T) = signal + noise,  E tr(W Z H Z^T W^T) = noise,  a = signal / (signal + noise)

  This is a James-Stein factor whose noise is measured, for tokens of one text are not independent. Last, with very few
  tokens (`calibration.hessian.FEW`) a layer gets only what they bear out: its codes are solved by each half of them and
  judged on the other. The drift correction, then GPTQ as a whole, have to win on both, or the layer goes without;
  figure `solution` says what it got, and the run how many layers got less than was asked for.
- `act_order`: "static" visits columns by falling diag(H) with scales fixed beforehand, "group" orders columns inside
  each group and then the groups (GAR, arXiv 2505.14638). Neither needs an index at inference.
- `refit` recomputes each scale in closed form for the codes it has; `sweeps` of cyclic coordinate descent then move
  single codes while that lowers the loss (`passes.polish`). Free to move every code, they fit noise more than the
  sweep does: H is damped by K / T for them, too, of the part of H off its diagonal that is left.
- `clip` searches each group's range for the least squared error, weighted by diag(H).
- a weight that an earlier pass has pruned has the code of 0, and no say in a range; survivors make up for it as they
  do for rounding (as in SparseGPT, arXiv 2301.00774, for a mask that is given).
Departs from the authors' code:
- a group's scale is fitted from weights that carry all feedback so far (the code leaves out the current block's);
- dead channels (never active) get the mean diagonal, are left out of that mean, and keep their rounded weight;
- damping that is too small is raised and reported, never replaced by plain rounding.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from compress.calibration.hessian import Hessian, HessianResult
from compress.calibration.stats import StatisticFactory
from compress.errors import InputError
from compress.passes.columns import POLISH_DAMP, ActOrder, Ordered, ordered, solve_ordered
from compress.passes.drift import Correction, aimed, drift_correction
from compress.passes.halves import borne_out
from compress.passes.quantize import QuantizeWeights
from compress.passes.sites import Site
from compress.passes.solve import quadratic, solve_stacked
from compress.passes.stages import Decide
from compress.weights.decision import Decision
from compress.weights.grid import Quantized, fit_matrix, quantize
from compress.weights.terms import Weight

# What a layer may get, the careful ones first: plain rounding, everything but the drift correction, everything.
Solution = Literal["rounding", "gptq without drift", "gptq"]
SOLUTIONS: tuple[Solution, ...] = get_args(Solution)


@dataclass(frozen=True, kw_only=True)
class GPTQ(QuantizeWeights):
    """GPTQ with input-drift correction."""

    name: ClassVar[str] = "gptq"
    keeps_zeros: ClassVar[bool] = True

    damp: float = 0.01
    """above 0, up to 1: added to the diagonal of H, as a share of its mean; raised where that is not enough."""

    drift: float = 1.0
    """0 to 1: how much of the change of a layer's input is made up for, of what `shrink` leaves; 0 is the paper."""

    act_order: ActOrder = "none"
    """Visit columns by falling diag(H): with scales fixed beforehand (static), or inside groups and the groups."""

    clip: bool = True
    """Shrink each range to the one of least error, weighted by diag(H) (fp8: widen it)."""

    refit: int = 2
    """0 or more: rounds in which scales are fitted to the codes once the sweep is over."""

    sweeps: int = 2
    """0 or more: rounds of coordinate descent, in which single codes move once the sweep is over."""

    shrink: bool = True
    """Rely on statistics only as far as the calibration tokens carry."""

    statistics: Literal["float32", "float64"] = "float32"
    """The dtype in which H is summed, and codes are solved."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.damp <= 1:
            raise InputError(f"damp {self.damp}; allowed: above 0, at most 1 (0.01 is usual)")
        if not 0 <= self.drift <= 1:
            raise InputError(f"drift {self.drift}; allowed: 0 (off) to 1")
        if self.act_order not in ("none", "static", "group"):
            raise InputError(f"act_order {self.act_order!r}; allowed: none, static, group")
        if self.statistics not in ("float32", "float64"):
            raise InputError(f"statistics {self.statistics!r}; allowed: float32, float64")
        for option in ("refit", "sweeps"):
            if getattr(self, option) < 0:
                raise InputError(f"{option} {getattr(self, option)}; allowed: 0 or more rounds")
        if self.per_tensor and self.refit:
            raise InputError("refit needs a scale per channel or group; set refit=0 with per_tensor")

    def needs(self) -> Mapping[str, StatisticFactory]:
        dtype = torch.float64 if self.statistics == "float64" else torch.float32
        return {**super().needs(), "hessian": partial(Hessian, dtype=dtype, reference=self.drift > 0)}

    @property
    def decide_stage(self) -> Decide:
        return replace(super().decide_stage, reference=self.drift > 0)

    def apply(self, site: Site) -> dict[str, Decision]:
        statistics: HessianResult = site.stats["hessian"]
        relied, inputs = self._relied(statistics), self.input_codes(site)
        chosen: dict[str, Solution] = dict.fromkeys(site.weights, "gptq")
        if self.shrink and statistics.few:
            chosen = dict.fromkeys(site.weights, "rounding")
            if statistics.halves:
                chosen = borne_out(site, statistics.halves, self._by_every_solution)
        decisions = {}
        for solution in sorted(set(chosen.values())):
            part = site.rows({n: slice(None) for n in site.weights if chosen[n] == solution})
            for name, solved in self._solve(part, relied, solution).items():
                figures = self._figures(site, name, solved, relied)
                decisions[name] = Decision(solved.weight, {**figures, "solution": solution}, inputs.get(name))
        return {name: decisions[name] for name in site.weights}

    def _relied(self, statistics: HessianResult) -> "Relied":
        if self.shrink:
            statistics = statistics.shrunk()
        hessian = statistics.hessian
        # What the part of H off its diagonal that is relied on has in noise, as a ridge regression counts it.
        noise = len(hessian) / max(statistics.tokens, 1)
        share = 1 - statistics.shrinkage if self.shrink else 1.0
        seen = ordered(hessian, self.damp, self.act_order, self.weight_grid().group_size)
        correction = drift_correction(statistics, seen.factor.damp + noise * self.shrink) if self.drift else None
        return Relied(statistics, seen, correction, POLISH_DAMP + share * noise)

    def _by_every_solution(
        self, site: Site, statistics: HessianResult
    ) -> Iterator[tuple[Solution, dict[str, Quantized | Weight]]]:
        relied = self._relied(statistics)
        for solution in SOLUTIONS:
            if relied.correction is not None or solution != "gptq without drift":
                yield solution, {n: solved.weight for n, solved in self._solve(site, relied, solution).items()}

    def _solve(self, site: Site, relied: "Relied", solution: Solution) -> dict[str, "Aimed"]:
        """The site's layers by one solution."""
        hessian, grid = relied.hessian, self.weight_grid()
        weights = {n: site.wanted(n).to(hessian.dtype) for n in site.weights}
        if solution == "rounding":
            return {n: Aimed(self._nearest(site, n, hessian.dtype), w, 0.0) for n, w in weights.items()}
        aims = {n: (w, 0.0) for n, w in weights.items()}
        if relied.correction is not None and solution == "gptq":
            how = (relied.correction, hessian, self.drift, self.shrink)
            aims = {n: aimed(site.comm, w, *how) for n, w in weights.items()}
        pruned = any(site.kept(n) is not None for n in site.weights)
        rows = {n: self._rows(site, n, target, pruned) for n, (target, _) in aims.items()}
        damp = relied.polish_damp
        solve = partial(
            solve_ordered, seen=relied.ordered, grid=grid, refit=self.refit, sweeps=self.sweeps, polish_damp=damp
        )
        codes = solve_stacked(site, rows, grid, lambda **rows: solve(**rows).weight)
        return {n: Aimed(codes[n], target, share) for n, (target, share) in aims.items()}

    def _nearest(self, site: Site, name: str, dtype: torch.dtype) -> Quantized:
        """A layer's weight, as it is now, rounded to nearest."""
        return quantize(site.weights[name].to(dtype), self.weight_grid().with_range("minmax"), site.scale_dtypes[name])

    def _rows(self, site: Site, name: str, target_NK: Tensor, pruned: bool) -> dict[str, Tensor]:
        """The arguments of `solve_ordered` that have a row for each output of a layer. pruned: some layer of the site
        is."""
        rows, survivors = {"weight_NK": target_NK}, target_NK
        if pruned:
            kept = site.kept(name)
            rows["kept_NK"] = torch.ones_like(target_NK, dtype=torch.bool) if kept is None else kept
            survivors = target_NK * rows["kept_NK"]
        if self.per_tensor:
            scale, zero = fit_matrix(survivors, self.weight_grid(), site.scale_dtypes[name])
            rows |= {"scale_NG": scale.expand(len(target_NK), 1), "zero_NG": zero.expand(len(target_NK), 1)}
        return rows

    def _figures(self, site: Site, name: str, solved: "Aimed", relied: "Relied") -> dict[str, float | int | str]:
        hessian, target = relied.hessian, solved.target
        nearest = self._nearest(site, name, hessian.dtype)
        energy = quadratic(site.comm, target, hessian) or 1.0
        loss, rtn_loss = (
            quadratic(site.comm, target - q.dequantize(hessian.dtype), hessian) / energy
            for q in (solved.weight, nearest)
        )
        return {
            "loss": loss,
            "rtn_loss": rtn_loss,
            "damp": relied.ordered.factor.damp,
            "dead_channels": int((hessian.diagonal() <= 0).sum()),
            "tokens": relied.statistics.tokens,
            "shrinkage": relied.statistics.shrinkage if self.shrink else 0.0,
            "drift": solved.drift,
        }


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
    """The codes of a layer, the values [N, K] that they aim at, and the share of the drift correction in those."""

    weight: Quantized | Weight
    target: Tensor
    drift: float
