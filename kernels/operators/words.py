"""The low-bit linears as torch operators: schema, shapes for tracing, input gradient, and which path runs.

    weight_only_linear       w4a16, w8a16: x times a weight in planar words (`layouts.words.Planar`); its gradient is
    one, too
    w8a8_linear              x rounded to int8 per token (or by a static scale), int8 products, scales in the epilogue

Shapes: x [..., K] in any leading shape, M tokens once flattened, N outputs, G groups. Weights are frozen: only x gets a
gradient, grad W for a weight-only linear and the straight-through grad W where x is rounded (as if it were not).

Four paths, the same numbers up to the order of the sums:

    triton       on CUDA, and on the CPU under TRITON_INTERPRET=1, when `why_not_...` has nothing against it
    dequantize   there too: the weight block by block in the dtype of x, then cuBLAS; for many tokens (`tuning.choose`),
                 and for what only the fused kernel refuses, such as groups of 96
    cpu          `cpu_gemm`, compiled on first use; where it cannot be (`cpu.why_not`), torch's own products, the
                 weight unpacked a block of rows at a time
    reference    plain torch (`reference`), anywhere: what a GPU falls back to, slowly (fp64, no Triton)

batch_invariant: a token's result then does not depend, to the last bit, on how many tokens are multiplied with it. One
configuration for all (`tuning.choose.invariant`), or the one loop of a CPU that adds up every token alike; products
that cannot promise that are refused. Only the forward product has this mode, not its gradients. w8a8 needs none: its
integer sums are exact, in any order.
"""

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from compress.kernels import reference
from compress.kernels.cpu import gemm as cpu_gemm
from compress.kernels.errors import InputError
from compress.kernels.layouts.words import PLANE, Planar, planar_block, planar_weight, planar_words
from compress.kernels.operators.blocks import product_of_blocks, row_blocks
from compress.kernels.operators.register import operator
from compress.kernels.tuning.choose import choose, device_of, invariant, kind_of
from compress.kernels.tuning.table import Shape

Path = Literal["triton", "dequantize", "cpu", "reference"]

# 255 * 128 * K, the largest sum with an asymmetric activation, must stay within int32.
MAX_INT8_COLUMNS = 2**16
OLDEST_CAPABILITY = (8, 0)
HALF = (torch.float16, torch.bfloat16)
HALF_PLANE = PLANE // 2


@cache
def _why_not_triton(device: torch.device) -> tuple[str, ...]:
    if find_spec("triton") is None:
        return ("triton is not installed",)
    from triton import knobs

    if knobs.runtime.interpret:
        return ()
    if device.type != "cuda":
        return (f"the device is {device.type}, not cuda",)
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        return (f"compute capability {capability[0]}.{capability[1]}; at least 8.0 is needed",)
    return ()


def runs_on_cpu(device: torch.device) -> bool:
    """True for a device whose products are those of compiled loops, or of torch."""
    return path_of(device, [*_why_not_triton(device)]) == "cpu"


def why_not_weight_only(x: Tensor, weight: Planar, device: torch.device | None = None) -> list[str]:
    """Reasons why the Triton kernel cannot multiply x by this weight; empty when it can. device: in place of that of
    x."""
    reasons = [*_why_not_triton(device or x.device)]
    if x.dtype not in HALF:
        reasons.append(f"x is {x.dtype}; allowed: float16, bfloat16")
    if weight.scale.dtype != x.dtype and (weight.table is None or weight.scale.dtype != torch.float32):
        reasons.append(f"scales are {weight.scale.dtype}, x is {x.dtype}; lay the weight out for the dtype of x")
    return reasons + why_not_groups(weight)


def why_not_groups(weight: Planar) -> list[str]:
    """Reasons why a loop over blocks of words cannot scale groups of such a weight; empty when it can."""
    group, block = weight.group_size, planar_block(weight.bits)
    if weight.table is not None and group == HALF_PLANE:
        return []
    if group != -1 and (group % PLANE or (group % block and block % group)):
        return [f"group size {group}; allowed: 32, 64, multiples of {block}, -1 (one scale per channel)"]
    return []


