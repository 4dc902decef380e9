"""A sweep's decisions in tiles (`weights.formats.tiles`): codes, the codes of scales and zero points, and outliers.

Shapes: N outputs, K inputs, G groups, g columns of a group. d_j is what an error of column j costs in the sweep.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.kernels.cpu.column_sweep import DecidedColumns, Rounding, takes
from compress.kernels.division import divide
from compress.solvers.outliers import by_count, exact_places
from compress.solvers.polish import Polish, SettledRule, members
from compress.weights.formats.tiles import Tiles, fit_tiles, scales_and_zeros
from compress.weights.grid import encode_unsigned
from compress.weights.matrix import summed

# Codes of a scale and of a zero point that are tried, beside the nearest.
NEIGHBOURS = (-1, 0, 1)


@dataclass
class TileRule(SettledRule):
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
    settled: bool = False

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
        codes = fitted.scale_codes, fitted.zero_codes
        if self.search:
            codes = self._searched(x, *codes, fitted.ranges, cost * ~outside)
        self.scale_codes[group], self.zero_codes[group] = codes
        self.scale[group], self.zero[group] = scales_and_zeros(*codes, fitted.ranges)

    def _searched(
        self, x_Ng: Tensor, scale_codes: Tensor, zero_codes: Tensor, ranges: Tensor, cost: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The codes of scale and zero point, among the neighbours of these, of least error."""
        best, best_codes = x_Ng.new_full(scale_codes.shape, math.inf), (scale_codes, zero_codes)
        for codes in neighbours(scale_codes, zero_codes, self.format):
            scale, zero = (t.unsqueeze(1) for t in scales_and_zeros(*codes, ranges))
            values = self._values(encode_unsigned(x_Ng, scale, zero, self.format.bits), scale, zero)
            error = ((values - x_Ng).square() * cost).sum(1)
            best_codes = chosen_where(error < best, codes, best_codes)
            best = torch.minimum(error, best)
        return best_codes

    def decide(self, column: int, target_N: Tensor) -> Tensor:
        group = self.group_of[column]
        scale, zero = self.scale[group], self.zero[group]
        codes = encode_unsigned(target_N, scale, zero, self.format.bits)
        values = self._values(codes, scale, zero)
        if self.price is not None:
            if not self.settled:
                self.exact[column] |= self.cost_K[column] * (target_N - values).square() > self.price
            exact = self.exact[column]
            none = encode_unsigned(torch.zeros_like(target_N), scale, zero, self.format.bits)
            codes = torch.where(exact, none, codes)
            whole, extra = self.completed(target_N, self._values(none, scale, zero))
            values = torch.where(exact, whole, values)
            self.extra[column] = torch.where(exact, extra, torch.zeros_like(extra))
        self.codes[column] = codes
        return values

    def completed(self, target: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """(what stands for a target of which codes have these values, and what is added to them), as it is stored."""
        extra = (target - values).to(self.dtype)
        return summed(iter((values.to(self.dtype), extra))).to(target.dtype), extra

    def _values(self, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        return ((codes - zero) * scale).to(self.dtype).to(codes.dtype)

    def at(self, column: int) -> tuple[Tensor, ...]:
        return self.codes[column], self.extra[column]

    def held(self) -> DecidedColumns | None:
        if not takes(self.codes, self.dtype):
            return None
        rounding = Rounding(0, 2**self.format.bits - 1, self.dtype, free_zero=True)
        price, exact = (None, None) if self.price is None else (self.price, self.exact)
        decided = (self.codes, self.scale, self.zero, self.group_of)
        return DecidedColumns(*decided, rounding, None, exact, None if self.settled else price, self.cost_K, self.extra)


Pair = tuple[Tensor, Tensor]


def chosen_where(better: Tensor, new: Pair, old: Pair) -> Pair:
    return torch.where(better, new[0], old[0]), torch.where(better, new[1], old[1])


def neighbours(scale_codes: Tensor, zero_codes: Tensor, format_: Tiles) -> list[tuple[Tensor, Tensor]]:
    """Codes of scales and zero points near these, these among them."""
    most_s, most_z = 2**format_.scale_bits - 1, 2**format_.zero_bits - 1
    return [
        ((scale_codes + i).clamp(0, most_s), (zero_codes + j).clamp(0, most_z)) for i in NEIGHBOURS for j in NEIGHBOURS
    ]


def inner_range(x_Ng: Tensor, outside: Tensor) -> tuple[Tensor, Tensor]:
    """(lowest, highest) [N] of the weights of each group that are not outside; 0 where all are."""
    none = outside.all(1)
    lowest, highest = x_Ng.masked_fill(outside, math.inf).amin(1), x_Ng.masked_fill(outside, -math.inf).amax(1)
    return lowest.masked_fill(none, 0.0), highest.masked_fill(none, 0.0)


def rounding_cost(x: Tensor, lowest: Tensor, highest: Tensor, bits: int, cost: Tensor) -> Tensor:
    """[..., g] what rounding x costs on codes from lowest to highest [...], whose scale and zero point are not
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


def refit_tiles(state: "Polish[TileRule]", rule: TileRule) -> None:
    """For fixed codes of the weights: of each group the scale and zero point, among the neighbours of those it has,
    that lower the loss the most; group after group."""
    for group, columns in enumerate(members(rule)):
        block, codes = state.hessian[columns][:, columns], rule.codes[columns]
        exact, ranges, old = rule.exact[columns], rule.ranges[group], state.values[columns]
        best = torch.zeros_like(rule.scale[group])
        change, gradient = torch.zeros_like(old), state.gradient[columns]
        chosen = rule.scale_codes[group], rule.zero_codes[group]
        for tried in neighbours(*chosen, rule.format):
            values = rule._values(codes, *scales_and_zeros(*tried, ranges))
            values = torch.where(exact, rule.completed(old, values)[0], values)
            moved = values - old
            gain = (moved * (2 * gradient - block @ moved)).sum(0)
            better = gain > best
            best = torch.where(better, gain, best)
            change = torch.where(better, moved, change)
            chosen = chosen_where(better, tried, chosen)
        rule.scale_codes[group], rule.zero_codes[group] = chosen
        rule.scale[group], rule.zero[group] = scales_and_zeros(*chosen, ranges)
        base = rule._values(codes, rule.scale[group], rule.zero[group])
        extra = rule.completed(old, base)[1]
        rule.extra[columns] = torch.where(exact, extra, torch.zeros_like(extra))
        state.move(columns, change)
