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
    float                      s = absmax / 448                   codes are float8 e4m3, within [-448, 448]
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

from compress.errors import InputError
from compress.kernels.cpu import column_sweep
from compress.kernels.cpu.column_sweep import Range
from compress.kernels.layouts.scale_blocks import Block, block_rows, blocked, spread, unblocked
from compress.kernels.layouts.words import some_rows
from compress.weights.few_levels import scale_of_levels
from compress.weights.matrix import Term

Granularity = Literal["tensor", "channel", "group", "token", "block"]
RangeChoice = Literal["minmax", "mse"]
NumberType = Literal["int", "float", "sign"]
ScaleNumbers = Literal["stored", "float16"]

MIN_BITS, MAX_BITS = 2, 8
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
# e4m3 without infinities (OCP 8-bit floating point): four bits of significand, smallest normal number 2^-6.
FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = 448
FLOAT8_SIGNIFICAND, FLOAT8_LEAST_EXPONENT = 4, -6
# A wider range costs a float no precision, but moves its codes against the data: factors 1 to 2, where they repeat.
FLOAT_STEPS = 16
# float16's smallest number, which is no normal one, and its largest power of two.
HALF_TINY, HALF_TOP = 2.0**-24, 2.0**15


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The quantization of one tensor: the set of its values.

    bits: 2 to 8, 1 of signs. granularity: one scale per tensor, per row (`channel` of a weight, `token` of an
    activation), per `group_size` consecutive elements of a row, or per `block` of so many rows and columns, of which
    those at the edges may be smaller. range_choice: the full range (`minmax`) or the shrunken range of least error
    (`mse`; widened where codes are floats, the best of all where they are ternary). type: `float` codes are float8
    e4m3, symmetric, without groups, and the only ones with blocks; `sign` codes are -1 or 1. scales: all numbers of the
    dtype in which they are `stored`, or those alone that `float16` has, too.

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
        if self.granularity not in get_args(Granularity):
            raise InputError(f"granularity {self.granularity!r}; allowed: {', '.join(get_args(Granularity))}")
        if self.range_choice not in get_args(RangeChoice):
            raise InputError(f"range choice {self.range_choice!r}; allowed: {', '.join(get_args(RangeChoice))}")
        if self.scales not in get_args(ScaleNumbers):
            raise InputError(f"scales {self.scales!r}; allowed: {', '.join(get_args(ScaleNumbers))}")
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
        if self.type not in get_args(NumberType):
            raise InputError(f"type {self.type!r}; allowed: {', '.join(get_args(NumberType))}")
        if self.floating:
            plain = self.symmetric and self.signed and not self.narrow and not self.signed_scale
            if self.bits != MAX_BITS or not plain or self.granularity == "group":
                raise InputError(
                    "float codes have 8 bits, are symmetric and share a scale per tensor, channel, token or block; "
                    "groups, zero points and other bits are for integers"
                )

    def _check_block(self) -> None:
        if (self.granularity == "block") != (self.block is not None):
            raise InputError(
                f"granularity {self.granularity!r} with block {self.block}; give a block with granularity 'block' and "
                "only there"
            )
        if self.block is not None and (self.type != "float" or min(self.block) < 1):
            raise InputError(
                f"block {self.block} of {self.type} codes; allowed: float codes, 1 or more rows and columns"
            )

    @property
    def floating(self) -> bool:
        """True where codes are floating-point numbers."""
        return self.type == "float"

    @property
    def signs(self) -> bool:
        """True where codes are -1 or 1."""
        return self.type == "sign"

    @property
    def ternary(self) -> bool:
        """True where codes are -1, 0 or 1."""
        return self.bits == MIN_BITS and self.symmetric and self.signed and self.narrow

    @property
    def qmin(self) -> int:
        """Smallest code."""
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
        if self.floating:
            return FLOAT8
        return torch.int8 if self.signed else torch.uint8

    def group_length(self, columns: int) -> int:
        """Members of one group in a row of `columns`. Raises InputError where the group size does not divide it."""
        if self.group_size is None:
            return columns
        if columns % self.group_size:
            raise InputError(f"group size {self.group_size} does not divide {columns}; {suggest_groups([columns])}")
        return self.group_size

    def with_range(self, choice: RangeChoice) -> "Grid":
        return replace(self, range_choice=choice)


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

    codes [N, K] int8 (uint8 when unsigned, float8_e4m3fn on a float grid); scale [N, G], [N, 1], [1, 1] or, of blocks
    of R rows and C columns, [ceil(N / R), ceil(K / C)] in its stored dtype; zero_point of the same shape and of the
    codes' dtype, or None when symmetric. `weights.formats.codes.Codes` is such a matrix in a format.
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
        if block is not None:
            whole = all(len(term.codes) % block[0] == 0 for term in terms[:-1])
            if not whole or any(term.grid != terms[0].grid for term in terms):
                terms = [term.by_row() for term in terms]
        zeros = [term.zero_point for term in terms if term.zero_point is not None]
        codes, scale = torch.cat([term.codes for term in terms]), torch.cat([term.scale for term in terms])
        return replace(terms[0], codes=codes, scale=scale, zero_point=torch.cat(zeros) if zeros else None)


