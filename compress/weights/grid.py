"""Grids: the values that a quantized number can take. The only place in the project that rounds.

Shapes: M tokens, N outputs, K inputs, G groups, g members of one group. P = 2^(bits-1), L = 2^bits - 1.

A value is `(code - zero_point) * scale`, computed in the dtype in which the scale is stored. A range always includes
0, so that 0 is exact, and a scale is rounded to its stored dtype before any code is computed from it.

    asymmetric                 s = (hi - lo) / (qmax - qmin)      z = clip(round(qmin - lo / s), qmin, qmax)
    symmetric                  s = absmax / (P - 1/2)             as compressed-tensors computes it: [-P, P-1], the
                                                                  largest positive value is clipped by half a step
    symmetric, narrow          s = absmax / (P - 1)               [-(P-1), P-1]
    symmetric, signed scale    s = -a / P, a the element of largest magnitude: it lands on code -P exactly and every
                               code is used; s may be negative. Same bytes as symmetric (AutoRound, "full range").
    symmetric, unsigned        s = hi / L                         [0, L] for data that is never negative
    float                      s = absmax / 448                   codes are float8 e4m3, within [-448, 448], or levels
                               s = absmax / 6 (E2M3: / 7.5)       of E2M1, E2M3, E3M2 (`weights.levels`)
    normal                     s = absmax                         codes are levels of NF4, within [-1, 1]
    nonlinear                  s = -a / 127, as with a signed     codes are levels of IQ4_NL, none of which is 0
                               scale
    powers of two as scales    s = the least above absmax / d     d halfway from the largest level to the next power of
                                                                  two (7 of E2M1, 7.75 of E2M3), but 448 of e4m3, as
                                                                  compressed-tensors computes it: up to 7 is taken for 6
    sign                       s = mean |x|                       one bit: codes -1 and 1, and no 0; the s of least
                                                                  squared error (XNOR-Net, arXiv 1603.05279), which may
                                                                  be 0 as nothing is divided by it
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

from compress.base.errors import CompressError, InputError
from compress.kernels.columns import Range, RangeSearch, Rounding
from compress.kernels.division import divide
from compress.kernels.layouts.scale_blocks import Block, block_rows, blocked, spread, unblocked
from compress.kernels.layouts.words import some_rows
from compress.kernels.operators import columns
from compress.weights.levels import TABLES, Levels
from compress.weights.matrix import Term
from compress.weights.number_formats import (
    FLOATS,
    MIN_BITS,
    WIDE,
    Granularity,
    NumberFormat,
    NumberType,
    ScaleNumbers,
)
from compress.weights.scale_numbers import (
    FLOAT8,
    FLOAT8_MAX,
    OWN_DTYPE,
    global_scale_for,
    power_above,
    round_scale,
    round_to_e4m3,
    scale_limits,
)
from compress.weights.ternary_scale import scale_of_levels

RangeChoice = Literal["minmax", "mse"]

# {field of a grid: its words}.
CHOICES = {"granularity": get_args(Granularity), "range_choice": get_args(RangeChoice)}
CHOICES |= {"scales": get_args(ScaleNumbers), "type": get_args(NumberType)}
MAX_BITS = WIDE
# The usual size of a group. Below SMALLEST_GROUP members, a 16-bit scale costs each of them more than a bit.
DEFAULT_GROUP, SMALLEST_GROUP = 128, 16
KERNEL_GROUPS = (DEFAULT_GROUP, 64, 32)
# The smallest size that a message names, with what its scales cost.
LEAST_SUGGESTED = 2
SCALE_BITS = 16
# A message names at most so many sizes, and none above the largest.
SUGGESTED, LARGEST_SUGGESTED = 8, 512
# Range search: factors 1, 0.98, ..., 0.22 under the squared error. GPTQ's authors (`Quantizer`) try twice as many under
# |error|^2.4, which takes far longer; the outputs of a layer on other tokens are equally good, within noise.
SEARCH_STEPS, SEARCH_SHRINK = 50, 0.8
# A wider range costs a float no precision, but moves its codes against the data: factors 1 to 2, where they repeat.
FLOAT_STEPS = 16
# Levels that are not evenly spaced may fit a wider range, too: factors 1/2 to 2, in which no e4m3 number is left out.
# Powers of two: a larger one has no level that the usual one lacks, and smaller ones clip absmax to an eighth.
TABLE_FACTORS = (1.0, *(2.0 ** (step / FLOAT_STEPS) for step in range(-FLOAT_STEPS, FLOAT_STEPS + 1) if step))
POWER_FACTORS = (1.0, 0.5, 0.25, 0.125)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The quantization of one tensor: the set of its values.

    bits: 2 to 8, 1 of signs. granularity: one scale per tensor, per row (`channel` of a weight, `token` of an
    activation), per `group_size` consecutive elements of a row, or per `block` of so many rows and columns, of which
    those at the edges may be smaller. range_choice: the full range (`minmax`) or the shrunken range of least error
    (`mse`; widened where codes are floats, the best of all where they are ternary). type: `float` codes are symmetric:
    float8 e4m3 of 8 bits, the only ones with blocks, and in groups only by powers of two; E2M3 of 6, E2M1 of 4 bits;
    `normal` codes are NF4, `nonlinear` ones IQ4_NL; `sign` codes are -1 or 1. scales: the numbers that they can be
    (`weights.scale_numbers`). global_scale: the divisor of e4m3 scales, or 1 / the scale of a float per tensor;
    None: `quantize` finds one for the matrix.

    Raises InputError for bits out of range and for combinations that do not exist.
    """

    bits: int = 4
    symmetric: bool = True
    signed: bool = True
    narrow: bool = False
    signed_scale: bool = False
    granularity: Granularity = "channel"
    group_size: int | None = None
    range_choice: RangeChoice = "minmax"
    type: NumberType = "int"
    block: Block | None = None
    scales: ScaleNumbers = "stored"
    global_scale: float | None = None

    def __post_init__(self) -> None:
        if self.block is not None:
            object.__setattr__(self, "block", tuple(self.block))  # JSON has a list
        if self.type == "sign":
            if (self.bits, self.symmetric, self.signed, self.narrow, self.signed_scale) != (
                1,
                True,
                True,
                False,
                False,
            ):
                raise InputError("signs have 1 bit and are symmetric; leave the other options of the grid out")
        elif not MIN_BITS <= self.bits <= MAX_BITS:
            raise InputError(f"bits {self.bits}; allowed: {MIN_BITS} to {MAX_BITS}")
        for field, allowed in CHOICES.items():
            if getattr(self, field) not in allowed:
                words = field.replace("_", " ")
                raise InputError(f"{words} {getattr(self, field)!r}; allowed: {', '.join(allowed)}")
        if (self.granularity == "group") != (self.group_size is not None):
            raise InputError(
                f"granularity {self.granularity!r} with group size {self.group_size}; "
                "give a group size with granularity 'group' and only there"
            )
        if self.group_size is not None and self.group_size < 1:
            raise InputError(f"group size {self.group_size}; allowed: 1 or more")
        self._check_block()
        if self.signed_scale and not (self.symmetric and self.signed and not self.narrow):
            raise InputError("a signed scale needs a symmetric, signed, full-range grid")
        if self.type not in ("int", "sign"):
            self._check_levels()
        elif self.scales in OWN_DTYPE:
            raise InputError(f"scales {self.scales!r} are for float codes; integers have stored or float16")

    def _check_levels(self) -> None:
        plain = self.symmetric and self.signed and not self.narrow and not self.signed_scale
        grouped8 = self.bits == MAX_BITS and self.granularity == "group" and self.scales != "e8m0"
        known = (self.type, self.bits) in TABLES or (self.type == "float" and self.bits == MAX_BITS)
        if not known or not plain or grouped8:
            raise InputError(
                "float codes have 4, 6 or 8 bits, e3m2 ones 6, normal and nonlinear ones 4, all without zero points; "
                "8 bits share a scale per tensor, channel, token or block, or in groups a power of two (scales='e8m0')"
            )
        if self.scales in OWN_DTYPE and not self.floating:
            raise InputError(f"scales {self.scales!r} are for float codes; {self.type} ones have stored or float16")

    def _check_block(self) -> None:
        if (self.granularity == "block") != (self.block is not None):
            raise InputError(
                f"granularity {self.granularity!r} with block {self.block}; give a block with granularity 'block' and "
                "only there"
            )
        float8 = self.type == "float" and self.bits == MAX_BITS
        if self.block is not None and (not float8 or min(self.block) < 1):
            raise InputError(
                f"block {self.block} of {self.type} codes; allowed: float codes of 8 bits, 1 or more rows and columns"
            )

    @property
    def floating(self) -> bool:
        """True where codes are floating-point numbers."""
        return self.type in FLOATS

    @property
    def signs(self) -> bool:
        """True where codes are -1 or 1."""
        return self.type == "sign"

    @property
    def ternary(self) -> bool:
        """True where codes are -1, 0 or 1."""
        return self.bits == MIN_BITS and self.symmetric and self.signed and self.narrow

    @property
    def levels(self) -> Levels | None:
        """The table of levels that codes stand for; None where codes are numbers themselves."""
        return TABLES.get((self.type, self.bits))

    @property
    def qmin(self) -> int:
        """Smallest code."""
        if self.levels is not None:
            return 0
        if self.floating:
            return -FLOAT8_MAX
        if self.signs:
            return -1
        if not self.signed:
            return 0
        return -(2 ** (self.bits - 1)) + int(self.narrow)

    @property
    def qmax(self) -> int:
        """Largest code."""
        if self.levels is not None:
            return len(self.levels.values) - 1
        if self.floating:
            return FLOAT8_MAX
        if self.signs:
            return 1
        if self.signed:
            return 2 ** (self.bits - 1) - 1
        return 2**self.bits - 1 - int(self.narrow)

    @property
    def storage(self) -> torch.dtype:
        """The dtype that holds a code."""
        if self.levels is not None:
            return torch.uint8
        if self.floating:
            return FLOAT8
        return torch.int8 if self.signed else torch.uint8

    @property
    def global_scales(self) -> bool:
        """True where scales have a divisor that all of them share."""
        return self.scales == "e4m3"

    @property
    def shared(self) -> bool:
        """True where engines have one number for all weights that they make one layer of: the divisor of e4m3 scales,
        or the scale of a float per tensor."""
        return self.global_scales or (self.floating and self.granularity == "tensor")

    def group_length(self, columns: int) -> int:
        """Members of one group in a row of `columns`. Raises InputError where the group size does not divide it."""
        if self.group_size is None:
            return columns
        if columns % self.group_size:
            raise InputError(f"group size {self.group_size} does not divide {columns}; {suggest_groups([columns])}")
        return self.group_size

    def with_range(self, choice: RangeChoice) -> "Grid":
        return replace(self, range_choice=choice)

    @property
    def searches(self) -> bool:
        """True where several ranges are tried for the least error."""
        return self.range_choice == "mse"

    @property
    def plain(self) -> "Grid":
        """The grid with a range that follows from the extremes alone."""
        return self.with_range("minmax") if self.searches else self

    def reaching(self, largest: float) -> "Grid":
        """The grid with a global scale for weights up to `largest`, where it needs one and has none."""
        if not self.shared or self.global_scale is not None:
            return self
        steps = steps_of_range(self)[1]
        if self.global_scales:
            return replace(self, global_scale=global_scale_for(largest / steps))
        return replace(self.plain, global_scale=steps / largest) if largest else self

    def quantize(self, x_NK: Tensor, scale_dtype: torch.dtype | None = None) -> "Quantized":
        """A matrix, rounded to the nearest points of the grid (`quantize` below). scale_dtype: of the stored scales; a
        pass gives `site.scale_dtypes[layer]`."""
        return quantize(x_NK, self, scale_dtype)

    def scale_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which scales are held, where the model has this one."""
        return torch.float32 if self.scales in OWN_DTYPE else dtype


def grid_of(numbers: NumberFormat) -> Grid:
    """The grid of weights in groups of the format's own size."""
    assert numbers.of_levels
    return Grid(
        bits=numbers.bits,
        type=numbers.type,
        granularity="group",
        group_size=numbers.group_size,
        scales=numbers.scales,
    )


