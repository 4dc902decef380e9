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
  `compress.stats.Hessian`). D is a ridge regression, whose best damping is K / T over the ratio of signal to noise
  (Dobriban and Wager 2018, arXiv 1507.03003): K / T is added. Of that D, a layer aims at the share a that is no noise.
  Z, which is D from the difference between two halves of the tokens (`contrast`), has the noise of D and nothing else:

      E tr(W D H D^T W^T) = signal + noise,  E tr(W Z H Z^T W^T) = noise,  a = signal / (signal + noise)

  This is a James-Stein factor whose noise is measured, for tokens of one text are not independent.
- `act_order`: "static" visits columns by falling diag(H) with scales fixed beforehand, "group" orders columns inside
  each group and then the groups (GAR, arXiv 2505.14638). Neither needs an index at inference.
- `refit` recomputes each scale in closed form for the codes it has; `sweeps` of cyclic coordinate descent then move
  single codes while that lowers the loss.
Departs from the authors' code:
- a group's scale is fitted from weights that carry all feedback so far (the code leaves out the current block's);
- dead channels (never active) get the mean diagonal, are left out of that mean, and keep their rounded weight;
- damping that is too small is raised and reported, never replaced by plain rounding.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor

from compress.comm import Comm
from compress.errors import InputError
from compress.grid import Grid, Quantized, decode, encode, fit, fit_matrix, quantize, round_scale, to_quantized
from compress.passes.base import Decision, QuantizeWeights, Site, quadratic, solve_rows
from compress.stats import Hessian, HessianResult, StatisticFactory
from compress.sweep import BLOCK, Factor, damped, factorize, sweep

ActOrder = Literal["none", "static", "group"]
# Coordinate descent and refit read H with just enough damping to divide by its diagonal.
POLISH_DAMP = 1e-6