def why_not_batch_invariant(x: Tensor, weight: Planar) -> list[str]:
    """Reasons why the product of x with this weight has no batch-invariant path; empty when it has one."""
    if path_of(x.device, [*_why_not_triton(x.device)]) == "cpu":
        return cpu_gemm.why_not("weight_only", x, weight.scale, weight.group_size)
    return why_not_weight_only(x, weight)


def refuse(what: str, reasons: list[str]) -> None:
    """Raise InputError where there are reasons against a request."""
    if reasons:
        raise InputError(f"{what}: {'; '.join(reasons)}")


def why_not_dequantize(x: Tensor, weight: Planar) -> list[str]:
    """Reasons why the weight cannot be dequantized by Triton and multiplied by x; empty when it can."""
    reasons = [*_why_not_triton(x.device)]
    for what, dtype in (("x is", x.dtype), ("scales are", weight.scale.dtype)):
        if dtype not in (*HALF, torch.float32):
            reasons.append(f"{what} {dtype}; allowed: float16, bfloat16, float32")
    return reasons


def why_not_w8a8(x: Tensor, weight_NK: Tensor, device: torch.device | None = None) -> list[str]:
    """Reasons why the Triton kernels cannot run w8a8 on x; empty when they can. device: in place of that of x."""
    reasons = [*_why_not_triton(device or x.device)]
    if x.dtype not in (*HALF, torch.float32):
        reasons.append(f"x is {x.dtype}; allowed: float16, bfloat16, float32")
    if weight_NK.shape[1] >= MAX_INT8_COLUMNS:
        reasons.append(f"{weight_NK.shape[1]} columns; int32 sums are exact below {MAX_INT8_COLUMNS}")
    return reasons


def path_of(device: torch.device, reasons: list[str]) -> Path:
    """The path that runs on a device given the reasons against Triton."""
    if not reasons:
        return "triton"
    return "cpu" if device.type == "cpu" else "reference"


def weight_only_path(x_MK: Tensor, weight: Planar, batch_invariant: bool = False) -> tuple[Path, Shape | None]:
    """The path of a weight-only product, and the configuration of the fused kernel where that is the path."""
    if batch_invariant:
        refuse("batch_invariant", why_not_batch_invariant(x_MK, weight))
    dequantized = why_not_dequantize(x_MK, weight)
    if dequantized:
        return path_of(x_MK.device, dequantized), None
    if why_not_weight_only(x_MK, weight):
        return "dequantize", None
    operation = "weight_only" if weight.table is None else "levels"
    kind = kind_of(operation, weight.bits, weight.group_size, weight.zero is not None, x_MK.dtype)
    sizes = (len(weight.words), x_MK.shape[1], device_of(x_MK.device))
    if batch_invariant:
        return "triton", invariant(kind, *sizes)
    chosen = choose(kind, len(x_MK), *sizes)
    return ("triton", chosen) if isinstance(chosen, Shape) else ("dequantize", None)


