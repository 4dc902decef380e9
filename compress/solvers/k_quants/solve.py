"""K-quants as functions of tensors: a weight and the Hessian of its input in, the bytes of super-blocks out.

Shapes: N outputs, K inputs, G groups of all super-blocks, S super-blocks, g columns of a group. `passes.k_quants` has
the equations, and says where this departs from GPTQ.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kernels.columns import DecidedColumns, Rounding
from compress.kernels.layouts.k_quants import BLOCK
from compress.kernels.operators.columns import takes
from compress.solvers.candidates import Candidate, least_cost
from compress.solvers.column_sweep import CodeRule, Polish, Solved, group_members
from compress.solvers.hessian_with_drift import DAMP, POLISH_DAMP, Problem
from compress.solvers.k_quants.fit import (
    Coded,
    KSteps,
    affine,
    as_float16,
    coded_groups,
    fit_blocks,
    fit_groups,
    nearest_codes,
    neighbours,
    values_of,
)
from compress.weights.formats.k_quants import KBlocks, KQuant


def k_quant(
    weight_NK: Tensor,
    hessian_KK: Tensor,
    *,
    format_: KQuant,
    damp: float = DAMP,
    refit: int = 0,
    sweeps: int = 0,
    polish_damp: float = POLISH_DAMP,
) -> Solved:
    """Quantize a weight to super-blocks for the least tr(E H E^T). Pure: no rank, no device, no state. Options are as
    in `gptq.gptq`. Raises CompressError where H is not finite."""
    work, problem = weight_NK.to(hessian_KK.dtype), Problem.of(hessian_KK, damp, polish_damp=polish_damp)
    return KRule.of(work, problem, format_).solve(work, problem, refit, sweeps)


@dataclass
class KRule(CodeRule):
    """Round each target to its group's values. A super-block's steps are fitted when the sweep opens it, and hold; the
    codes of a group's scale and minimum are chosen in these steps when it begins.

    cost_K [K]: of an error of each column in the sweep. codes [K, N], of iq4_xs levels; scale, zero [G, N], as
    `fit.Affine` has them, of the codes scales, minima [G, N] and the steps d, dmin [S, N]; all in sweep order but for
    the order of the groups.
    """

    format: KQuant
    group: int
    group_of: list[int]
    cost_K: Tensor
    codes: Tensor
    scale: Tensor
    zero: Tensor
    scales: Tensor
    minima: Tensor
    d: Tensor
    dmin: Tensor
    span: int = BLOCK
    swept: bool = False

    @classmethod
    def of(cls, weight_NK: Tensor, problem: Problem, format_: KQuant) -> "KRule":
        """The rule that decides a weight's columns, before the first is decided."""
        (rows, columns), size = weight_NK.shape, format_.layout.group
        scale, zero, scales, minima = (weight_NK.new_zeros(columns // size, rows) for _ in range(4))
        d, dmin = (weight_NK.new_zeros(columns // BLOCK, rows) for _ in range(2))
        group_of, codes = (problem.order // size).tolist(), weight_NK.new_zeros(columns, rows)
        return cls(format_, size, group_of, problem.diagonal, codes, scale, zero, scales, minima, d, dmin)

    @property
    def per_block(self) -> int:
        """Groups of a super-block."""
        return self.format.layout.groups

    def open(self, column: int, updated_SN: Tensor) -> None:
        x = updated_SN.t().unflatten(1, (self.per_block, -1))
        cost = self.cost_K[column : column + BLOCK].view(self.per_block, -1)
        block = self.group_of[column] // self.per_block
        self.d[block], self.dmin[block] = (step.squeeze(-1) for step in fit_blocks(x, cost, self.format).steps)

    def begin(self, column: int, updated_gN: Tensor) -> None:
        x, group = updated_gN.t(), self.group_of[column]
        cost, steps = self.cost_K[column : column + self.group], self.steps_of(group)
        coded, _ = coded_groups(x, cost, *fit_groups(x, cost, self.format), steps, self.format)
        self.choose(group, coded)

    def steps_of(self, group: int) -> KSteps:
        """The steps [N] of the super-block of a group."""
        block = group // self.per_block
        return KSteps(self.d[block], self.dmin[block])

    def choose(self, group: int, coded: Coded) -> None:
        """From now on a group has these codes [N] of its scale and minimum."""
        self.scales[group], self.minima[group] = coded
        self.scale[group], self.zero[group] = affine(coded, self.steps_of(group), self.format)

    def decide(self, column: int, target_N: Tensor) -> Tensor:
        group = self.group_of[column]
        self.codes[column] = self.format.encode(target_N, self.scale[group], self.zero[group])
        return (self.codes[column] - self.zero[group]) * self.scale[group]

    def codes_at(self, column: int) -> tuple[Tensor, ...]:
        return (self.codes[column],)

    def decisions(self) -> DecidedColumns | None:
        if not takes(self.codes, torch.float32):
            return None
        levels = self.format.levels
        table = None if levels is None else levels.table(self.codes.device)
        rounding = Rounding(0, 2**self.format.layout.bits - 1, torch.float32, free_zero=levels is None, table=table)
        return DecidedColumns(self.codes, self.scale, self.zero, self.groups, rounding, None, None, None, self.cost_K)

    def to_weight(self, problem: Problem, values_NK: Tensor) -> KBlocks:
        codes_NK = problem.restore(self.codes.t())
        return self.format.packed(codes_NK, *(t.t() for t in (self.scales, self.minima, self.d, self.dmin)))

    def refit(self, polish: Polish) -> None:
        """For fixed codes of the weights: of each group the codes of scale and minimum, then of each super-block the
        steps, that lower the loss the most, one after another."""
        groups = group_members(self.group_of, self.scale)
        every = torch.arange(len(self.codes), device=self.codes.device)
        for group, columns in enumerate(groups):
            self._refit_group(polish, group, columns)
        for block in range(len(self.d)):
            of_block = groups[block * self.per_block : (block + 1) * self.per_block]
            self._refit_steps(polish, block, torch.cat([every[columns] for columns in of_block]))

    def _refit_group(self, polish: Polish, group: int, columns: Tensor | slice) -> None:
        codes, steps = self.codes[columns], self.steps_of(group)
        own, slope = polish.hessian[columns][:, columns], codes - self.format.zero
        offset = torch.full_like(slope, self.format.layout.has_minima)
        parabola = Parabola.of(own, polish.gradient[columns], slope, offset, self.curvature)
        old = Coded(self.scales[group].clone(), self.minima[group].clone())
        scale, minimum = steps.d * old.scales, steps.dmin * old.minima
        more_a, more_b = parabola.best()

        def tried(near: Coded) -> Candidate:
            return -parabola.gain(steps.d * near.scales - scale, steps.dmin * near.minima - minimum), near

        candidates = neighbours(nearest_codes(scale + more_a, minimum + more_b, steps, self.format), self.format)
        _, chosen = least_cost((torch.zeros_like(scale), old), map(tried, candidates))
        at = affine(Coded(*chosen), steps, self.format)
        change = (codes - at.zero) * at.scale - polish.values[columns]
        lower = polish.move_if_lower(columns, own, change)
        self.choose(group, Coded(*(torch.where(lower, new, held) for new, held in zip(chosen, old, strict=True))))

    def _refit_steps(self, polish: Polish, block: int, columns: Tensor) -> None:
        groups = torch.arange(block * self.per_block, (block + 1) * self.per_block, device=columns.device)
        apart = groups.repeat_interleave(self.group)
        slope = self.scales[apart] * (self.codes[columns] - self.format.zero)
        own, gradient = polish.hessian[columns][:, columns], polish.gradient[columns]
        parabola = Parabola.of(own, gradient, slope, self.minima[apart], self.curvature)
        d, dmin = self.d[block].clone(), self.dmin[block].clone()
        more_d, more_dmin = parabola.best()
        new_d, new_dmin = as_float16(d + more_d), as_float16(dmin + more_dmin)
        better = parabola.gain(new_d - d, new_dmin - dmin) > 0
        if self.format.layout.has_minima:
            better &= (new_d > 0) & (new_dmin >= 0)
        steps = KSteps(torch.where(better, new_d, d), torch.where(better, new_dmin, dmin))
        at = affine(Coded(self.scales[apart], self.minima[apart]), steps, self.format)
        change = (self.codes[columns] - at.zero) * at.scale - polish.values[columns]
        lower = polish.move_if_lower(columns, own, change)
        self.d[block], self.dmin[block] = torch.where(lower, steps.d, d), torch.where(lower, steps.dmin, dmin)
        for group in groups.tolist():
            self.choose(group, Coded(self.scales[group].clone(), self.minima[group].clone()))


@dataclass(frozen=True)
class Parabola:
    """The loss in two numbers (a, b) [N] of which values are a slope - b offset: its gradient and curvature."""

    a: Tensor
    b: Tensor
    aa: Tensor
    ab: Tensor
    bb: Tensor

    @classmethod
    def of(cls, own: Tensor, gradient: Tensor, slope: Tensor, offset: Tensor, curvature: Tensor | float) -> "Parabola":
        """own [g, g]: H of some columns; gradient, slope, offset [g, N]; curvature: that by each output, [N]."""
        bent, shifted = own @ slope, own @ offset
        return cls(
            (slope * gradient).sum(0),
            -(offset * gradient).sum(0),
            (slope * bent).sum(0) * curvature,
            -(slope * shifted).sum(0) * curvature,
            (offset * shifted).sum(0) * curvature,
        )

    def gain(self, a: Tensor, b: Tensor) -> Tensor:
        """By how much the loss falls where the numbers grow by a and b."""
        return 2 * (a * self.a + b * self.b) - (a * a * self.aa + 2 * a * b * self.ab + b * b * self.bb)

    def best(self) -> tuple[Tensor, Tensor]:
        """The growth of least loss; 0 in directions in which the loss is flat."""
        determinant = self.aa * self.bb - self.ab * self.ab
        flat = determinant <= torch.finfo(determinant.dtype).eps * self.aa * self.bb
        a = torch.where(flat, self.a / self.aa, (self.a * self.bb - self.b * self.ab) / determinant)
        b = torch.where(flat, torch.zeros_like(a), (self.b * self.aa - self.a * self.ab) / determinant)
        return torch.nan_to_num(a, 0.0, 0.0, 0.0), torch.nan_to_num(b, 0.0, 0.0, 0.0)


def nearest_blocks(x_NK: Tensor, format_: KQuant, cost_K: Tensor | None = None) -> KBlocks:
    """Every weight to the nearest code of scales fitted to its super-block. cost: of an error in each column; None:
    all the same."""
    layout, rows = format_.layout, len(x_NK)
    cost = torch.ones_like(x_NK) if cost_K is None else cost_K.expand_as(x_NK)
    x, cost = (t.reshape(-1, layout.groups, layout.group) for t in (x_NK, cost))
    steps, coded, _ = fit_blocks(x, cost, format_)
    codes, _ = values_of(x, affine(coded, steps, format_), format_)
    return format_.packed(*(t.reshape(rows, -1) for t in (codes, *coded, *steps)))
