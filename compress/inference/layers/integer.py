"""Integer-only layers: the reference for the computation of an int8 device (Jacob et al. 2018, arXiv 1712.05877, 2.2).

With x = s_x (q_x - z_x), w_n = s_n q_n, y = s_y (q_y - z_y) and the bias in units of the accumulator,

    acc_n = sum_k (q_x[k] - z_x) q_n[k] + b_n             int32          b_n = round(bias_n / (s_x s_n))
    q_y   = clamp(z_y + round(m_n acc_n))                 int8           m_n = s_x s_n / s_y
    m_n   = 2^-shift_n mantissa_n 2^-31                                  |mantissa_n| in [2^30, 2^31), int32

m_n is no float at run time: the accumulator is multiplied by the mantissa, of which the upper 32 of the doubled 64 bits
are kept, rounded, and then shifted right, rounded. The first is one instruction where it is used (SQRDMULH of ARM); its
64-bit product is written out here, and is the only thing wider than 32 bits.

For |m| <= 1 the codes are those of the float computation on the same inputs up to one step. Rounding the bias moves the
result by at most |m| / 2 <= 2^-(shift + 1) steps, keeping the upper bits by 2^-(shift + 1) where a shift follows, and
the last rounding by 1/2: together at most 1, so that the nearest code is at most one away.

Departs from the paper: weights are symmetric, with a scale per output channel that may be negative (z_w = 0), so that
the terms in z_w of its equation 7 are absent; the zero point is taken off the input first. Codes are signed.

Shapes: x [B, C, ...] of a convolution, [..., K] of a linear layer; N outputs, K inputs of one output, M rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.base.errors import InputError
from compress.model.convolution import Geometry, output_sizes, patches, samples
from compress.model.layers import Layer
from compress.weights.grid import Quantized
from compress.weights.rounding import ActivationCodes

INT32 = torch.iinfo(torch.int32)
FRACTION = 31  # bits of a mantissa behind the binary point
BEYOND = 2**30  # steps, far above the distance of any int8 codes; adding a zero point does not overflow int32


@dataclass(frozen=True)
class FixedPoint:
    """Factors [N] as int32 mantissas, 2^30 <= |mantissa| < 2^31, and right shifts (negative: left)."""

    mantissa: Tensor
    shift: Tensor

    def value(self) -> Tensor:
        """The values of the factors, float64."""
        return torch.ldexp(self.mantissa.double(), -(self.shift + FRACTION))


def fixed_point(factor_N: Tensor) -> FixedPoint:
    """The nearest fixed-point numbers to factors [N]. Raises InputError where 32 bits cannot hold one."""
    factor = factor_N.double()
    fraction, exponent = torch.frexp(factor)  # factor = fraction * 2^exponent, |fraction| in [1/2, 1)
    mantissa = torch.round(fraction * 2.0**FRACTION)
    carried = mantissa.abs() == 2.0**FRACTION
    mantissa = torch.where(carried, mantissa / 2, mantissa)
    shift = -(exponent + carried.to(exponent.dtype))
    good = torch.isfinite(factor) & (factor != 0) & (shift.abs() < FRACTION)
    if not bool(good.all()):
        wrong = float(factor[~good][0])
        raise InputError(
            f"the scales of input and weight are {wrong:g} of the output's; allowed: 2^-31 to 2^30, so check the ranges"
        )
    return FixedPoint(mantissa.to(torch.int32), shift.to(torch.int32))


def multiply_high(acc: Tensor, mantissa: Tensor) -> Tensor:
    """round(acc * mantissa / 2^31) of int32 tensors, halves up."""
    product = acc.to(torch.int64) * mantissa.to(torch.int64)
    return ((product + 2 ** (FRACTION - 1)) >> FRACTION).clamp(INT32.min, INT32.max).to(torch.int32)


def shift_right(value: Tensor, shift: Tensor) -> Tensor:
    """round(value / 2^shift) of int32 tensors, shift 0 to 31, halves away from zero."""
    floor = value >> shift
    rest = value - (floor << shift)  # 0 <= rest < 2^shift
    half = torch.ones_like(shift) << (shift - 1).clamp(min=0)
    up = (rest > half) | ((rest == half) & (value >= 0))
    return floor + (up & (shift > 0)).to(torch.int32)


def requantize(acc: Tensor, factor: FixedPoint, zero_point: int, lowest: int, highest: int) -> Tensor:
    """int8 codes of int32 accumulators [..., N]."""
    # The left shift saturates: factors above 1 take such an accumulator out of the output's range anyway.
    left = (-factor.shift).clamp(min=0)
    most = torch.full_like(left, INT32.max) >> left
    grown = torch.minimum(torch.maximum(acc, -most), most) << left
    steps = shift_right(multiply_high(grown, factor.mantissa), factor.shift.clamp(min=0).expand_as(grown))
    return (steps.clamp(-BEYOND, BEYOND) + zero_point).clamp(lowest, highest).to(torch.int8)


@dataclass(frozen=True)
class IntegerLayer:
    """A convolution or linear layer on int8 codes. weight int8 [N, K]; bias int32 [N]; input_zero: zero point of the
    input; factor: s_x s_n / s_y; output_zero, lowest, highest: zero point and range of the output codes."""

    weight: Tensor
    bias: Tensor
    input_zero: int
    factor: FixedPoint
    output_zero: int
    lowest: int
    highest: int
    geometry: Geometry | None = None

    def accumulate(self, codes: Tensor) -> Tensor:
        """int32 accumulators [..., N]; [M, N] for a convolution."""
        x = codes.to(torch.int32) - self.input_zero
        weight = self.weight.to(torch.int32)
        if self.geometry is None:
            return x @ weight.t() + self.bias
        rows = patches(x, self.geometry)  # padded with 0, which is the code z_x
        parts = weight.unflatten(0, (self.geometry.groups, -1))
        return torch.cat([r @ w.t() for r, w in zip(rows, parts, strict=True)], dim=1) + self.bias

    def __call__(self, codes: Tensor) -> Tensor:
        """The int8 codes of the output from those of the input."""
        found = requantize(self.accumulate(codes), self.factor, self.output_zero, self.lowest, self.highest)
        if self.geometry is None:
            return found
        batch = samples(codes, self.geometry)
        sizes = output_sizes(batch.shape[2:], self.geometry)
        result = found.unflatten(0, (len(batch), *sizes)).movedim(-1, 1)
        return result if codes.ndim == batch.ndim else result[0]


def integer_layer(
    module: nn.Module, weight: Quantized, inputs: ActivationCodes, outputs: ActivationCodes, *, relu: bool = False
) -> IntegerLayer:
    """The integer form of a Conv1d, Conv2d, Conv3d or Linear, whose bias is taken from `module`.

    weight: its codes [N, K]: symmetric, one scale per row or in all. inputs, outputs: the fixed int8 grids of its input
    and of its output (the input of the layer after it). relu: negative outputs become 0, which costs nothing.
    Raises InputError for other grids, and where the int32 accumulator could overflow.
    """
    geometry = Layer("", module).geometry
    if weight.codes.dtype != torch.int8 or weight.zero_point is not None or weight.scale.shape[-1] != 1:
        raise InputError("integer layers have symmetric int8 weights, with one scale per output channel or in all")
    if inputs.scale is None or outputs.scale is None:
        raise InputError("integer layers have fixed ranges at their input and output; give activations=static")
    if geometry is not None and geometry.mode != "constant" and any(map(any, geometry.padding)):
        raise InputError(f"integer layers pad with zeros; this one has padding mode {geometry.mode!r}")
    rows, input_zero, output_zero = len(weight.codes), zero_of(inputs), zero_of(outputs)
    unit_N = (inputs.scale.double() * weight.scale.double()).reshape(-1).expand(rows)
    bias: Tensor | None = getattr(module, "bias", None)
    bias_N = torch.zeros_like(unit_N) if bias is None else torch.round(bias.detach().double() / unit_N)
    furthest = max(inputs.grid.qmax - input_zero, input_zero - inputs.grid.qmin)
    reach_N = weight.codes.to(torch.int64).abs().sum(1) * furthest + bias_N.abs()
    if not bool((reach_N <= INT32.max).all()):
        raise InputError(
            f"the accumulator can reach {float(reach_N.max()):.3g}, beyond int32: too many inputs for one output, or "
            "a bias far larger than what its inputs can make"
        )
    return IntegerLayer(
        weight.codes,
        bias_N.to(torch.int32),
        input_zero,
        fixed_point(unit_N / outputs.scale.double().reshape(-1)),
        output_zero,
        max(outputs.grid.qmin, output_zero) if relu else outputs.grid.qmin,
        outputs.grid.qmax,
        geometry,
    )


def zero_of(inputs: ActivationCodes) -> int:
    """The zero point of a fixed grid."""
    return 0 if inputs.zero_point is None else int(inputs.zero_point)