def scales_of(scale: Tensor, shape: Sequence[int], grid: Grid) -> Tensor:
    """The scales of a matrix [N, K] in a shape that multiplies it: those of blocks repeated for every element, others
    unchanged."""
    return scale if grid.block is None else spread(scale, shape, grid.block)


def working_dtype(x: Tensor) -> torch.dtype:
    """The dtype of arithmetic: float32, or float64 for data in float64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def round_scale(scale: Tensor, dtype: torch.dtype, numbers: ScaleNumbers = "stored") -> Tensor:
    """Round scales to the stored dtype and back; where `numbers` is float16, to those that float16 has, too. Magnitudes
    are clamped to `scale_limits`. Infinities and NaN stay, so that they do not pass for the largest number."""
    smallest, largest = scale_limits(dtype, numbers)
    working = torch.finfo(scale.dtype)  # it may be the narrower one
    sign = torch.where(scale < 0, -1.0, 1.0).to(scale.dtype)
    size = scale.abs().clamp(max(smallest, working.tiny), min(largest, working.max)).to(dtype)
    rounded = sign * (size if numbers == "stored" else size.to(torch.float16)).to(scale.dtype)
    return torch.where(scale.isinf(), scale, rounded)


def scale_limits(dtype: torch.dtype, numbers: ScaleNumbers = "stored") -> tuple[float, float]:
    """(Smallest, largest) magnitude of a scale in its stored dtype: its smallest normal and its largest number; where
    `numbers` is float16, float16's smallest number and the largest that both have."""
    stored = torch.finfo(dtype)
    if numbers == "stored":
        return stored.tiny, stored.max
    half = torch.finfo(torch.float16)
    if stored.eps <= half.eps:
        return HALF_TINY, half.max
    return HALF_TINY, (2 - stored.eps) * HALF_TOP  # of fewer digits, all of them ones