def divisors(widths: Iterable[int], least: int, most: int) -> list[int]:
    """Sizes from `least` to `most` that divide every width, rising."""
    common = math.gcd(*widths)
    return [size for size in range(least, min(most, common) + 1) if common % size == 0]


def usual_group(widths: Iterable[int], most: int = DEFAULT_GROUP) -> int:
    """The default group size: the largest of 128, 64 and 32, up to `most`, that divides every width. Kernels (ours, and
    those of other readers) are made for these sizes. -1 (one scale per output channel), which has kernels, too, where
    none divides: torch multiplies by groups of other sizes many times as slowly as by dense weights."""
    sizes = divisors(widths, min(KERNEL_GROUPS), most)
    return next((size for size in KERNEL_GROUPS if size in sizes), -1)


def largest_group(widths: Iterable[int], most: int = DEFAULT_GROUP) -> int | None:
    """The largest group size from 16 to `most` that divides every width, with a kernel or without; None where none
    does."""
    return max(divisors(widths, SMALLEST_GROUP, most), default=None)


def near_group(widths: Iterable[int], usual: int, least: int) -> int | None:
    """The size from `least` to 128 nearest to the usual one that divides every width; None where none does."""
    return min(divisors(widths, least, DEFAULT_GROUP), key=lambda size: abs(math.log(size / usual)), default=None)


