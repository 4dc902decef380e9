"""GPTQ: round column by column, each column making up for the errors before it (arXiv 2210.17323).

Shapes: N outputs, K inputs, G groups, T tokens. X_q [T, K] is the layer's input behind the quantized prefix, X the same
input in the original model. H = X_q^T X_q and M = (X - X_q)^T X_q, both means over tokens.

    minimise over Q on the grid     |X W^T - X_q Q^T|^2  =  tr((W* - Q) H (W* - Q)^T) + const,    W* = W + W M H^-1

Paper -> code: H^-1's Cholesky rows -> `sweep.Factor.upper` (LDLQ form, same codes); percdamp -> `damp`; act_order ->
`act_order`; lazy batch updates -> the blocks of `sweep.sweep`.

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
Departs from the authors' code:
- a group's scale is fitted from weights that carry all feedback so far (the code leaves out the current block's);
- dead channels (never active) get the mean diagonal, are left out of that mean, and keep their rounded weight;
- damping that is too small is raised and reported, never replaced by plain rounding.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from compress.calibration.hessian import Hessian, HessianResult
from compress.calibration.stats import StatisticFactory
from compress.comm import Comm
from compress.errors import InputError
from compress.passes.base import Site
from compress.passes.polish import GridRule, Polish
from compress.passes.quantize import QuantizeWeights
from compress.passes.solve import quadratic, solve_rows
from compress.passes.sweep import Factor, damped, factorize, sweep
from compress.weights.decision import Decision
from compress.weights.grid import Grid, Quantized, fit_matrix, quantize, to_quantized

ActOrder = Literal["none", "static", "group"]
# However many tokens: just enough damping to divide by the diagonal of H.
POLISH_DAMP = 1e-6
# What a layer may get, the careful ones first: plain rounding, everything but the drift correction, everything.
Solution = Literal["rounding", "gptq without drift", "gptq"]
SOLUTIONS: tuple[Solution, ...] = get_args(Solution)
# Rows of a layer by which its solutions are judged: what one row gains resembles what the others do.
JUDGED_ROWS = 128


@dataclass(frozen=True, kw_only=True)
class GPTQ(QuantizeWeights):
    """GPTQ with input-drift correction."""

    name: ClassVar[str] = "gptq"

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
        return {**super().needs(), "hessian": partial(Hessian, dtype=dtype, reference=self.needs_reference)}

    @property
    def needs_reference(self) -> bool:
        return self.drift > 0

    def apply(self, site: Site) -> dict[str, Decision]:
        statistics: HessianResult = site.stats["hessian"]
        ready, inputs = self._prepare(statistics), self.input_codes(site)
        chosen: dict[str, Solution] = dict.fromkeys(site.weights, "gptq")
        if self.shrink and statistics.few:
            chosen = self._borne_out(site, statistics)
        decisions = {}
        for solution in sorted(set(chosen.values())):
            names = [n for n in site.weights if chosen[n] == solution]
            for name, solved in self._solve(restricted(site, names), ready, solution).items():
                figures = self._figures(site, name, solved, ready)
                decisions[name] = Decision(solved.quantized, {**figures, "solution": solution}, inputs.get(name))
        return {name: decisions[name] for name in site.weights}

    def _prepare(self, statistics: HessianResult) -> "_Ready":
        if self.shrink:
            statistics = statistics.shrunk()
        hessian = statistics.hessian
        # What the part of H off its diagonal that is relied on has in noise, as a ridge regression counts it.
        noise = len(hessian) / max(statistics.tokens, 1)
        relied = 1 - statistics.shrinkage if self.shrink else 1.0
        order = column_order(hessian.diagonal(), self.act_order, self.weight_grid().group_size)
        ordered = hessian[order][:, order]
        factor = factorize(ordered, self.damp)
        ridge = factor.damp + (noise if self.shrink else 0)
        correction = drift_correction(statistics, ridge) if self.drift else None
        return _Ready(statistics, order, ordered, factor, correction, POLISH_DAMP + relied * noise)

    def _borne_out(self, site: Site, statistics: HessianResult) -> dict[str, Solution]:
        """For every layer the boldest solution that, found by either half of the tokens, is better on the other.

        The loss on the tokens that the codes were fitted to says nothing here: it falls with everything that is
        fitted, noise included. Half the tokens serve a solution worse than all of them, so what passes is safe.
        """
        if not statistics.halves:
            return dict.fromkeys(site.weights, "rounding")
        rows = {n: w[:: -(-len(w) // JUDGED_ROWS)] for n, w in site.weights.items()}
        part = replace(site, weights=rows)
        losses: dict[str, dict[Solution, list[float]]] = {n: {} for n in rows}
        for fitted, judge in (statistics.halves, statistics.halves[::-1]):
            ready = self._prepare(fitted)
            for solution in SOLUTIONS if ready.correction is not None else SOLUTIONS[:1] + SOLUTIONS[2:]:
                for name, solved in self._solve(part, ready, solution).items():
                    loss = loss_on(site.comm, rows[name].to(judge.hessian.dtype), solved.quantized, judge)
                    losses[name].setdefault(solution, []).append(loss)
        return {name: boldest(found) for name, found in losses.items()}

    def _solve(self, site: Site, ready: "_Ready", solution: Solution) -> dict[str, "_Solved"]:
        """The site's layers by one solution."""
        solved: dict[str, _Solved] = {}
        for names in stacks(site):
            scale_dtype = site.scale_dtypes[names[0]]
            weights = [site.weights[n].to(ready.hessian.dtype) for n in names]
            if solution == "rounding":
                found = [quantize(w, self.weight_grid().with_range("minmax"), scale_dtype) for w in weights]
                solved |= {n: _Solved(q, w, 0.0) for n, q, w in zip(names, found, weights, strict=True)}
                continue
            aims = [self._aim(site.comm, w, ready if solution == "gptq" else ready.without_drift()) for w in weights]
            # Rows are independent given H: layers are solved as one tall weight.
            target = torch.cat([t for t, _ in aims])
            scales = self._static_scales([t for t, _ in aims], ready.hessian, scale_dtype)
            solve = partial(self._solve_rows, ready, scale_dtype, scales)
            whole, first = solve_rows(site.comm, target, self.weight_grid(), solve), 0
            for name, (aim, share) in zip(names, aims, strict=True):
                piece = whole.rows(slice(first, first + len(aim)))
                first += len(aim)
                if self.per_tensor:
                    zero_point = None if piece.zero_point is None else piece.zero_point[:1]
                    piece = Quantized(piece.codes, piece.scale[:1], zero_point, piece.grid)
                solved[name] = _Solved(piece, aim, share)
        return solved

    def _aim(self, comm: Comm, weight: Tensor, ready: "_Ready") -> tuple[Tensor, float]:
        """What the codes of one layer aim at, and the share of the drift correction that is in it."""
        if ready.correction is None:
            return weight, 0.0
        step, noise = (None if matrix is None else weight @ matrix for matrix in ready.correction)
        assert step is not None
        share = self.drift * (reliability(comm, step, noise, ready.hessian) if self.shrink else 1.0)
        return weight + share * step, share

    def _solve_rows(
        self,
        ready: "_Ready",
        scale_dtype: torch.dtype,
        static: tuple[Tensor, Tensor] | None,
        weight: Tensor,
        rows: slice,
    ) -> Quantized:
        return gptq(
            weight,
            ready.ordered,
            ready.factor,
            ready.order,
            grid=self.weight_grid(),
            scale_dtype=scale_dtype,
            static=None if static is None else (static[0][rows], static[1][rows]),
            refit=self.refit,
            sweeps=self.sweeps,
            polish_damp=ready.polish_damp,
        )[0]

    def _static_scales(
        self, targets: list[Tensor], hessian: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor] | None:
        """Scales fixed before the sweep, [N, G] of the layers below each other, where the options ask for that."""
        grid = self.weight_grid()
        if not self.per_tensor and self.act_order != "static":
            return None
        if not self.per_tensor:
            return fit_matrix(torch.cat(targets), grid, dtype, hessian.diagonal())
        scales, zeros = [], []
        for part in targets:
            scale, zero_point = fit_matrix(part, grid, dtype)
            scales.append(scale.expand(len(part), 1))
            zeros.append(zero_point.expand(len(part), 1))
        return torch.cat(scales), torch.cat(zeros)

    def _figures(self, site: Site, name: str, solved: "_Solved", ready: "_Ready") -> dict[str, float | int | str]:
        hessian, target = ready.hessian, solved.target
        nearest = quantize(
            site.weights[name].to(hessian.dtype),
            self.weight_grid().with_range("minmax"),
            site.scale_dtypes[name],
        )
        energy = quadratic(site.comm, target, hessian) or 1.0
        loss, rtn_loss = (
            quadratic(site.comm, target - q.dequantize(hessian.dtype), hessian) / energy
            for q in (solved.quantized, nearest)
        )
        return {
            "loss": loss,
            "rtn_loss": rtn_loss,
            "damp": ready.factor.damp,
            "dead_channels": int((hessian.diagonal() <= 0).sum()),
            "tokens": ready.statistics.tokens,
            "shrinkage": ready.statistics.shrinkage if self.shrink else 0.0,
            "drift": solved.drift,
        }