def _rows(x: Tensor) -> Tensor:
    """x as [M, K], contiguous along K."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _shaped(out_MN: Tensor, x: Tensor) -> Tensor:
    """[M, N] in the leading shape of x."""
    return out_MN if x.dim() == 2 else out_MN.view(*x.shape[:-1], out_MN.shape[1])


def _parts(weight: Planar, columns: int) -> Iterator[tuple[slice, Planar]]:
    """The weight in blocks of rows that unpack into bounded memory."""
    for rows in row_blocks(len(weight.words), columns):
        zero = None if weight.zero is None else weight.zero[:, rows]
        yield rows, weight._replace(words=weight.words[rows], scale=weight.scale[:, rows], zero=zero)


def _unpacked_product(x_MK: Tensor, weight: Planar, bias: Tensor | None) -> Tensor:
    blocks = ((rows, planar_weight(part, x_MK.shape[1])) for rows, part in _parts(weight, x_MK.shape[1]))
    return product_of_blocks(x_MK, blocks, len(weight.words), bias)


def _check_words(x: Tensor, words: Tensor, bits: int) -> None:
    if words.shape[1] != planar_words(x.shape[-1], bits):
        raise InputError(f"x has {x.shape[-1]} columns; {words.shape[1]} words of {bits} bits do not hold as many")


def planar_product(x: Tensor, weight: Planar, bias: Tensor | None, batch_invariant: bool) -> Tensor:
    """[..., N] = x weight^T + bias, in the dtype of x, on the path of `weight_only_path`."""
    _check_words(x, weight.words, weight.bits)
    x_MK = _rows(x)
    path, shape = weight_only_path(x_MK, weight, batch_invariant)
    refused = weight.table is not None or cpu_gemm.why_not("weight_only", x, weight.scale, weight.group_size)
    if path == "triton":
        from compress.kernels.triton.planar_gemm import planar_gemm

        out_MN = planar_gemm(x_MK, weight, bias, shape)
    elif path == "dequantize":
        from compress.kernels.triton.dequantize_gemm import dequantize_gemm

        out_MN = dequantize_gemm(x_MK, weight, bias)
    elif path == "cpu" and not refused:
        out_MN = cpu_gemm.weight_only(x_MK, weight, bias, batch_invariant=batch_invariant)
    else:
        out_MN = _unpacked_product(x_MK, weight, bias)
    return _shaped(out_MN, x)


def planar_gradient(grad: Tensor, weight: Planar, columns: int) -> Tensor:
    """[..., K] = grad weight, in the dtype of grad [..., N]: the input gradient of `planar_product`."""
    grad_MN = _rows(grad)
    if why_not_dequantize(grad, weight):
        sums_MK = torch.zeros(
            len(grad_MN), columns, dtype=torch.promote_types(grad.dtype, torch.float32), device=grad.device
        )
        for rows, part in _parts(weight, columns):
            sums_MK += grad_MN[:, rows] @ planar_weight(part, columns).to(grad.dtype)
        out_MK = sums_MK.to(grad.dtype)
    else:
        from compress.kernels.triton.dequantize_gemm import input_gradient

        out_MK = input_gradient(grad_MN, weight, columns)
    return out_MK.view(*grad.shape[:-1], columns)


def _like_product(x: Tensor, words: Tensor, bits: int) -> Tensor:
    """The shape, for tracing, of x times a weight in planar words."""
    torch._check(words.shape[1] == planar_words(x.shape[-1], bits), lambda: "words do not hold as many columns as x")
    return x.new_empty(*x.shape[:-1], words.shape[0])


@operator("compress::weight_only_linear")
def weight_only_linear(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group_size: int,
    batch_invariant: bool = False,
) -> Tensor:
    """[..., N] = x weight^T + bias, in the dtype of x. The weight is the parts of a `layouts.words.Planar`."""
    return planar_product(x, Planar(words, scale, zero, group_size, bits), bias, batch_invariant)


@weight_only_linear.register_fake
def _(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group_size: int,
    batch_invariant: bool = False,
) -> Tensor:
    return _like_product(x, words, bits)


def _save_weight_only(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, words, scale, zero, _, bits, group_size, *_ = inputs
    ctx.save_for_backward(words, scale, zero)
    ctx.layout = (bits, group_size, x.shape[-1])


def _weight_only_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return weight_only_gradient(grad, *ctx.saved_tensors, *ctx.layout), *(None,) * 7


weight_only_linear.register_autograd(_weight_only_gradient, setup_context=_save_weight_only)


@operator("compress::weight_only_gradient")
def weight_only_gradient(
    grad: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, bits: int, group_size: int, columns: int
) -> Tensor:
    """[..., K] = grad weight, in the dtype of grad [..., N]: the input gradient of `weight_only_linear`."""
    return planar_gradient(grad, Planar(words, scale, zero, group_size, bits), columns)


@weight_only_gradient.register_fake
def _(
    grad: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, bits: int, group_size: int, columns: int
) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], columns)


def _save_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *weight, bits, group_size, _ = inputs
    ctx.save_for_backward(*weight)
    ctx.layout = (bits, group_size)


def _gradient_of_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return weight_only_linear(grad, *ctx.saved_tensors, None, *ctx.layout), None, None, None, None, None, None


weight_only_gradient.register_autograd(_gradient_of_gradient, setup_context=_save_gradient)


@cache
def _int_mm_is_exact() -> bool:
    """True where torch's int8 product on this CPU is exact: without VNNI, oneDNN adds pairs of products in 16 bits,
    which saturate."""
    codes = torch.full((32, 64), -128, dtype=torch.int8)
    codes[::2] = 127
    return torch.equal(torch.ops.aten._int_mm(codes, codes.t()), reference.int8_matmul(codes, codes))


@operator("compress::w8a8_linear")
def w8a8_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    row_sum: Tensor | None,
    bias: Tensor | None,
    input_scale: Tensor | None,
    input_zero: Tensor | None,
    symmetric: bool,
) -> Tensor:
    """[..., N] = quantize(x) weight^T scaled + bias, in the dtype of x.

    weight int8 [N, K]; weight_scale fp32 [N]; row_sum int32 [N] = `reference.row_sums(weight)`, needed where the
    activations have a zero point. input_scale fp32 [1] and input_zero int32 [1]: static activations; without them
    every token is fitted, `symmetric` or not.
    """
    if weight.shape[1] != x.shape[-1]:
        raise InputError(f"x has {x.shape[-1]} columns, the weight {weight.shape[1]}")
    if row_sum is None and (input_zero is not None or (input_scale is None and not symmetric)):
        raise InputError("asymmetric activations need the row sums of the weight: pass reference.row_sums(weight)")
    x_MK = _rows(x)
    path = path_of(x.device, why_not_w8a8(x, weight))
    if path == "cpu" and not cpu_gemm.why_not("w8a8", x, weight_scale):
        out_MN = cpu_gemm.w8a8(x_MK, weight, weight_scale, row_sum, bias, input_scale, input_zero, symmetric)
        return _shaped(out_MN, x)
    quantize_static, quantize_tokens = reference.quantize_static, reference.quantize_tokens
    if path == "triton":
        from compress.kernels.triton.int8_quantize import quantize_static, quantize_tokens
    if input_scale is not None:
        codes_MK, scale, zero = quantize_static(x_MK, input_scale, input_zero), input_scale, input_zero
    else:
        codes_MK, scale, zero = quantize_tokens(x_MK, symmetric)
    if path == "triton":
        from compress.kernels.triton.int8_gemm import w8a8_gemm

        out_MN = w8a8_gemm(codes_MK, scale, zero, weight, weight_scale, row_sum, bias, x.dtype)
    else:
        exact = path == "cpu" and _int_mm_is_exact()
        product = torch.ops.aten._int_mm(codes_MK, weight.t()) if exact else reference.int8_matmul(codes_MK, weight)
        out_MN = reference.rescale(product, scale, weight_scale, zero, row_sum, bias, x.dtype)
    return _shaped(out_MN, x)


@w8a8_linear.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    row_sum: Tensor | None,
    bias: Tensor | None,
    input_scale: Tensor | None,
    input_zero: Tensor | None,
    symmetric: bool,
) -> Tensor:
    torch._check(weight.shape[1] == x.shape[-1], lambda: "weight and x differ in columns")
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _save_w8a8(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])


def _w8a8_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    weight_NK, scale_N = ctx.saved_tensors
    dense_NK = weight_NK.to(torch.float32) * scale_N.unsqueeze(-1)
    return grad @ dense_NK.to(grad.dtype), None, None, None, None, None, None, None


w8a8_linear.register_autograd(_w8a8_gradient, setup_context=_save_w8a8)
