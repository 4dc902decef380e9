"""Products with trellis codes, in words by rows (`kernels.layouts.trellis`) or in strips
(`kernels.layouts.trellis_strips`), which a CPU reads.

Where compiled kernels run, on a CPU or a GPU, few tokens are multiplied as codes are decoded; for more, codes are
decoded to dense rows first. Elsewhere torch decodes them, for every product.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from compress.kernels import reference
from compress.kernels.cpu import trellis as compiled
from compress.kernels.errors import InputError
from compress.kernels.layouts.trellis import Code, TrellisWords, run_blocks
from compress.kernels.layouts.trellis_strips import TrellisStrips, words_by_rows
from compress.kernels.operators.devices import HALF, runs_on_cpu, why_not_floats, why_not_triton
from compress.kernels.operators.register import gradient_operator, operator, outputs

# Tokens that a CPU multiplies as it decodes. Measured: dense rows are faster from there on for a weight of 576 x 1,536,
# and from about 150 on for one of 4,096 x 4,096.
FEW = 64
FEW_ON_GPU = 64  # in tiles of 32 at most
MOST_STATE_BITS = 14  # of a search on a GPU: 16 states for each of 1,024 threads
SEGMENT = 8  # rows of a run that a GPU decodes one after the other


def why_not_trellis(code: Code, dtype: torch.dtype, device: torch.device) -> list[str]:
    """Reasons why no compiled kernel decodes on this device; empty when one does."""
    if not runs_on_cpu(device):
        return why_not_floats(device, x=dtype)
    if dtype == torch.float64:
        return ["the CPU kernel computes in float32; x is float64"]
    return compiled.why_not_products(code)


def why_not_on_gpu(code: Code, device: torch.device) -> list[str]:
    """Reasons why no Triton kernel searches paths of a code on this device; empty when one does."""
    reasons = [*why_not_triton(device)]
    if not reasons and code.state_bits > MOST_STATE_BITS:
        reasons.append(f"{code.state_bits} bits of a state; allowed: up to {MOST_STATE_BITS}")
    return reasons


def why_not_fused(code: Code, rows: int, dtype: torch.dtype) -> list[str]:
    """Reasons why the GPU's kernel for few tokens does not multiply such a weight of so many rows; empty when it
    does."""
    reasons = [] if dtype in HALF else [f"x is {dtype}; allowed: float16, bfloat16"]
    if rows > code.run and code.run % SEGMENT:
        reasons.append(f"runs of {code.run} outputs; allowed: multiples of {SEGMENT}")
    return reasons


def lay_in_strips(weight: TrellisWords) -> TrellisStrips | None:
    """A weight in strips; None where no compiled product reads them."""
    if not runs_on_cpu(weight.words.device) or compiled.why_not_products(weight.code):
        return None
    return compiled.lay_in_strips(weight)


def values_by_run(weight: TrellisWords | TrellisStrips, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """(Rows, their values [rows, K]) of a weight, rounded as they are stored, in a dtype."""
    work = torch.float64 if weight.scale.dtype == torch.float64 else torch.float32
    for own, levels in _levels_by_run(weight):
        values = levels.to(work) * weight.scale[own].to(work).unsqueeze(1)
        yield own, values.to(weight.scale.dtype).to(dtype)


def _levels_by_run(weight: TrellisWords | TrellisStrips) -> Iterator[tuple[slice, Tensor]]:
    strips = weight if isinstance(weight, TrellisStrips) else lay_in_strips(weight)
    if strips is not None and runs_on_cpu(strips.words.device) and not compiled.why_not_products(strips.code):
        whole = compiled.levels_of_strips(strips)
        return ((own, whole[own]) for own, _ in weight.code.parts(weight.rows))
    return run_blocks(words_by_rows(weight))


def _held(words: Tensor, before: Tensor | None, scale: Tensor, code: Code) -> TrellisWords | TrellisStrips:
    return TrellisWords(words, scale, code) if before is None else TrellisStrips(words, before, scale, code)


def trellis_product(x: Tensor, weight: TrellisWords | TrellisStrips, bias: Tensor | None = None) -> Tensor:
    """`trellis_linear` with a weight of either layout."""
    before, code = weight.before if isinstance(weight, TrellisStrips) else None, weight.code
    sizes = (code.bits, code.state_bits, code.multiplier, code.run)
    return trellis_linear(x, weight.words, before, weight.scale, bias, *sizes)


@operator("compress::trellis_linear", outputs(lambda words, before, scale, *_: scale.shape[0]))
def trellis_linear(
    x: Tensor,
    words: Tensor,
    before: Tensor | None,
    scale: Tensor,
    bias: Tensor | None,
    bits: int,
    state_bits: int,
    multiplier: int,
    run: int,
) -> Tensor:
    """[..., N] = x weight^T + bias, in the dtype of x. The weight is the parts of a `TrellisStrips` or, with before
    None, of a `TrellisWords`."""
    weight = _held(words, before, scale, Code(bits, state_bits, multiplier, run))
    if x.shape[-1] != weight.columns:
        raise InputError(f"x has {x.shape[-1]} columns; the weight has {weight.columns}")
    x_MK = x.reshape(-1, x.shape[-1])
    on_cpu, compiles = runs_on_cpu(x.device), not why_not_trellis(weight.code, x.dtype, x.device)
    if compiles and not on_cpu and scale.dtype != torch.float64:
        out_MN = _product_on_gpu(x_MK, words_by_rows(weight), bias)
    elif compiles and on_cpu and len(x_MK) <= FEW:
        strips = weight if isinstance(weight, TrellisStrips) else compiled.lay_in_strips(weight)
        sums = compiled.multiply_strips(x_MK.float(), strips)
        out_MN = (sums if bias is None else sums + bias.float()).to(x.dtype)
    else:
        out_MN = x_MK.new_empty(len(x_MK), len(scale))
        for own, dense in values_by_run(weight, x.dtype):
            out_MN[:, own] = reference.linear(x_MK, dense, None if bias is None else bias[own])
    return out_MN.view(*x.shape[:-1], len(scale))


def _product_on_gpu(x_MK: Tensor, weight: TrellisWords, bias: Tensor | None) -> Tensor:
    from compress.kernels.triton.trellis_gemm import trellis_dequantize_gemm, trellis_gemm

    x_MK = x_MK if x_MK.stride(-1) == 1 else x_MK.contiguous()
    few = len(x_MK) <= FEW_ON_GPU and not why_not_fused(weight.code, weight.rows, x_MK.dtype)
    return (trellis_gemm if few else trellis_dequantize_gemm)(x_MK, weight, bias)


@gradient_operator(trellis_linear, bias=None)
def trellis_gradient(
    grad: Tensor,
    shape: tuple[int, ...],
    words: Tensor,
    before: Tensor | None,
    scale: Tensor,
    bias: Tensor | None,
    *code: int,
) -> Tensor:
    """[..., K] = grad weight, in the dtype of grad [..., N]: the input gradient of `trellis_linear`."""
    weight = _held(words, before, scale, Code(*code))
    grad_MN = grad.reshape(-1, grad.shape[-1])
    wide = grad.dtype == torch.float64 or scale.dtype == torch.float64
    if not (wide or runs_on_cpu(grad.device) or why_not_trellis(weight.code, grad.dtype, grad.device)):
        from compress.kernels.triton.trellis_gemm import input_gradient

        return input_gradient(grad_MN.contiguous(), words_by_rows(weight)).view(shape)
    out_MK = grad_MN.new_zeros(len(grad_MN), weight.columns)
    for own, dense in values_by_run(weight, grad.dtype):
        out_MK += grad_MN[:, own] @ dense
    return out_MK.view(shape)