@dataclass(frozen=True)
class _Ready:
    """Statistics as they are relied on, and what follows from them for all layers of a site: H in sweep order, its
    factor, the drift correction and the damping of refit and descent."""

    statistics: HessianResult
    order: Tensor
    ordered: Tensor
    factor: Factor
    correction: tuple[Tensor, Tensor | None] | None
    polish_damp: float

    @property
    def hessian(self) -> Tensor:
        return self.statistics.hessian

    def without_drift(self) -> "_Ready":
        return replace(self, correction=None)


@dataclass(frozen=True)
class _Solved:
    """The codes of a layer, the values [N, K] that they aim at, and the share of the drift correction in those."""

    quantized: Quantized
    target: Tensor
    drift: float


def restricted(site: Site, names: list[str]) -> Site:
    """The site with some of its layers only."""
    dtypes = {n: dtype for n, dtype in site.scale_dtypes.items() if n in names}
    return replace(site, weights={n: site.weights[n] for n in names}, scale_dtypes=dtypes)


def loss_on(comm: Comm, weight_NK: Tensor, quantized: Quantized, judge: HessianResult) -> float:
    """Mean over tokens of |X_ref W^T - X Q^T|^2, less the part of it that does not depend on Q."""
    error = weight_NK - quantized.dequantize(weight_NK.dtype)
    loss = quadratic(comm, error, judge.hessian)
    if judge.drift is None:
        return loss
    mine = comm.rows_of(len(error))
    return loss + 2 * float(comm.all_reduce(((weight_NK[mine] @ judge.drift) * error[mine]).sum()))