def stored_scale(scale: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """`round_scale` for the scales of a grid; a scale of signs may be 0."""
    rounded = round_scale(scale, dtype, grid.scales)
    return torch.where(scale == 0, scale, rounded) if grid.signs else rounded


def scale_of_range(lo: Tensor, hi: Tensor, grid: Grid, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(scale, zero_point) of ranges [lo, hi] (lo <= 0 <= hi, any shape), both in the dtype of `lo`."""
    kind, divisor = steps_of_range(grid)
    if kind == "asymmetric":
        scale = round_scale((hi - lo) / divisor, scale_dtype, grid.scales)
        return scale, torch.round(grid.qmin - lo / scale).clamp(grid.qmin, grid.qmax)
    span = hi if kind == "unsigned" else torch.maximum(-lo, hi)
    if kind == "signed scale":
        span = torch.where(hi > -lo, -hi, -lo)
    return round_scale(span / divisor, scale_dtype, grid.scales), torch.zeros_like(span)


def steps_of_range(grid: Grid) -> tuple[Range, float]:
    """(The kind of quantity that the scale is computed from, the number of steps by which it is divided)."""
    half = 2 ** (grid.bits - 1)
    if not grid.symmetric:
        return "asymmetric", grid.qmax - grid.qmin
    if grid.floating:
        return "magnitude", FLOAT8_MAX
    if grid.signed_scale:
        return "signed scale", half
    if not grid.signed:
        return "unsigned", grid.qmax
    return "magnitude", half - 1 if grid.narrow else half - 0.5


def encode(x: Tensor, scale: Tensor, zero_point: Tensor, grid: Grid) -> Tensor:
    """Codes of `x` in its dtype, whole numbers or values of e4m3. Ties go to the even code; out of range saturates."""
    if grid.signs:
        return torch.where(x < 0, -1.0, 1.0).to(x.dtype)
    if grid.floating:
        return round_to_e4m3((x / scale).clamp(grid.qmin, grid.qmax))
    return (torch.round(x / scale) + zero_point).clamp(grid.qmin, grid.qmax)


def encode_unsigned(x: Tensor, step: Tensor, zero: Tensor, bits: int) -> Tensor:
    """Codes 0 ... 2^bits - 1 of `x` in its dtype, for a zero point that is not rounded; 0 where the step is 0."""
    codes = torch.round(x / step + zero).clamp(0, 2**bits - 1)
    return torch.where(step == 0, torch.zeros_like(codes), codes)


def round_to_e4m3(x: Tensor) -> Tensor:
    """The value of e4m3 nearest to each of x, |x| <= 448, in the dtype of x; a tie goes to the even significand."""
    if x.dtype != torch.float64:
        return x.to(FLOAT8).to(x.dtype)
    # torch converts float64 to float8 through float32, which would round twice.
    exponent = torch.frexp(x).exponent.clamp(min=FLOAT8_LEAST_EXPONENT + 1)  # |x| < 2^exponent
    step = torch.ldexp(torch.ones_like(x), exponent - FLOAT8_SIGNIFICAND)
    return torch.round(x / step) * step


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
    if grid.floating:
        return [2 ** (step / FLOAT_STEPS) for step in range(FLOAT_STEPS)]
    return [1 - step / SEARCH_STEPS for step in range(int(SEARCH_STEPS * SEARCH_SHRINK))]


def fit(x: Tensor, grid: Grid, scale_dtype: torch.dtype, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(scale, zero_point) of x [..., g], one per leading index, in the working dtype.

    weight: [g], weights of the members' squared errors in the range search (like the diagonal of a Hessian).
    """
    x = x.to(working_dtype(x))
    if grid.signs or (grid.ternary and grid.range_choice == "mse"):
        best = scale_of_levels(x, weight, zero=grid.ternary)
        return stored_scale(best, grid, scale_dtype), torch.zeros_like(best)
    lo, hi = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)
    scale, zero_point = scale_of_range(lo, hi, grid, scale_dtype)
    if grid.range_choice == "minmax":
        return scale, zero_point
    importance = None if weight is None else (weight / weight.mean().clamp(min=torch.finfo(x.dtype).tiny)).to(x.dtype)
    if grid.type == "int" and column_sweep.takes(x, scale_dtype):
        rounding = column_sweep.Rounding(grid.qmin, grid.qmax, scale_dtype)
        numbers = column_sweep.ScaleRange(*scale_limits(scale_dtype, grid.scales), half=grid.scales == "float16")
        x_gN = x.reshape(-1, x.shape[-1]).t()
        asked = (range_factors(grid), *steps_of_range(grid), rounding, numbers)
        found = column_sweep.search_ranges(x_gN, importance, *asked)
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
    return Quantized(codes_NK.to(grid.storage), scale_NG.to(dtype), zero_point, grid)


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