def suggest_groups(
    widths: Iterable[int], whole: bool = True, cost: Callable[[int], float] = lambda size: SCALE_BITS / size
) -> str:
    """A sentence that names group sizes which divide every width: those from 16 up, or the ones nearest to the usual
    size where there are many. Without any, it names the largest below 16, with the bits per weight that its scales
    take. whole: name -1, too. cost: bits per weight of a size's scales."""
    widths = list(widths)
    sizes = divisors(widths, SMALLEST_GROUP, LARGEST_SUGGESTED)
    near = sorted(sorted(sizes, key=lambda size: abs(math.log(size / DEFAULT_GROUP)))[:SUGGESTED])
    names = [*map(str, near), *(["-1"] if whole else [])]
    small = max(divisors(widths, LEAST_SUGGESTED, SMALLEST_GROUP - 1), default=None)
    if not near and small is not None:
        names.insert(0, f"{small} (scales take {cost(small):g} bits per weight)")
    if not names:
        return "no size divides the inputs of all layers: leave it out, and each layer has its own"
    some = "some " if len(near) < len(sizes) else ""
    about = " (-1 is one scale per output channel)" if whole else ""
    return f"{some}sizes that work: {', '.join(names)}{about}"


@dataclass(frozen=True)
class Quantized(Term):
    """A quantized matrix, the codes that every consumer shares: evaluation, checkpoint and kernels.

    codes [N, K] int8 (uint8 when unsigned or of a table of levels, float8_e4m3fn of a float of 8 bits); scale [N, G],
    [N, 1], [1, 1] or, of blocks of R rows and C columns, [ceil(N / R), ceil(K / C)] in its stored dtype (powers of two
    and divided float8 in float32); zero_point of the same shape and of the codes' dtype, or None when symmetric.
    `weights.formats.codes.Codes` is such a matrix in a format.
    """

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None
    grid: Grid

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.codes.shape
        return rows, columns

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """[N, K] values: the product is rounded once, to the scale's dtype, then cast to `dtype`."""
        rows, columns = self.codes.shape
        if self.grid.block is not None:
            values = self.codes.to(self.scale.dtype) * spread(self.scale, self.codes.shape, self.grid.block)
            return values if dtype is None else values.to(dtype)
        if self.grid.levels is not None:
            levels = self.grid.levels.of(self.codes, torch.promote_types(self.scale.dtype, torch.float32))
            groups = levels.reshape(rows, self.scale.shape[-1], -1) * self.scale.unsqueeze(-1)
            return groups.reshape(rows, columns).to(self.scale.dtype if dtype is None else dtype)
        groups = self.codes.reshape(rows, self.scale.shape[-1], -1).to(self.scale.dtype)
        if self.zero_point is not None:
            groups = groups - self.zero_point.unsqueeze(-1).to(self.scale.dtype)
        values = (groups * self.scale.unsqueeze(-1)).reshape(rows, columns)
        return values if dtype is None else values.to(dtype)

    def rows(self, part: slice) -> Self:
        """The same quantized matrix, restricted to some rows. Rows that begin within a block have a scale each."""
        if self.grid.block is not None:
            start, stop, step = part.indices(len(self.codes))
            if step != 1 or start % self.grid.block[0]:
                single = self.by_row()
                return replace(single, codes=self.codes[part], scale=single.scale[part])
            blocks = block_rows(slice(start, stop), self.grid.block[0])
            return replace(self, codes=self.codes[part], scale=self.scale[blocks])
        whole = self.scale.shape[0] == 1 and self.codes.shape[0] != 1
        scale = self.scale if whole else self.scale[part]
        zero_point = self.zero_point if whole or self.zero_point is None else self.zero_point[part]
        return replace(self, codes=self.codes[part], scale=scale, zero_point=zero_point)

    def by_row(self) -> Self:
        """The same in blocks of one row."""
        assert self.grid.block is not None
        height, width = self.grid.block
        scale = self.scale.repeat_interleave(height, 0)[: len(self.codes)]
        return replace(self, scale=scale, grid=replace(self.grid, block=(1, width)))

    @classmethod
    def stacked(cls, terms: Sequence[Self]) -> Self:
        """Quantized matrices of one grid below each other, with a scale row for each of theirs: for each row where
        blocks would reach from one into the next."""
        block = terms[0].grid.block
        if len({term.grid.global_scale for term in terms}) > 1:
            raise CompressError("parts of a layer that were decided one by one differ in their global scale")
        if block is not None:
            whole = all(len(term.codes) % block[0] == 0 for term in terms[:-1])
            if not whole or any(term.grid != terms[0].grid for term in terms):
                terms = [term.by_row() for term in terms]
        zeros = [term.zero_point for term in terms if term.zero_point is not None]
        codes, scale = torch.cat([term.codes for term in terms]), torch.cat([term.scale for term in terms])
        return replace(terms[0], codes=codes, scale=scale, zero_point=torch.cat(zeros) if zeros else None)