@dataclass(frozen=True, kw_only=True)
class GPTQ(QuantizeWeights):
    """GPTQ with input-drift correction.

    damp: added to diag(H), as a share of its mean. drift: 0 (the paper) to 1, of what `shrink` leaves of it.
    act_order: none, static or group. refit, sweeps: rounds of scale refit and of coordinate descent after the sweep.
    shrink: rely on statistics only as far as the calibration tokens carry. statistics: float32 or float64.
    """

    name: ClassVar[str] = "gptq"

    damp: float = 0.01
    drift: float = 1.0
    act_order: ActOrder = "none"
    clip: bool = True
    refit: int = 2
    sweeps: int = 2
    shrink: bool = True
    statistics: Literal["float32", "float64"] = "float32"

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
        if self.shrink:
            statistics = statistics.shrunk()
        hessian = statistics.hessian
        order = column_order(hessian.diagonal(), self.act_order, self.weight_grid().group_size)
        ordered = hessian[order][:, order]
        factor = factorize(ordered, self.damp)
        ridge = factor.damp + (len(hessian) / max(statistics.tokens, 1) if self.shrink else 0)
        correction = drift_correction(statistics, ridge) if self.drift else None
        decisions = {}
        inputs = self.input_codes(site)
        # Rows are independent given H: the site's layers are solved as one tall weight.
        for names in stacks(site):
            scale_dtype = site.scale_dtypes[names[0]]
            weight = torch.cat([site.weights[n] for n in names]).to(hessian.dtype)
            heights = [len(site.weights[n]) for n in names]
            moved = [self._corrected(site, part, correction, hessian) for part in weight.split(heights)]
            target, shares = torch.cat([t for t, _ in moved]), dict(zip(names, (s for _, s in moved), strict=True))
            solve = partial(
                self._solve,
                ordered,
                factor,
                order,
                scale_dtype,
                self._static_scales(site, names, target, hessian, scale_dtype),
            )
            quantized = solve_rows(site.comm, target, self.weight_grid(), solve)
            first = 0
            for name in names:
                rows = slice(first, first + len(site.weights[name]))
                first = rows.stop
                piece = quantized.rows(rows)
                if self.per_tensor:
                    zero_point = None if piece.zero_point is None else piece.zero_point[:1]
                    piece = Quantized(piece.codes, piece.scale[:1], zero_point, piece.grid)
                nearest = quantize(weight[rows], self.weight_grid().with_range("minmax"), scale_dtype)
                energy = quadratic(site.comm, target[rows], hessian) or 1.0
                decisions[name] = Decision(
                    piece,
                    {
                        "loss": quadratic(site.comm, target[rows] - piece.dequantize(hessian.dtype), hessian) / energy,
                        "rtn_loss": quadratic(site.comm, target[rows] - nearest.dequantize(hessian.dtype), hessian)
                        / energy,
                        "damp": factor.damp,
                        "dead_channels": int((hessian.diagonal() <= 0).sum()),
                        "tokens": statistics.tokens,
                        "shrinkage": statistics.shrinkage if self.shrink else 0.0,
                        "drift": shares[name],
                    },
                    inputs.get(name),
                )
        return decisions

    def _corrected(
        self, site: Site, weight: Tensor, correction: tuple[Tensor, Tensor | None] | None, hessian: Tensor
    ) -> tuple[Tensor, float]:
        """What the codes of one layer aim at, and the share of the drift correction that is in it."""
        if correction is None:
            return weight, 0.0
        step, noise = (None if matrix is None else weight @ matrix for matrix in correction)
        assert step is not None
        share = self.drift * (reliability(site.comm, step, noise, hessian) if self.shrink else 1.0)
        return weight + share * step, share

    def _solve(
        self,
        hessian: Tensor,
        factor: Factor,
        order: Tensor,
        scale_dtype: torch.dtype,
        static: tuple[Tensor, Tensor] | None,
        weight: Tensor,
        rows: slice,
    ) -> Quantized:
        given = None if static is None else (static[0][rows], static[1][rows])
        return gptq(
            weight,
            hessian,
            factor,
            order,
            grid=self.weight_grid(),
            scale_dtype=scale_dtype,
            static=given,
            refit=self.refit,
            sweeps=self.sweeps,
        )[0]

    def _static_scales(
        self, site: Site, names: list[str], target_NK: Tensor, hessian: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor] | None:
        """Scales fixed before the sweep, [N, G], where the options ask for that."""
        grid = self.weight_grid()
        if not self.per_tensor and self.act_order != "static":
            return None
        if not self.per_tensor:
            return fit_matrix(target_NK, grid, dtype, hessian.diagonal())
        scales, zeros = [], []
        for part in target_NK.split([len(site.weights[n]) for n in names]):
            scale, zero_point = fit_matrix(part, grid, dtype)
            scales.append(scale.expand(len(part), 1))
            zeros.append(zero_point.expand(len(part), 1))
        return torch.cat(scales), torch.cat(zeros)


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


