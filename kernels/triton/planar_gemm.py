"""The weight-only GEMM, out = x (codes - zero)^T scale + bias, over planar words of 4 or 8 bits (w4a16, w8a16).

Computed as out^T = W x^T: the weights are the left operand, which Hopper's matrix instruction takes from registers,
so that unpacked weights never go back through shared memory, and a tile of 16 tokens still fills the instruction
(m64n16k16). One step of the main loop is one block of words (`layouts.words`): 16 / bits planes of 32 columns each,
every plane multiplied by its own slice of x.

    scale    on the sums where tokens are few: BLOCK_M multiply-adds per row and group, on exact integer products;
             on the weights where they are many: one multiply per weight, rounded as `Quantized.dequantize` rounds it.
             One scale per channel is applied once, after the loop.
    split K  few tokens leave most of the processor idle, so SPLIT_K programs share a tile (`split_k`).
    scales   of the next step are loaded while this one multiplies: they are too narrow for the asynchronous copies
             that bring words and activations, and their latency would be paid in every step.
    tables   codes of a table of levels are looked up in registers (`look_up`). A group of 16 columns is half a plane:
             words are then read 16 at a time, and every half multiplied by its own slice of x.
    tails    tokens and rows beyond the end are read from token and row 0 and never stored; columns beyond the end are
             zeros of x times padding, scaled like the last group.

Given up: a layout of words by tile, tensor memory accelerator loads. Thousands of tokens: `dequantize_gemm`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.layouts.words import PLANE, Planar, planar_block, planar_words
from compress.kernels.triton.int8_gemm import power8, unpack8
from compress.kernels.triton.level_lookup import byte_planes, kind_of_table, look_up
from compress.kernels.triton.split_k import finish, partials, pieces
from compress.kernels.triton.unpack import power4, raise4, unpack4
from compress.kernels.tuning.choose import device_of, fused
from compress.kernels.tuning.table import Shape, cdiv

INTERPRET = triton.knobs.runtime.interpret
# Inline assembly, or the portable path that computes the same bits; the interpreter has no assembly.
ASSEMBLY = not INTERPRET
TRITON_DTYPE = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.constexpr_function
def power(bits: int, plane: int, dtype: tl.dtype) -> float:
    """The offset that unpacking adds to the codes of a plane."""
    return power4(plane, dtype) if bits == 4 else power8(dtype)


@triton.constexpr_function
def width_of(plane: int, group: int) -> int:
    """The columns of a plane that are multiplied at once: those of one group."""
    return plane if group == -1 else min(plane, group)


@triton.jit
def load_groups(ptr, block, n, N, K, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, COUNT: tl.constexpr):
    """The values of COUNT consecutive groups of a block for rows n: a tuple of COUNT tensors. Past the end: the last
    group's."""
    if COUNT == 8:
        a = load_groups(ptr, 2 * block, n, N, K, BLOCK_K // 2, GROUP, 4)
        b = load_groups(ptr, 2 * block + 1, n, N, K, BLOCK_K // 2, GROUP, 4)
        return a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]
    else:  # noqa: RET505  Triton 3.6 compiles what follows a constexpr return, unless it is an else
        STEP: tl.constexpr = BLOCK_K // COUNT
        last = (K - 1) // GROUP
        ptrs = ptr + n
        inside = n < N
        column = block * BLOCK_K
        a = tl.load(ptrs + min(column // GROUP, last) * N, mask=inside, other=0)
        if COUNT == 1:
            return (a,)
        else:  # noqa: RET505
            b = tl.load(ptrs + min((column + STEP) // GROUP, last) * N, mask=inside, other=0)
            if COUNT == 2:
                return a, b
            else:  # noqa: RET505
                c = tl.load(ptrs + min((column + 2 * STEP) // GROUP, last) * N, mask=inside, other=0)
                d = tl.load(ptrs + min((column + 3 * STEP) // GROUP, last) * N, mask=inside, other=0)
                return a, b, c, d


@triton.jit
def settled(acc):
    """acc, once the products summed in it are done.

    Triton leaves the last product of a step running while the next step begins, although its left operand is in
    registers, which the next step may write. With Triton 3.6 on an H100 that made sums of 8-bit words wrong."""
    return tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def planar_sums(
    x_ptr,
    m_read,
    stride_xm,
    words_ptr,
    stride_wn,
    scale_ptr,
    zero_ptr,
    n,
    N,
    K,
    blocks_per_split,
    BITS: tl.constexpr,
    PLANE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DT: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    SCALE_SUMS: tl.constexpr,
    EVEN_K: tl.constexpr,
    ASM: tl.constexpr,
    table_ptr=None,
    TABLE: tl.constexpr = 0,
):
    """[BLOCK_N, BLOCK_M] the products of this program's blocks of K, of rows m_read of x [M, K] and rows n of words
    [N, W]. TABLE: 0, or the kind of the table (`look_up`)."""
    PLANES: tl.constexpr = 16 // BITS
    BLOCK_K: tl.constexpr = PLANES * PLANE
    MIDDLE: tl.constexpr = 2 ** (BITS - 1)
    PLANES_PER_SCALE: tl.constexpr = max(1, min(GROUP // PLANE, PLANES))
    WIDTH: tl.constexpr = width_of(PLANE, GROUP)
    PARTS: tl.constexpr = PLANE // WIDTH
    k = tl.arange(0, WIDTH)
    n_read = tl.where(n < N, n, 0).to(tl.int64)
    first = tl.program_id(2) * blocks_per_split
    last = min(first + blocks_per_split, tl.cdiv(K, BLOCK_K))
    x_ptrs = x_ptr + m_read[None, :] * stride_xm + (first * BLOCK_K + k)[:, None]
    words_ptrs = words_ptr + n_read[:, None] * stride_wn + (first * PLANE + k)[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if TABLE:
        levels = byte_planes(table_ptr, TABLE, DT, ASM)
    if GROUP == -1:
        scale = tl.load(scale_ptr + n, mask=n < N, other=0.0)
        if HAS_ZERO:
            zero = tl.load(zero_ptr + n, mask=n < N, other=0)
    else:
        GROUPS: tl.constexpr = PLANES * PARTS // PLANES_PER_SCALE
        next_scales = load_groups(scale_ptr, first, n, N, K, BLOCK_K, GROUP, GROUPS)
        if HAS_ZERO:
            next_zeros = load_groups(zero_ptr, first, n, N, K, BLOCK_K, GROUP, GROUPS)
    for block in range(first, last):
        if GROUP != -1:
            scales = next_scales
            next_scales = load_groups(scale_ptr, block + 1, n, N, K, BLOCK_K, GROUP, GROUPS)
            if HAS_ZERO:
                zeros = next_zeros
                next_zeros = load_groups(zero_ptr, block + 1, n, N, K, BLOCK_K, GROUP, GROUPS)
        for part in tl.static_range(PARTS):
            words = tl.load(words_ptrs + part * WIDTH, eviction_policy="evict_first")
            if TABLE:
                weights = look_up(words, levels, TABLE, DT, ASM)
            else:
                weights = unpack4(words, DT, ASM) if BITS == 4 else unpack8(words, DT, ASM)
            for plane in tl.static_range(PLANES):
                if EVEN_K:
                    x = tl.load(x_ptrs + (plane * PLANE + part * WIDTH)).to(DT)
                else:
                    inside = (block * BLOCK_K + plane * PLANE + part * WIDTH + k)[:, None] < K
                    x = tl.load(x_ptrs + (plane * PLANE + part * WIDTH), mask=inside, other=0.0).to(DT)
                if GROUP != -1:
                    scale = scales[plane * PARTS // PLANES_PER_SCALE + part]
                    if HAS_ZERO:
                        zero = zeros[plane * PARTS // PLANES_PER_SCALE + part]
                if TABLE:
                    weight = weights[plane]
                elif HAS_ZERO:
                    raised = raise4(zero, plane, DT, ASM) if BITS == 4 else zero.to(DT) + power8(DT)
                    weight = weights[plane] - raised[:, None]
                else:
                    weight = weights[plane] - (MIDDLE + power(BITS, plane, DT))
                if GROUP == -1:
                    acc = tl.dot(weight, x, acc)
                elif SCALE_SUMS:
                    if plane % PLANES_PER_SCALE == 0:
                        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
                    sums = tl.dot(weight, x, sums)
                    if (plane + 1) % PLANES_PER_SCALE == 0:
                        acc += sums * scale[:, None].to(tl.float32)
                elif scale_ptr.dtype.element_ty == tl.float32:
                    acc = tl.dot((weight.to(tl.float32) * scale[:, None]).to(DT), x, acc)
                else:
                    acc = tl.dot(weight * scale[:, None].to(DT), x, acc)
        if BITS == 8 and ASM:
            acc = settled(acc)
        x_ptrs += BLOCK_K
        words_ptrs += PLANE
    if GROUP == -1:
        acc *= scale[:, None].to(tl.float32)
    if TABLE:
        acc *= tl.load(table_ptr + 16)
    return acc


# Tokens only bound loads and stores: a compilation per number of tokens would buy nothing.
@triton.jit(do_not_specialize=["M", "blocks_per_split"])
def planar_kernel(
    x_ptr,
    words_ptr,
    scale_ptr,
    zero_ptr,
    table_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    M,
    N,
    K,
    stride_xm,
    stride_wn,
    blocks_per_split,
    BITS: tl.constexpr,
    PLANE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    DT: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SCALE_SUMS: tl.constexpr,
    EVEN_K: tl.constexpr,
    ASM: tl.constexpr,
    TABLE: tl.constexpr,
):
    """x [M, K], words [N, W] int16, scale and zero [G, N], table fp32 [17], bias [N], out [M, N] contiguous.

    GROUP: columns per scale, 32, 64 or a multiple of 128, with a table 16, too; -1 for one scale per channel. Grid:
    (N tiles, M tiles, SPLIT_K). DT: the dtype of the products; fp32 under the interpreter, whose bf16 arithmetic is
    wrong.
    """
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m_read = tl.where(m < M, m, 0).to(tl.int64)
    acc = planar_sums(
        x_ptr,
        m_read,
        stride_xm,
        words_ptr,
        stride_wn,
        scale_ptr,
        zero_ptr,
        n,
        N,
        K,
        blocks_per_split,
        BITS,
        PLANE,
        GROUP,
        BLOCK_M,
        BLOCK_N,
        DT,
        HAS_ZERO,
        SCALE_SUMS,
        EVEN_K,
        ASM,
        table_ptr,
        TABLE,
    )
    finish(acc, m, n, out_ptr, bias_ptr, partial_ptr, counter_ptr, M, N, BLOCK_M, BLOCK_N, SPLIT_K, HAS_BIAS)


def planar_constants(weight: Planar, K: int, shape: Shape) -> dict[str, Any]:
    """Constants of a kernel over planar words, for a weight of K columns and a configuration."""
    return {
        **shape.constants(),
        "BITS": weight.bits,
        "PLANE": PLANE,
        "GROUP": weight.group_size,
        "HAS_ZERO": weight.zero is not None,
        "EVEN_K": K % planar_block(weight.bits) == 0,
        "ASM": ASSEMBLY,
        "enable_fp_fusion": True,
    }


def planar_gemm(x_MK: Tensor, weight: Planar, bias_N: Tensor | None = None, shape: Shape | None = None) -> Tensor:
    """[M, N] = x weight^T + bias on a GPU (or under the interpreter), in the dtype of x.

    x fp16 or bf16 [M, K], contiguous along K; weight with scales of the same dtype.
    `operators.words.why_not_weight_only` refuses other inputs, with reasons; here they are asserted.
    """
    (M, K), N = x_MK.shape, weight.words.shape[0]
    assert x_MK.stride(-1) == 1
    assert weight.words.shape[1] == planar_words(K, weight.bits)
    assert weight.scale.dtype == x_MK.dtype or (weight.table is not None and weight.scale.dtype == torch.float32)
    assert weight.scale.is_contiguous()
    out_MN = torch.empty(M, N, dtype=x_MK.dtype, device=x_MK.device)
    if M == 0 or N == 0:
        return out_MN
    if shape is None:
        shape = fused(M, N, K, weight.bits, weight.group_size, device_of(x_MK.device))
    for tokens in pieces(M, N, shape):
        _launch(x_MK[tokens], weight, bias_N, out_MN[tokens], shape)
    return out_MN


def _launch(x_MK: Tensor, weight: Planar, bias_N: Tensor | None, out_MN: Tensor, shape: Shape) -> None:
    (M, K), N = x_MK.shape, out_MN.shape[1]
    grid = (cdiv(N, shape.block_n), cdiv(M, shape.block_m), shape.split_k)
    partial, counters = partials(out_MN, shape)
    table = weight.table
    planar_kernel[grid](
        x_MK,
        weight.words,
        weight.scale,
        weight.zero,
        None if table is None else table.values,
        bias_N,
        out_MN,
        partial,
        counters,
        M,
        N,
        K,
        x_MK.stride(0),
        weight.words.stride(0),
        cdiv(cdiv(K, planar_block(weight.bits)), shape.split_k),
        DT=tl.float32 if INTERPRET else TRITON_DTYPE[x_MK.dtype],
        HAS_BIAS=bias_N is not None,
        SCALE_SUMS=shape.scales_sums(weight.group_size, weight.bits),
        TABLE=kind_of_table(table),
        **planar_constants(weight, K, shape),
    )
