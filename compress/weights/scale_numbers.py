"""The numbers that scales can be.

    stored    all that the dtype of the model has, from its smallest normal one up
    float16   those of them that float16 has, too
    e8m0      powers of two from 2^-126 to 2^124, a byte each: 127 more than the exponent       (OCP MX)
    e4m3      float8 numbers above 0, divided by a `global_scale` in float32                    (NVFP4)

Scales of the last two are computed with, and held, in float32, whatever dtype the model has: all are exact there, but
for what dividing by a global scale rounds, and ours is a power of two.
"""

import math

import torch
from torch import Tensor

from compress.weights.number_formats import ScaleNumbers

OWN_DTYPE = ("e8m0", "e4m3")  # numbers that do not depend on the dtype of the model

# e4m3 without infinities (OCP 8-bit floating point): four bits of significand, smallest normal number 2^-6.
FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX, FLOAT8_NAN = 448, 0x7F  # as a number; as a byte, without its sign
FLOAT8_SIGNIFICAND, FLOAT8_LEAST_EXPONENT = 4, -6
FLOAT8_TINY = 2.0**-9
# float16's smallest number, which is no normal one, and its largest power of two.
HALF_TINY, HALF_TOP = 2.0**-24, 2.0**15
E8M0_BIAS, E8M0_NAN = 127, 255
# Exponents of our scales: normal in float32, and the largest levels times the scale are, too.
E8M0_LEAST, E8M0_MOST = -126, 118
# So much room is left above the largest scale of a matrix, because weights that make up for others grow.
ROOM = 2


def round_to_e4m3(x: Tensor) -> Tensor:
    """The value of e4m3 nearest to each of x, |x| <= 448, in the dtype of x; a tie goes to the even significand."""
    if x.dtype != torch.float64:
        return x.to(FLOAT8).to(x.dtype)
    # torch converts float64 to float8 through float32, which would round twice.
    exponent = torch.frexp(x).exponent.clamp(min=FLOAT8_LEAST_EXPONENT + 1)  # |x| < 2^exponent
    step = torch.ldexp(torch.ones_like(x), exponent - FLOAT8_SIGNIFICAND)
    return torch.round(x / step) * step


def round_scale(
    scale: Tensor, dtype: torch.dtype, numbers: ScaleNumbers = "stored", global_scale: float | None = None
) -> Tensor:
    """Round scales to the nearest number of their kind, in their own dtype. Magnitudes are clamped to `scale_limits`.
    Infinities and NaN stay, so that they do not pass for the largest number. dtype: of the model. global_scale: that
    e4m3 needs."""
    smallest, largest = scale_limits(dtype, numbers, global_scale)
    working = torch.finfo(scale.dtype)  # it may be the narrower one
    sign = torch.where(scale < 0, -1.0, 1.0).to(scale.dtype)
    size = scale.abs().clamp(max(smallest, working.tiny), min(largest, working.max))
    if numbers == "e8m0":
        rounded = nearest_power(size)
    elif numbers == "e4m3":
        assert global_scale is not None, "e4m3 scales come with a global scale"
        local = round_to_e4m3((size * global_scale).clamp(FLOAT8_TINY, FLOAT8_MAX))
        rounded = (local / global_scale).to(torch.float32)
    else:
        rounded = size.to(dtype) if numbers == "stored" else size.to(dtype).to(torch.float16)
    return torch.where(scale.isinf(), scale, sign * rounded.to(scale.dtype))


def scale_limits(
    dtype: torch.dtype, numbers: ScaleNumbers = "stored", global_scale: float | None = None
) -> tuple[float, float]:
    """(Smallest, largest) magnitude of a scale: of its stored dtype, the smallest normal and the largest number; where
    `numbers` is float16, float16's smallest number and the largest that both have."""
    if numbers == "e8m0":
        return 2.0**E8M0_LEAST, 2.0**E8M0_MOST
    if numbers == "e4m3":
        divisor = 1.0 if global_scale is None else global_scale
        return FLOAT8_TINY / divisor, FLOAT8_MAX / divisor
    stored = torch.finfo(dtype)
    if numbers == "stored":
        return stored.tiny, stored.max
    half = torch.finfo(torch.float16)
    if stored.eps <= half.eps:
        return HALF_TINY, half.max
    return HALF_TINY, (2 - stored.eps) * HALF_TOP  # of fewer digits, all of them ones


def nearest_power(x: Tensor) -> Tensor:
    """The power of two nearest to each of x > 0; the larger one where two are."""
    part, exponent = torch.frexp(x)  # part in [1/2, 1)
    return torch.ldexp(torch.ones_like(x), exponent - (part < 3 / 4).to(exponent.dtype))


def power_above(x: Tensor) -> Tensor:
    """The least power of two above each of x >= 0, and not beyond the limits of e8m0."""
    return torch.ldexp(torch.ones_like(x), torch.frexp(x).exponent.clamp(E8M0_LEAST, E8M0_MOST))


def global_scale_for(largest: float) -> float:
    """The global scale with which e4m3 reaches local scales up to `largest`: a power of two, so that values are exact
    in any dtype that has their exponents. With it there is room above `largest`, for twice that scale."""
    if not 0 < largest < math.inf:
        return 1.0
    _, exponent = math.frexp(FLOAT8_MAX / (ROOM * largest))
    return 2.0 ** min(max(exponent - 1, E8M0_LEAST), E8M0_MOST)


def e8m0_codes(scale: Tensor) -> Tensor:
    """uint8, the codes of powers of two."""
    return (torch.frexp(scale.float()).exponent + (E8M0_BIAS - 1)).to(torch.uint8)


def of_e8m0(codes: Tensor) -> Tensor:
    """float32, the powers of two that codes are of; NaN for that of NaN."""
    powers = torch.ldexp(torch.ones_like(codes, dtype=torch.float64), codes.to(torch.int32) - E8M0_BIAS)
    return torch.where(codes == E8M0_NAN, torch.nan, powers).to(torch.float32)