def scales_of(scale: Tensor, shape: Sequence[int], grid: Grid) -> Tensor:
    """The scales of a matrix [N, K] in a shape that multiplies it: those of blocks and of groups repeated for every
    element, others unchanged."""
    if grid.group_size is not None:
        return scale.repeat_interleave(grid.group_size, -1)
    return scale if grid.block is None else spread(scale, shape, grid.block)


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype of arithmetic: float32, or float64 for data in float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def stored_scale(scale: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """`round_scale` for the scales of a grid; where no code stands for 0, a scale may be 0 (groups of zeros)."""
    rounded = round_scale(scale, dtype, grid.scales, grid.global_scale)
    has_zero = not grid.signs and (grid.levels is None or grid.levels.has_zero)
    return rounded if has_zero else torch.where(scale == 0, scale, rounded)


def scale_of_range(lo: Tensor, hi: Tensor, grid: Grid, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(scale, zero_point) of ranges [lo, hi] (lo <= 0 <= hi, any shape), both in the dtype of `lo`."""
    kind, divisor = steps_of_range(grid)
    if kind == "asymmetric":
        scale = round_scale(divide(hi - lo, divisor), scale_dtype, grid.scales)
        return scale, torch.round(grid.qmin - lo / scale).clamp(grid.qmin, grid.qmax)
    span = hi if kind == "unsigned" else torch.maximum(-lo, hi)
    if kind == "signed scale":
        span = torch.where(hi > -lo, -hi, -lo)
    if grid.scales == "e8m0":
        return power_above(divide(span, divisor)), torch.zeros_like(span)
    return stored_scale(divide(span, divisor), grid, scale_dtype), torch.zeros_like(span)


def steps_of_range(grid: Grid) -> tuple[Range, float]:
    """(The kind of quantity that the scale is computed from, the number of steps by which it is divided)."""
    half = 2 ** (grid.bits - 1)
    if not grid.symmetric:
        return "asymmetric", grid.qmax - grid.qmin
    if grid.scales == "e8m0":
        return "magnitude", _divisor_of_powers(grid)
    if grid.levels is not None and -grid.levels.least > grid.levels.largest:
        return "signed scale", -grid.levels.least
    if grid.levels is not None:
        return "magnitude", grid.levels.largest
    if grid.floating:
        return "magnitude", FLOAT8_MAX
    if grid.signed_scale:
        return "signed scale", half
    if not grid.signed:
        return "unsigned", grid.qmax
    return "magnitude", half - 1 if grid.narrow else half - 0.5


def _divisor_of_powers(grid: Grid) -> float:
    """The number by which absmax is divided where scales are powers of two: they are rounded as
    compressed-tensors does (`generate_mx_scales`)."""
    if grid.levels is None:
        return FLOAT8_MAX
    return (grid.levels.largest + 2.0 ** math.frexp(grid.levels.largest)[1]) / 2


def encode(x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid) -> Tensor:
    """Codes of `x` in its dtype: whole numbers, values of e4m3, or levels of a table. Ties go to the even code (those
    of NF4 and IQ4_NL to the lower level); out of range saturates."""
    if grid.levels is not None:
        return grid.levels.nearest(x / scale)
    if grid.signs:
        return torch.where(x < 0, -1.0, 1.0).to(x.dtype)
    if grid.floating:
        return round_to_e4m3((x / scale).clamp(grid.qmin, grid.qmax))
    return (torch.round(x / scale) + zero_point).clamp(grid.qmin, grid.qmax)


def encode_unsigned(x: Tensor, step: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Codes 0 ... 2^bits - 1 of `x` in its dtype, for a zero point that is not rounded; 0 where the step is 0."""
    codes = torch.round(x / step + zero).clamp(0, 2**bits - 1)
    return torch.where(step == 0, torch.zeros_like(codes), codes)


def decode(codes: Tensor, scale: Tensor, zero_point: Tensor, scale_dtype: torch.dtype) -> Tensor:
    """Values of codes, rounded as the stored dtype rounds them, in the dtype of `codes`."""
    product = (codes - zero_point) * scale
    return product if scale_dtype == product.dtype else product.to(scale_dtype).to(product.dtype)


def straight_through(x: Tensor, rounded: Tensor) -> Tensor:
    """Rounded values with the gradient of x, as if nothing were rounded. Rounded values of another shape (with codes
    that a cache has kept from earlier tokens) have no gradient: a backward pass raises InputError."""
    return _StraightThrough.apply(x, rounded) if torch.is_grad_enabled() and x.requires_grad else rounded


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rounded: Tensor) -> Tensor:
        ctx.all_new = rounded.shape == x.shape
        return rounded.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if not ctx.all_new:
            raise InputError("a cache of codes passes no gradient to earlier tokens; train with use_cache=False")
        return gradient, None


def range_factors(grid: Grid) -> list[float]:
    """The factors by which the range search multiplies the full range."""
    if grid.scales == "e8m0":
        return [*POWER_FACTORS]
    if grid.levels is not None:
        return [*TABLE_FACTORS]
    if grid.floating:
        return [2 ** (step / FLOAT_STEPS) for step in range(FLOAT_STEPS)]
    return [1 - step / SEARCH_STEPS for step in range(int(SEARCH_STEPS * SEARCH_SHRINK))]


def fit(x: Tensor, grid: Grid, scale_dtype: torch.dtype, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(scale, zero_point) of x [..., g], one per leading index, in the working dtype.

    weight: [g], weights of the members' squared errors in the range search (like the diagonal of a Hessian).
    """
    x, scale_dtype = x.to(working_dtype(x)), grid.scale_dtype(scale_dtype)
    if grid.signs or (grid.ternary and grid.range_choice == "mse"):
        best = scale_of_levels(x, weight, zero=grid.ternary)
        return stored_scale(best, grid, scale_dtype), torch.zeros_like(best)
    lo, hi = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)
    if grid.global_scale is not None and not grid.global_scales:
        hi = torch.full_like(hi, steps_of_range(grid)[1] / grid.global_scale)
    scale, zero_point = scale_of_range(lo, hi, grid, scale_dtype)
    if not grid.searches:
        return scale, zero_point
    importance = None if weight is None else shares_of(weight).to(x.dtype)
    if grid.type == "int" and columns.searches(x, scale_dtype):
        found = columns.search_ranges(x.reshape(-1, x.shape[-1]).t(), range_search(grid, scale_dtype, importance))
        return found[0].view_as(scale), found[1].view_as(scale)
    best = torch.full_like(scale, float("inf"))
    best_scale, best_zero = scale, zero_point
    for factor in range_factors(grid):
        s, z = scale_of_range(lo * factor, hi * factor, grid, scale_dtype)
        values = decode(
            encode(x, s.unsqueeze(-1), z.unsqueeze(-1), grid), s.unsqueeze(-1), z.unsqueeze(-1), scale_dtype
        )
        error = (values - x).square_()
        error = (error if importance is None else error.mul_(importance)).sum(-1)
        better = error < best
        best = torch.where(better, error, best)
        best_scale = torch.where(better, s, best_scale)
        best_zero = torch.where(better, z, best_zero)
    return best_scale, best_zero


def shares_of(weight: Tensor) -> Tensor:
    """Weights [..., g] of the members of groups, of mean 1 in each."""
    return weight / weight.mean(-1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)


def range_search(grid: Grid, scale_dtype: torch.dtype, importance: Tensor | None = None, group: int = 0) -> RangeSearch:
    """The search for the ranges of a grid of integers, as the loops over columns do it."""
    factors = tuple(range_factors(grid)) if grid.searches else ()
    (least, largest), normal = scale_limits(scale_dtype, grid.scales), torch.finfo(torch.float32)
    limits, rounding = (max(least, normal.tiny), min(largest, normal.max)), Rounding(grid.qmin, grid.qmax, scale_dtype)
    half = grid.scales == "float16"
    return RangeSearch(factors, *steps_of_range(grid), rounding, *limits, half, importance, group)


def grouped(x_NK: Tensor, grid: Grid) -> Tensor:
    """[N, K] as [N, G, g], or as [1, 1, N * K] per tensor: every last dimension shares one scale. With blocks of R rows
    and C columns [ceil(N / R), ceil(K / C), R C]; blocks at the edges are padded with zeros, which change no range."""
    if grid.block is not None:
        return blocked(x_NK, grid.block)
    if grid.granularity == "tensor":
        return x_NK.reshape(1, 1, -1)
    return x_NK.reshape(x_NK.shape[0], -1, grid.group_length(x_NK.shape[1]))


def ungrouped(groups: Tensor, shape: Sequence[int], grid: Grid) -> Tensor:
    """Inverse of `grouped`: [N, K] = shape."""
    return groups.reshape(tuple(shape)) if grid.block is None else unblocked(groups, shape, grid.block)


def fit_matrix(
    x_NK: Tensor, grid: Grid, scale_dtype: torch.dtype, weight_K: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(scale, zero_point) [N, G] of a matrix ([1, 1] per tensor), in the working dtype."""
    x = grouped(x_NK, grid)
    if grid.block is not None and weight_K is not None:
        weight_K = blocked(weight_K.expand(grid.block[0], -1), grid.block).flatten()
    if weight_K is None or grid.granularity == "tensor":
        return fit(x, grid, scale_dtype)
    pieces = zip(x.unbind(1), weight_K.reshape(x.shape[1], -1), strict=True)
    fits = [fit(part, grid, scale_dtype, weight) for part, weight in pieces]
    return torch.stack([s for s, _ in fits], 1), torch.stack([z for _, z in fits], 1)


def to_quantized(codes_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor, grid: Grid, dtype: torch.dtype) -> Quantized:
    """Pack codes, scales and zero points into their storage dtypes."""
    zero_point = None if grid.symmetric else zero_NG.to(grid.storage)
    codes = codes_NK.to(grid.storage) if grid.levels is None else grid.levels.codes(codes_NK)
    known = grid if grid.global_scales else replace(grid, global_scale=None)
    return Quantized(codes, scale_NG.to(grid.scale_dtype(dtype)), zero_point, known)


def quantize(
    x_NK: Tensor,
    grid: Grid,
    scale_dtype: torch.dtype | None = None,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
) -> Quantized:
    """Round a matrix to the nearest point of its grid.

    x [N, K] floating point. scale and zero_point [N, G] are fitted unless given (a given scale is rounded to
    scale_dtype first). scale_dtype is the dtype the scale is stored in (the dtype of x when not given). Raises
    InputError where the group size does not divide K.
    """
    dtype = x_NK.dtype if scale_dtype is None else scale_dtype
    if grid.global_scales and grid.global_scale is None:
        grid = grid.reaching(float(x_NK.abs().max()) if x_NK.numel() else 0.0)
    if scale is None and grid.granularity != "tensor":
        parts = [*some_rows(len(x_NK), x_NK.shape[1], 1 if grid.block is None else grid.block[0])]
        if len(parts) > 1:
            return Quantized.stacked([quantize(x_NK[part], grid, dtype) for part in parts])
    work = x_NK.to(working_dtype(x_NK))
    if scale is None:
        scale, zero_point = fit_matrix(work, grid, dtype)
    scale = stored_scale(scale.to(work.dtype), grid, dtype)
    zero = torch.zeros_like(scale) if zero_point is None else zero_point.to(work.dtype)
    if grid.block is not None:
        return to_quantized(encode(work, spread(scale, work.shape, grid.block), zero, grid), scale, zero, grid, dtype)
    groups = work.reshape(1, 1, -1) if scale.numel() == 1 else work.reshape(len(work), scale.shape[1], -1)
    codes = encode(groups, scale.unsqueeze(-1), zero.unsqueeze(-1), grid)
    return to_quantized(codes.reshape(work.shape), scale, zero, grid, dtype)


def fake_quantize(x_NK: Tensor, grid: Grid, scale_dtype: torch.dtype | None = None) -> Tensor:
    """Quantize and dequantize: the values of the quantized matrix, in the dtype of x."""
    return quantize(x_NK, grid, scale_dtype).dequantize(x_NK.dtype)