@dataclass
class _GridRule:
    """Round each target to the grid; scales are fitted when a group begins, or given."""

    grid: Grid
    scale_dtype: torch.dtype
    group: int
    group_of: list[int]
    importance_K: Tensor
    codes: Tensor
    scale: Tensor
    zero_point: Tensor

    def begin(self, column: int, updated_gN: Tensor) -> None:
        importance = self.importance_K[column : column + len(updated_gN)]
        scale, zero_point = fit(updated_gN.t(), self.grid, self.scale_dtype, importance)
        self.scale[self.group_of[column]] = scale
        self.zero_point[self.group_of[column]] = zero_point

    def decide(self, column: int, target_N: Tensor) -> Tensor:
        group = self.group_of[column]
        scale, zero_point = self.scale[group], self.zero_point[group]
        codes = encode(target_N, scale, zero_point, self.grid)
        self.codes[column] = codes
        return decode(codes, scale, zero_point, self.scale_dtype)


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
    rule = _GridRule(
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
        state = _Polish(weight, values, rule, damped(hessian_KK, POLISH_DAMP))
        for step in range(max(refit, sweeps)):
            if step < refit:
                state.refit_scales()
            if step < sweeps:
                state.descend()
        loss = state.loss()
    codes = torch.empty_like(weight)
    codes[:, order_K] = rule.codes.t()
    return to_quantized(codes, scale.t().contiguous(), zero_point.t().contiguous(), grid, scale_dtype), loss


class _Polish:
    """Refit and coordinate descent on the codes of a finished sweep, in sweep order. Updates the rule's tensors."""

    def __init__(self, weight: Tensor, values: Tensor, rule: _GridRule, hessian: Tensor) -> None:
        self.weight, self.values, self.rule, self.hessian = weight, values, rule, hessian
        group_of = torch.tensor(rule.group_of, device=weight.device)
        length = weight.shape[1] // len(rule.scale)
        # Columns of each group, [G, length], in sweep order.
        self.members = torch.argsort(group_of, stable=True).view(-1, length)

    def loss(self) -> Tensor:
        error = self.weight - self.values
        return ((error @ self.hessian) * error).sum(1)

    def refit_scales(self) -> None:
        """For fixed codes the loss is quadratic in each scale: set it to its minimum, group after group."""
        rule = self.rule
        gradient = (self.weight - self.values) @ self.hessian
        for group, columns in enumerate(self.members):
            steps = (rule.codes[columns] - rule.zero_point[group]).t()
            curvature = ((steps @ self.hessian[columns][:, columns]) * steps).sum(1)
            slope = (gradient[:, columns] * steps).sum(1)
            old = rule.scale[group]
            moved = old + slope / curvature.clamp(min=torch.finfo(curvature.dtype).tiny)
            valid = (curvature > 0) & torch.isfinite(moved) & (moved * old > 0)
            new = torch.where(valid, round_scale(moved, rule.scale_dtype), old)
            values = decode(steps, new.unsqueeze(1), torch.zeros_like(new).unsqueeze(1), rule.scale_dtype)
            change = values - self.values[:, columns]
            # Rounding the scale may lose what the step gained: keep the old one there.
            gain = 2 * (gradient[:, columns] * change).sum(1)
            gain = gain - ((change @ self.hessian[columns][:, columns]) * change).sum(1)
            change = torch.where((gain > 0).unsqueeze(1), change, torch.zeros_like(change))
            rule.scale[group] = torch.where(gain > 0, new, old)
            self.values[:, columns] += change
            gradient -= change @ self.hessian[columns]

    def descend(self) -> None:
        """One cyclic pass of coordinate descent: each code moves to the grid point nearest its own optimum.

        Values are rounded to the scale's dtype, so the nearest code may have a farther value: it does not move then.
        """
        rule, columns = self.rule, self.weight.shape[1]
        gradient = (self.weight - self.values) @ self.hessian
        for first in range(0, columns, BLOCK):
            last = min(first + BLOCK, columns)
            block = self.hessian[first:last, first:last].contiguous()
            gradient_BN = gradient[:, first:last].t().contiguous()
            values_BN = self.values[:, first:last].t().contiguous()
            change_BN = torch.empty_like(values_BN)
            for j in range(last - first):
                target = values_BN[j] + gradient_BN[j] / block[j, j]
                codes = rule.codes[first + j].clone()
                value = rule.decide(first + j, target)
                closer = (value - target).abs() < (values_BN[j] - target).abs()
                rule.codes[first + j] = torch.where(closer, rule.codes[first + j], codes)
                value = torch.where(closer, value, values_BN[j])
                change_BN[j] = value - values_BN[j]
                values_BN[j] = value
                gradient_BN.addr_(block[j], change_BN[j], alpha=-1)
            self.values[:, first:last] = values_BN.t()
            gradient -= change_BN.t() @ self.hessian[first:last]