def boldest(losses: Mapping[Solution, Sequence[float]]) -> Solution:
    """Of solutions, the careful ones first, the last that has a lower loss on every half than the one it replaces."""
    chosen, *bolder = losses
    for other in bolder:
        if all(new < old for new, old in zip(losses[other], losses[chosen], strict=True)):
            chosen = other
    return chosen


def stacks(site: Site) -> list[list[str]]:
    """The site's layers, those that store their scales in one dtype together."""
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name, dtype in site.scale_dtypes.items():
        by_dtype.setdefault(dtype, []).append(name)
    return list(by_dtype.values())


def column_order(diagonal_K: Tensor, act_order: ActOrder, group_size: int | None) -> Tensor:
    """The permutation [K] in which columns are visited; dead columns come last (of their group, for `group`)."""
    columns = len(diagonal_K)
    if act_order == "none":
        return torch.arange(columns, device=diagonal_K.device)
    if act_order == "static" or group_size is None:
        return torch.argsort(diagonal_K, descending=True, stable=True)
    groups = diagonal_K.view(-1, group_size)
    inside = torch.argsort(groups, dim=1, descending=True, stable=True)
    outside = torch.argsort(groups.amax(1), descending=True, stable=True)
    starts = torch.arange(0, columns, group_size, device=diagonal_K.device).unsqueeze(1)
    return (inside + starts)[outside].reshape(-1)


