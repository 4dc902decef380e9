"""Products with trellis codes (`kernels.layouts.trellis`).

On a CPU with AVX2, few tokens are multiplied as codes are decoded; for more, codes are decoded to a dense block of rows
first. Elsewhere torch decodes them, for every product.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from compress.kernels import reference
from compress.kernels.cpu import trellis as compiled
from compress.kernels.layouts.trellis import Code, TrellisWords, run_blocks
from compress.kernels.operators.register import operator

FEW = 8  # tokens for which codes are decoded anew, four by four
NO_TRITON = "trellis codes have no Triton kernel: torch decodes them for each product"


def why_not_trellis(code: Code, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Reasons why no compiled kernel decodes on this device; empty when one does."""
    if device.type != "cpu":
        return [NO_TRITON]
    if dtype == torch.float64:
        return ["the CPU kernel computes in float32; x is float64"]
    return compiled.why_not(code.state_bits, code.bits)


def values_by_run(weight: TrellisWords, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """(Rows, their values [rows, K]) of a weight, rounded as they are stored, in a dtype."""
    work = torch.float64 if weight.scale.dtype == torch.float64 else torch.float32
    found = run_blocks(weight)
    if not why_not_trellis(weight.code, torch.float32, weight.words.device):
        whole = compiled.decode_levels(weight)
        found = ((own, whole[own]) for own, _ in weight.code.parts(weight.rows))
    for own, levels in found:
        values = levels.to(work) * weight.scale[own].to(work).unsqueeze(1)
        yield own, values.to(weight.scale.dtype).to(dtype)


@operator("compress::trellis_linear")
def trellis_linear(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    bits: int,
    state_bits: int,
    multiplier: int,
    run: int,
) -> Tensor:
    """[..., N] = x weight^T + bias, in the dtype of x. The weight is the parts of a `TrellisWords`."""
    weight = TrellisWords(words, scale, Code(bits, state_bits, multiplier, run))
    x_MK = x.reshape(-1, x.shape[-1])
    if len(x_MK) <= FEW and not why_not_trellis(weight.code, x.dtype, x.device):
        sums = compiled.multiply_levels(x_MK.float(), weight) * scale.float()
        out_MN = (sums if bias is None else sums + bias.float()).to(x.dtype)
    else:
        out_MN = x_MK.new_empty(len(x_MK), len(scale))
        for own, dense in values_by_run(weight, x.dtype):
            out_MN[:, own] = reference.linear(x_MK, dense, None if bias is None else bias[own])
    return out_MN.view(*x.shape[:-1], len(scale))


@trellis_linear.register_fake
def _(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    bits: int,
    state_bits: int,
    multiplier: int,
    run: int,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], scale.shape[0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, words, scale, _, *code = inputs
    ctx.save_for_backward(words, scale)
    ctx.code = code


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return trellis_gradient(grad, *ctx.saved_tensors, *ctx.code), *(None,) * 7


trellis_linear.register_autograd(_gradient, setup_context=_save)


@operator("compress::trellis_gradient")
def trellis_gradient(
    grad: Tensor, words: Tensor, scale: Tensor, bits: int, state_bits: int, multiplier: int, run: int
) -> Tensor:
    """[..., K] = grad weight, in the dtype of grad [..., N]: the input gradient of `trellis_linear`."""
    weight = TrellisWords(words, scale, Code(bits, state_bits, multiplier, run))
    grad_MN = grad.reshape(-1, grad.shape[-1])
    out_MK = grad_MN.new_zeros(len(grad_MN), weight.columns)
    for own, dense in values_by_run(weight, grad.dtype):
        out_MK += grad_MN[:, own] @ dense
    return out_MK.view(*grad.shape[:-1], weight.columns)


@trellis_gradient.register_fake
def _(grad: Tensor, words: Tensor, scale: Tensor, bits: int, state_bits: int, multiplier: int, run: int) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], words.shape[1] * 32 // bits)


def _save_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, words, scale, *code = inputs
    ctx.save_for_backward(words, scale)
    ctx.code = code


def _gradient_of_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return trellis_linear(grad, *ctx.saved_tensors, None, *ctx.code), *(None,) * 6


trellis_gradient.register_autograd(_gradient_of_gradient, setup_context=_save_gradient)
