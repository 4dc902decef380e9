"""Scales of ranges, codes and values in the loops over columns, operation by operation as in `cpu/cpu_columns.cpp`, in
float32.

CODES: (lowest, highest code, levels of a table or 0, whether zero points are free, type of scales), as
`columns.Rounding` has them. RANGE: (shares that are tried, kind, divisor, least, largest scale, type of numbers that
scales can be), as `columns.RangeSearch` has them.
"""

import triton
import triton.language as tl

from compress.kernels.triton.int8_quantize import round_even

FLOAT16, BFLOAT16 = tl.constexpr(1), tl.constexpr(2)  # `cpu.arguments.TYPES`
ASYMMETRIC, SIGNED_SCALE, UNSIGNED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)  # `columns.RANGES`


@triton.jit
def rounded_to(x, TYPE: tl.constexpr):
    """float32 rounded to a dtype of scales."""
    if TYPE == FLOAT16:
        x = x.to(tl.float16).to(tl.float32)
    elif TYPE == BFLOAT16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + ((bits >> 16) & 1) + 0x7FFF) & -65536
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x


@triton.jit
def clamped(codes, CODES: tl.constexpr):
    """Codes from the lowest to the highest."""
    return tl.minimum(tl.maximum(codes, CODES[0]), CODES[1])


@triton.jit
def encoded(x, scale, zero, table_ptr, CODES: tl.constexpr):
    """The codes nearest to x. With a table they are its levels, and each is taken up to its border."""
    shares = tl.div_rn(x, scale)
    if CODES[2] > 0:
        codes = tl.where(shares > 0.0, 0.0, 0.0) + tl.load(table_ptr)
        for i in range(1, CODES[2]):
            codes = tl.where(shares > tl.load(table_ptr + CODES[2] + i - 1), tl.load(table_ptr + i), codes)
    elif CODES[3]:
        codes = tl.where(tl.abs(scale) > 0.0, clamped(round_even(shares + zero), CODES), 0.0)
    else:
        codes = clamped(round_even(shares) + zero, CODES)
    return codes


@triton.jit
def decoded(codes, scale, zero, CODES: tl.constexpr):
    """The values of codes."""
    return rounded_to((codes - zero) * scale, CODES[4])


@triton.jit
def decide(target, scale, zero, at, n, there, cost, kept_ptr, exact_ptr, extra_ptr, price_ptr, table_ptr, CODES):
    """(codes, values, what exact weights have beyond their codes) of some outputs n of a column, which lie at `at` and
    aim at a target. Weights that become exact are noted."""
    codes = encoded(target, scale, zero, table_ptr, CODES)
    if kept_ptr is not None:
        kept = tl.load(kept_ptr + at, mask=there, other=0) != 0
        codes = tl.where(kept, codes, zero)
    value = decoded(codes, scale, zero, CODES)
    extra = target * 0.0
    if exact_ptr is not None:
        exact = tl.load(exact_ptr + at, mask=there, other=0) != 0
        if price_ptr is not None:
            error = target - value
            dear = cost * (error * error) > tl.load(price_ptr + n, mask=there, other=0.0)
            if kept_ptr is not None:
                dear = dear & kept
            exact = exact | dear
            tl.store(exact_ptr + at, exact.to(tl.uint8), mask=there)
        none = zero
        if extra_ptr is not None:
            none = encoded(target * 0.0, scale, zero, table_ptr, CODES)
        base = decoded(none, scale, zero, CODES)
        more = rounded_to(target - base, CODES[4])
        codes = tl.where(exact, none, codes)
        value = tl.where(exact, rounded_to(base + more, CODES[4]), value)
        extra = tl.where(exact, more, 0.0)
    return codes, value, extra


@triton.jit
def of_range(low, high, CODES: tl.constexpr, RANGE: tl.constexpr):
    """(scale, zero point) of ranges."""
    down = 0.0 - low
    if RANGE[1] == ASYMMETRIC:
        span = high - low
    elif RANGE[1] == SIGNED_SCALE:
        span = tl.where(high > down, 0.0 - high, down)
    elif RANGE[1] == UNSIGNED:
        span = high
    else:
        span = tl.maximum(down, high)
    wanted = tl.div_rn(span, low * 0.0 + RANGE[2])
    size = tl.minimum(tl.maximum(tl.abs(wanted), RANGE[3]), RANGE[4])
    size = rounded_to(rounded_to(size, CODES[4]), RANGE[5])
    scale = tl.where(wanted < 0.0, 0.0 - size, size)
    zero = low * 0.0
    if RANGE[1] == ASYMMETRIC:
        zero = clamped(round_even(CODES[0] - tl.div_rn(low, scale)), CODES)
    return scale, zero


@triton.jit
def best_range(x_ptr, stride, members, there, importance_ptr, factors_ptr, CODES, RANGE, TILE: tl.constexpr):
    """(scale, zero point) [ROWS] of groups whose first members are at x_ptr [1, ROWS]: the share of the whole range
    with the least squared error, which importance weights, if there is any."""
    k = tl.arange(0, TILE)
    low = tl.where(there, 0.0, 0.0)
    high = low
    for first in range(0, members, TILE):
        inside = (first + k < members)[:, None] & there[None, :]
        x = tl.load(x_ptr + (first + k).to(tl.int64)[:, None] * stride, mask=inside, other=0.0)
        low = tl.minimum(low, tl.min(x, 0))
        high = tl.maximum(high, tl.max(x, 0))
    scale, zero = of_range(low, high, CODES, RANGE)
    fewest = low * 0.0 + float("inf")
    for f in range(RANGE[0]):
        factor = tl.load(factors_ptr + f)
        tried, tried_zero = of_range(low * factor, high * factor, CODES, RANGE)
        error = low * 0.0
        for first in range(0, members, TILE):
            here = first + k < members
            inside = here[:, None] & there[None, :]
            x = tl.load(x_ptr + (first + k).to(tl.int64)[:, None] * stride, mask=inside, other=0.0)
            weight = here.to(tl.float32)
            if importance_ptr is not None:
                weight = tl.load(importance_ptr + first + k, mask=here, other=0.0)
            codes = encoded(x, tried[None, :], tried_zero[None, :], None, CODES)
            off = decoded(codes, tried[None, :], tried_zero[None, :], CODES) - x
            error += tl.sum(off * off * weight[:, None], 0)
        better = error < fewest
        fewest = tl.where(better, error, fewest)
        scale = tl.where(better, tried, scale)
        zero = tl.where(better, tried_zero, zero)
    return scale, zero
