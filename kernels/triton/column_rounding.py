"""Scales of ranges, codes and values in the loops over columns, operation by operation as in `cpu/cpu_columns.cpp`, in
float32.
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
def encoded(x, scale, zero, low_code, high_code, table_ptr, LEVELS: tl.constexpr, FREE_ZERO: tl.constexpr):
    """The codes nearest to x. With a table of LEVELS they are its levels, and each is taken up to its border."""
    shares = tl.div_rn(x, scale)
    if LEVELS > 0:
        codes = tl.zeros_like(shares) + tl.load(table_ptr)
        for i in range(1, LEVELS):
            codes = tl.where(shares <= tl.load(table_ptr + LEVELS + i - 1), codes, tl.load(table_ptr + i))
    elif FREE_ZERO:
        codes = tl.minimum(tl.maximum(round_even(shares + zero), low_code), high_code)
        codes = tl.where(tl.abs(scale) > 0.0, codes, 0.0)
    else:
        codes = tl.minimum(tl.maximum(round_even(shares) + zero, low_code), high_code)
    return codes


@triton.jit
def decoded(codes, scale, zero, SCALE_TYPE: tl.constexpr):
    """The values of codes."""
    return rounded_to((codes - zero) * scale, SCALE_TYPE)


@triton.jit
def decide(
    target,
    scale,
    zero,
    at,
    n,
    there,
    cost,
    kept_ptr,
    exact_ptr,
    extra_ptr,
    price_ptr,
    table_ptr,
    low_code,
    high_code,
    LEVELS: tl.constexpr,
    FREE_ZERO: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
):
    """(codes, values, what exact weights have beyond their codes) of some outputs n of a column, which lie at `at` and
    aim at a target. Weights that become exact are noted."""
    codes = encoded(target, scale, zero, low_code, high_code, table_ptr, LEVELS, FREE_ZERO)
    if kept_ptr is not None:
        kept = tl.load(kept_ptr + at, mask=there, other=0) != 0
        codes = tl.where(kept, codes, zero)
    value = decoded(codes, scale, zero, SCALE_TYPE)
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
            none = encoded(target * 0.0, scale, zero, low_code, high_code, table_ptr, LEVELS, FREE_ZERO)
        base = decoded(none, scale, zero, SCALE_TYPE)
        more = rounded_to(target - base, SCALE_TYPE)
        codes = tl.where(exact, none, codes)
        value = tl.where(exact, rounded_to(base + more, SCALE_TYPE), value)
        extra = tl.where(exact, more, 0.0)
    return codes, value, extra


@triton.jit
def of_range(
    low,
    high,
    low_code,
    high_code,
    divisor,
    least,
    largest,
    KIND: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    NUMBER_TYPE: tl.constexpr,
):
    """(scale, zero point) of ranges."""
    down = 0.0 - low
    if KIND == ASYMMETRIC:
        span = high - low
    elif KIND == SIGNED_SCALE:
        span = tl.where(high > down, 0.0 - high, down)
    elif KIND == UNSIGNED:
        span = high
    else:
        span = tl.maximum(down, high)
    wanted = tl.div_rn(span, low * 0.0 + divisor)
    size = tl.minimum(tl.maximum(tl.abs(wanted), least), largest)
    size = rounded_to(rounded_to(size, SCALE_TYPE), NUMBER_TYPE)
    scale = tl.where(wanted < 0.0, 0.0 - size, size)
    zero = low * 0.0
    if KIND == ASYMMETRIC:
        zero = tl.minimum(tl.maximum(round_even(low_code - tl.div_rn(low, scale)), low_code), high_code)
    return scale, zero


@triton.jit
def best_range(
    x_ptr,
    stride,
    members,
    there,
    importance_ptr,
    factors_ptr,
    low_code,
    high_code,
    divisor,
    least,
    largest,
    FACTORS: tl.constexpr,
    KIND: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    NUMBER_TYPE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    """(scale, zero point) [ROWS] of groups whose first members are at x_ptr [1, ROWS]: the share of the whole range
    with the least squared error, which importance weights, if there is any."""
    k = tl.arange(0, TILE)
    low = tl.zeros((ROWS,), tl.float32)
    high = tl.zeros((ROWS,), tl.float32)
    for first in range(0, members, TILE):
        inside = (first + k < members)[:, None] & there[None, :]
        x = tl.load(x_ptr + (first + k).to(tl.int64)[:, None] * stride, mask=inside, other=0.0)
        low = tl.minimum(low, tl.min(x, 0))
        high = tl.maximum(high, tl.max(x, 0))
    scale, zero = of_range(low, high, low_code, high_code, divisor, least, largest, KIND, SCALE_TYPE, NUMBER_TYPE)
    fewest = tl.full((ROWS,), float("inf"), tl.float32)
    for f in range(FACTORS):
        factor = tl.load(factors_ptr + f)
        tried, tried_zero = of_range(
            low * factor, high * factor, low_code, high_code, divisor, least, largest, KIND, SCALE_TYPE, NUMBER_TYPE
        )
        error = tl.zeros((ROWS,), tl.float32)
        for first in range(0, members, TILE):
            here = first + k < members
            inside = here[:, None] & there[None, :]
            x = tl.load(x_ptr + (first + k).to(tl.int64)[:, None] * stride, mask=inside, other=0.0)
            weight = here.to(tl.float32)
            if importance_ptr is not None:
                weight = tl.load(importance_ptr + first + k, mask=here, other=0.0)
            codes = encoded(x, tried[None, :], tried_zero[None, :], low_code, high_code, None, 0, False)
            off = decoded(codes, tried[None, :], tried_zero[None, :], SCALE_TYPE) - x
            error += tl.sum(off * off * weight[:, None], 0)
        better = error < fewest
        fewest = tl.where(better, error, fewest)
        scale = tl.where(better, tried, scale)
        zero = tl.where(better, tried_zero, zero)
    return scale, zero
