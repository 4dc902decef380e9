"""A sweep's decisions in tiles (`weights.formats.tiles`): codes, the codes of scales and zero points, and outliers.

Shapes: N outputs, K inputs, G groups, g columns of a group. d_j is what an error of column j costs in the sweep.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from compress.kernels.columns import DecidedColumns, Rounding
from compress.kernels.division import divide
from compress.kernels.operators.columns import takes
from compress.solvers.candidates import Candidate, least_cost
from compress.solvers.column_sweep import CodeRule, Polish, group_members
from compress.solvers.hessian_with_drift import Problem
from compress.solvers.outliers import by_count, exact_places
from compress.weights.formats.sparse import sparse
from compress.weights.formats.tiles import RANGES, Tiled, Tiles, fit_tiles, scales_and_zeros
from compress.weights.grid import encode_unsigned
from compress.weights.matrix import Matrix, added, summed

# Codes of a scale and of a zero point that are tried, beside the nearest.
NEIGHBOURS = (-1, 0, 1)


@dataclass
class TileRule(CodeRule):
    """Round each target to its group's grid; scales are fitted when a group begins.

    price [N]: what a weight of its own is worth; None: there are none. leave_one_out: as SpQR chooses them
    (`leave_one_out`), otherwise as `solvers.outliers` does. search: try the neighbours of the nearest scale and zero
    point. codes, extra [K, N], scale_codes, zero_codes, scale, zero [G, N], ranges [G, N, 4], in sweep order; extra:
    what an exact weight has beyond its code, in the stored dtype; exact [K, N].
    """

    format: Tiles
    dtype: torch.dtype
    group: int
    group_of: list[int]
    cost_K: Tensor
    price: Tensor | None
    leave_one_out: bool
    search: bool
    codes: Tensor
    extra: Tensor
    exact: Tensor
    scale_codes: Tensor
    zero_codes: Tensor
    scale: Tensor
    zero: Tensor
    ranges: Tensor
    swept: bool = False

    @classmethod
    def of(
        cls,
        weight_NK: Tensor,
        problem: Problem,
        format_: Tiles,
        scale_dtype: torch.dtype,
        price_N: Tensor | None = None,
        leave_one_out: bool = False,
        search: bool = True,
    ) -> "TileRule":
        """The rule that decides a weight's columns, before the first is decided."""
        rows, columns = weight_NK.shape
        group, groups = format_.group_size, columns // format_.group_size
        scale_codes, zero_codes, scale, zero = (weight_NK.new_zeros(groups, rows) for _ in range(4))
        return cls(
            format=format_,
            dtype=scale_dtype,
            group=group,
            group_of=(problem.order // group).tolist(),
            cost_K=problem.diagonal,
            price=price_N,
            leave_one_out=leave_one_out,
            search=search,
            codes=weight_NK.new_zeros(columns, rows),
            extra=weight_NK.new_zeros(columns, rows, dtype=scale_dtype),
            exact=weight_NK.new_zeros(columns, rows, dtype=torch.bool),
            scale_codes=scale_codes,
            zero_codes=zero_codes,
            scale=scale,
            zero=zero,
            ranges=weight_NK.new_zeros(groups, rows, RANGES),
        )

    def begin(self, column: int, updated_gN: Tensor) -> None:
        part, x, group = slice(column, column + self.group), updated_gN.t(), self.group_of[column]
        cost = self.cost_K[part]
        outside = torch.zeros_like(x, dtype=torch.bool)
        if self.price is not None and self.leave_one_out:
            outside = leave_one_out(x, self.format.bits, cost) > self.price.unsqueeze(1)
        elif self.price is not None:
            outside = exact_places(tile_costs(x, self.format.bits, cost), self.price.unsqueeze(1))
            self.exact[part] = outside.t()
        fitted = fit_tiles(*inner_range(x, outside), self.format, self.dtype)
        self.ranges[group] = fitted.ranges
        codes: Sequence[Tensor] = (fitted.scale_codes, fitted.zero_codes)
        if self.search:
            tried = self._tried(x, codes, fitted.ranges, cost * ~outside)
            _, codes = least_cost((x.new_full(codes[0].shape, math.inf), codes), tried)
        self._choose(group, codes)

    def _tried(self, x_Ng: Tensor, codes: Sequence[Tensor], ranges: Tensor, cost: Tensor) -> Iterator[Candidate]:
        """The neighbours of the codes of scale and zero point, with the errors [N] of a group's weights in them."""
        for near in neighbours(codes, self.format):
            scale, zero = (t.unsqueeze(1) for t in scales_and_zeros(near[0], near[1], ranges))
            values = self._values(encode_unsigned(x_Ng, scale, zero, self.format.bits), scale, zero)
            yield ((values - x_Ng).square() * cost).sum(1), near

    def _choose(self, group: int, codes: Sequence[Tensor]) -> None:
        self.scale_codes[group], self.zero_codes[group] = codes
        self.scale[group], self.zero[group] = scales_and_zeros(codes[0], codes[1], self.ranges[group])

    def decide(self, column: int, target_N: Tensor) -> Tensor:
        group = self.group_of[column]
        scale, zero = self.scale[group], self.zero[group]
        codes = encode_unsigned(target_N, scale, zero, self.format.bits)
        values = self._values(codes, scale, zero)
        if self.price is not None:
            if not self.swept:
                self.exact[column] |= self.cost_K[column] * (target_N - values).square() > self.price
            exact = self.exact[column]
            none = encode_unsigned(torch.zeros_like(target_N), scale, zero, self.format.bits)
            codes = torch.where(exact, none, codes)
            whole, extra = self.complete(target_N, self._values(none, scale, zero))
            values = torch.where(exact, whole, values)
            self.extra[column] = torch.where(exact, extra, torch.zeros_like(extra))
        self.codes[column] = codes
        return values

    def complete(self, target: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """(The value for a target, the exact weight beside codes of these values), both as they are stored."""
        extra = (target - values).to(self.dtype)
        return summed(iter((values.to(self.dtype), extra))).to(target.dtype), extra

    def _values(self, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        return ((codes - zero) * scale).to(self.dtype).to(codes.dtype)

    def codes_at(self, column: int) -> tuple[Tensor, ...]:
        return self.codes[column], self.extra[column]

    def decisions(self) -> DecidedColumns | None:
        if not takes(self.codes, self.dtype):
            return None
        rounding = Rounding(0, 2**self.format.bits - 1, self.dtype, free_zero=True)
        price, exact = (None, None) if self.price is None else (self.price, self.exact)
        decided = (self.codes, self.scale, self.zero, self.groups)
        price = None if self.swept else price
        return DecidedColumns(*decided, rounding, None, exact, price, self.cost_K, self.extra)

    def refit(self, polish: Polish) -> None:
        """For fixed codes of the weights: of each group the scale and zero point, among the neighbours of those it
        has, that lower the loss the most; group after group."""
        for group, columns in enumerate(group_members(self.group_of, self.scale)):
            self._refit_group(polish, group, columns)

    def _refit_group(self, polish: Polish, group: int, columns: Tensor | slice) -> None:
        block, codes, old = polish.hessian[columns][:, columns], self.codes[columns], polish.values[columns].clone()
        gradient, exact = polish.gradient[columns], self.exact[columns]

        def tried(numbers: Sequence[Tensor]) -> Candidate:
            values = self._values(codes, *scales_and_zeros(numbers[0], numbers[1], self.ranges[group]))
            moved = torch.where(exact, self.complete(old, values)[0], values) - old
            return -(moved * (2 * gradient - self.curvature * (block @ moved))).sum(0), (moved, *numbers)

        first = self.scale_codes[group].clone(), self.zero_codes[group].clone()
        stay = torch.zeros_like(self.scale[group]), (torch.zeros_like(old), *first)
        _, (change, *chosen) = least_cost(stay, map(tried, neighbours(first, self.format)))
        lower = polish.move_if_lower(columns, block, change)
        self._choose(group, [torch.where(lower, new, held) for new, held in zip(chosen, first, strict=True)])
        extra = self.complete(old, self._values(codes, self.scale[group], self.zero[group]))[1]
        self.extra[columns] = torch.where(exact, extra, torch.zeros_like(extra))

    def to_weight(self, problem: Problem, values_NK: Tensor) -> Matrix:
        small = (self.codes, self.scale_codes, self.zero_codes)
        codes, scale, zero = (t.to(torch.uint8).t().contiguous() for t in small)
        ranges = self.ranges.transpose(0, 1).to(self.dtype).contiguous()
        tiled = Tiled(problem.restore(codes), scale, zero, ranges, self.format)
        if self.price is None:
            return tiled
        return added(tiled, sparse(problem.restore(self.extra.t()), problem.restore(self.exact.t())))


def neighbours(codes: Sequence[Tensor], format_: Tiles) -> list[Sequence[Tensor]]:
    """Codes of scales and zero points near these, these among them."""
    most_s, most_z = 2**format_.scale_bits - 1, 2**format_.zero_bits - 1
    scale, zero = codes
    return [((scale + i).clamp(0, most_s), (zero + j).clamp(0, most_z)) for i, j in product(NEIGHBOURS, NEIGHBOURS)]


def inner_range(x_Ng: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """(lowest, highest) [N] of the weights of each group that are not outside; 0 where all are."""
    none = outside.all(1)
    lowest, highest = x_Ng.masked_fill(outside, math.inf).amin(1), x_Ng.masked_fill(outside, -math.inf).amax(1)
    return lowest.masked_fill(none, 0.0), highest.masked_fill(none, 0.0)


def rounding_cost(x: Tensor, lowest: Tensor, highest: Tensor, bits: int, cost: Tensor) -> Tensor:
    """[..., g] the cost of rounding x to codes from lowest to highest [...], whose scale and zero point are not
    rounded."""
    step = divide(highest - lowest, 2**bits - 1).unsqueeze(-1)
    values = encode_unsigned(x, step, -lowest.unsqueeze(-1) / step, bits) * step + lowest.unsqueeze(-1)
    return (values - x).square() * cost


def leave_one_out(x_Ng: Tensor, bits: int, cost: Tensor) -> Tensor:
    """[N, g] by how much the error of a group is lower where one weight is exact and has no say in its range (SpQR,
    algorithm 1, `outliers`)."""
    rising = x_Ng.sort(1).values
    low, high = rising[:, :2], rising[:, -2:]
    lowest = torch.where(x_Ng == low[:, :1], low[:, 1:], low[:, :1])
    highest = torch.where(x_Ng == high[:, 1:], high[:, :1], high[:, 1:])
    others = rounding_cost(x_Ng.unsqueeze(1).expand(-1, x_Ng.shape[1], -1), lowest, highest, bits, cost)
    own = others.diagonal(dim1=1, dim2=2)
    return rounding_cost(x_Ng, low[:, 0], high[:, 1], bits, cost).sum(1, keepdim=True) - (others.sum(2) - own)


def tile_costs(x: Tensor, bits: int, cost: Tensor) -> Tensor:
    """[C, ..., g]: `outliers.costs` on codes that need not have 0."""

    def without(outside: Tensor) -> Tensor:
        lowest, highest = x.masked_fill(outside, math.inf).amin(-1), x.masked_fill(outside, -math.inf).amax(-1)
        return rounding_cost(x, lowest, highest, bits, cost)

    return by_count(x - x.mean(-1, keepdim=True), without)