def drift_correction(statistics: HessianResult, damp: float) -> tuple[Tensor, Tensor | None] | None:
    """(D, Z), each [K, K]: W + W D is the ridge-regression weight; Z is D of noise alone (None: not known).

    None where nothing is compressed before this layer.
    """
    assert statistics.drift is not None
    if not bool(statistics.drift.any()):
        return None
    known = [m for m in (statistics.drift, statistics.contrast) if m is not None]
    # The inverse is symmetric: transposed, the products on the right are solutions of one system.
    solved = torch.linalg.solve(damped(statistics.hessian, damp), torch.cat(known).t()).t()
    found = solved.split(len(statistics.hessian))
    return found[0], found[1] if len(found) > 1 else None


def reliability(comm: Comm, step_NK: Tensor, noise_NK: Tensor | None, hessian_KK: Tensor) -> float:
    """The share of a correction to apply, 0 to 1: 1 - tr(Z H Z^T) / tr(D H D^T); 0 where the noise is not known."""
    if noise_NK is None:
        return 0.0
    size = quadratic(comm, step_NK, hessian_KK)
    return max(0.0, 1 - quadratic(comm, noise_NK, hessian_KK) / size) if size > 0 else 0.0


def gptq(
    weight_NK: Tensor,
    hessian_KK: Tensor,
    factor: Factor,
    order_K: Tensor,
    *,
    grid: Grid,
    scale_dtype: torch.dtype,
    static: tuple[Tensor, Tensor] | None = None,
    refit: int = 0,
    sweeps: int = 0,
    polish_damp: float = POLISH_DAMP,
) -> tuple[Quantized, Tensor]:
    """Quantize rows of a weight. Pure: no rank, no device, no state.

    weight [N, K] in its own column order; hessian [K, K] and its factor in the order of `order_K`. static: (scale,
    zero_point) [N, G] fixed beforehand. Returns the quantized weight and the loss tr(E H E^T) of each row, [N], in
    the damped Hessian for the plain sweep and recomputed after refit or coordinate descent.
    """
    rows, columns = weight_NK.shape
    length = columns if grid.granularity == "tensor" else grid.group_length(columns)
    weight = weight_NK[:, order_K]
    group_of = (order_K // length).tolist()
    groups = columns // length
    if static is None:
        scale, zero_point = weight.new_ones(groups, rows), weight.new_zeros(groups, rows)
    else:
        scale, zero_point = (t.t().contiguous() for t in static)
    rule = GridRule(
        grid,
        scale_dtype,
        0 if static is not None else length,
        group_of,
        hessian_KK.diagonal(),
        weight.new_empty(columns, rows),
        scale,
        zero_point,
    )
    values, loss = sweep(weight, factor, rule)
    if refit or sweeps:
        state = Polish(weight, values, rule, damped(hessian_KK, polish_damp))
        for step in range(max(refit, sweeps)):
            if step < refit:
                state.refit_scales()
            if step < sweeps:
                state.descend()
        loss = state.loss()
    codes = torch.empty_like(weight)
    codes[:, order_K] = rule.codes.t()
    return to_quantized(codes, scale.t().contiguous(), zero_point.t().contiguous(), grid, scale_dtype), loss
