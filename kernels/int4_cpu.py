"""4-bit linears on the CPU, through the product that ships with torch.

`ops.weight_only_linear` runs on a CPU too, but it unpacks the whole weight in every call. torch's own product reads
4-bit weights directly; it wants its own layout, so a weight that stays on the CPU is laid out for it once.

    packed      uint8 [N, K / 2], in an order that only torch knows
    scale_zero  [G, N, 2] in the dtype of x: value = (code - 8) scale + shift

shift = (8 - zero) scale is rounded to the dtype of x, so asymmetric weights are off by up to half a unit in the last
place of that shift; symmetric weights are exact. No gradient: to train on top of such a layer use `ops`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from compress.errors import InputError
from compress.kernels.pack import Planar, unpack_planar

GROUPS = (256, 128, 64, 32)
ROWS = 16
MIDDLE = 8


class CpuInt4(NamedTuple):
    """A weight as torch's CPU product reads it; group_size in columns."""

    packed: Tensor
    scale_zero: Tensor
    group_size: int


def why_not_cpu(weight: Planar, columns: int) -> list[str]:
    """Reasons why torch's CPU product cannot take this weight; empty when it can."""
    reasons = []
    rows = len(weight.words)
    if weight.bits != 4:
        reasons.append(f"{weight.bits} bits; allowed: 4")
    if weight.words.device.type != "cpu":
        reasons.append(f"the weight is on {weight.words.device.type}, not cpu")
    if rows % ROWS:
        reasons.append(f"{rows} outputs; a multiple of {ROWS} is needed")
    if weight.group_size != -1 and weight.group_size not in GROUPS:
        reasons.append(f"group size {weight.group_size}; allowed: {', '.join(map(str, GROUPS))}, -1")
    if columns % GROUPS[-1]:
        reasons.append(f"{columns} inputs; a multiple of {GROUPS[-1]} is needed")
    return reasons


def to_cpu(weight: Planar, columns: int) -> CpuInt4:
    """Lay out a weight of `columns` inputs. Raises InputError with every reason why it cannot be."""
    reasons = why_not_cpu(weight, columns)
    if reasons:
        raise InputError("; ".join(reasons))
    group = weight.group_size
    if group == -1:
        group = next(size for size in GROUPS if columns % size == 0)
    scale_GN = weight.scale.expand(columns // group, -1)
    shift_GN = torch.zeros_like(scale_GN)
    if weight.zero is not None:
        shift_GN = (MIDDLE - weight.zero.to(scale_GN.dtype)) * scale_GN
    codes_NK = unpack_planar(weight.words, 4, columns).to(torch.int32).contiguous()
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes_NK, 2)
    return CpuInt4(packed, torch.stack([scale_GN, shift_GN], -1).contiguous(), group)


@torch.library.custom_op("compress::int4_cpu_linear", mutates_args=())
def int4_cpu_linear(x: Tensor, packed: Tensor, scale_zero: Tensor, bias: Tensor | None, group_size: int) -> Tensor:
    """[..., N] = x weight^T + bias, in the dtype of x, which is the dtype of scale_zero."""
    if x.dtype != scale_zero.dtype:
        raise InputError(f"x is {x.dtype}, scales are {scale_zero.dtype}; lay the weight out for the dtype of x")
    if x.shape[-1] != 2 * packed.shape[1]:
        raise InputError(f"x has {x.shape[-1]} columns, the weight {2 * packed.shape[1]}")
    x_MK = x.reshape(-1, x.shape[-1]).contiguous()
    out_MN = torch.ops.aten._weight_int4pack_mm_for_cpu(x_MK, packed, group_size, scale_zero)
    if bias is not None:
        out_MN = (out_MN.to(torch.float32) + bias).to(x.dtype)
    return out_MN.view(*x.shape[:-1], scale_zero.shape[1])


@int4_cpu_linear.register_fake
def _(x: Tensor, packed: Tensor, scale_zero: Tensor, bias: Tensor | None, group_size: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], scale_zero.shape[1])
