"""A product of one token with what stands before and behind it in a block of a decoder, in one launch (`products`).

A matrix instruction would multiply 15 tokens that are not there, and a sum that is split over programs waits for the
last of them. Here a program holds the whole token in its threads, multiplies ROWS rows by it in fp32, and adds up over
its threads once. Every thread reads 16 bytes of every row: codes of one block of words. All rows are read before the
token is normalized, so that the norm takes no time of its own.

Given up: words of more than one row in a load; products of two numbers at once, which would round.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.layouts.words import PLANE, Planar, planar_block
from compress.kernels.step_functions import Activation
from compress.kernels.triton.planar_gemm import ASSEMBLY, INTERPRET, TRITON_DTYPE
from compress.kernels.triton.steps.activations import NO_ACTIVATION, activate
from compress.kernels.triton.steps.norms import NO_NORM, NO_NORM_PARTS, NORM_CHUNK, RowNorm, normalize, row_statistics
from compress.kernels.tuning.table import bucket, cdiv

ROWS = 8
WORDS_OF_A_WARP = 256  # 16 bytes a thread
MOST_WARPS = 16
_POWER_BITS = tl.constexpr(0x4B000000)


@triton.constexpr_function
def mantissa_of(bits: int, plane: int) -> str:
    """One instruction for what the compiler at times takes two for: (word & mask) | power."""
    return f"lop3.b32 $0, $1, {(2**bits - 1) << (bits * plane):#x}, 0x4b000000, 0xea;"


@triton.jit
def code_in_place(word, BITS: tl.constexpr, PLANE: tl.constexpr, ASM: tl.constexpr):
    """The codes of a plane less their middle, times 2^(BITS PLANE), fp32: bits of a word where they stand become the
    mantissa of 2^23, without a conversion."""
    MASK: tl.constexpr = (2**BITS - 1) << (BITS * PLANE)
    MIDDLE: tl.constexpr = 2.0**23 + 2 ** (BITS * PLANE + BITS - 1)
    if ASM:
        code = tl.inline_asm_elementwise(mantissa_of(BITS, PLANE), "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1)
    else:
        code = word.to(tl.int32, bitcast=True) & MASK | _POWER_BITS
    return code.to(tl.float32, bitcast=True) - MIDDLE


@triton.jit
def token_kernel(
    x_ptr,
    norm_weight_ptr,
    norm_bias_ptr,
    words_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    residual_ptr,
    length_ptr,
    out_ptr,
    N,
    K,
    stride_wn,
    epsilon,
    BITS: tl.constexpr,
    PLANE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    DT: tl.constexpr,
    HAS_ZERO: tl.constexpr,
    ASM: tl.constexpr,
    NORM: tl.constexpr,
    CHUNK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
):
    """x [K], words [N, W] int16, scale and zero [G, N], bias and residual [N], length int64 [1], out [N], or [N / 2]
    where GATED: the first half of the rows is the gate, the second what it multiplies. NORM, ACTIVATION: -1 for none.
    WORDS of a row are multiplied at once. Grid: (N / ROWS,)."""
    PLANES: tl.constexpr = 16 // BITS
    BLOCK_K: tl.constexpr = PLANES * PLANE
    BLOCKS: tl.constexpr = WORDS // PLANE
    PARTS: tl.constexpr = 1 if GROUP == -1 else max(1, BLOCK_K // GROUP)
    MIDDLE: tl.constexpr = 2 ** (BITS - 1)
    i = tl.arange(0, ROWS)
    if GATED:
        HALF: tl.constexpr = ROWS // 2
        n = tl.where(i < HALF, tl.program_id(0) * HALF + i, N // 2 + tl.program_id(0) * HALF + i - HALF)
    else:
        n = tl.program_id(0) * ROWS + i
    n_read = tl.where(n < N, n, 0)
    w = tl.arange(0, WORDS)
    pair = tl.arange(0, WORDS // 2)
    pairs = tl.cdiv(K, BLOCK_K) * PLANE // 2
    # Two words as one number: narrower ones would be taken apart again and again.
    words_ptrs = (words_ptr + n_read.to(tl.int64)[:, None] * stride_wn).to(tl.pointer_type(tl.int32)) + pair[None, :]
    acc = tl.zeros((ROWS, BLOCKS), tl.float32)
    for start in range(0, 2 * pairs, WORDS):
        low = tl.load(words_ptrs, mask=(start // 2 + pair < pairs)[None, :], other=0, eviction_policy="evict_first")
        high = low.to(tl.uint32, bitcast=True) >> 16
        words_ptrs += WORDS // 2
        if NORM != -1:
            mean, inverse = row_statistics(x_ptr, K, epsilon, CHUNK, NORM)
            mean, inverse = tl.full((1,), 0.0, tl.float32) + mean, tl.full((1,), 0.0, tl.float32) + inverse
        block = start // PLANE + tl.arange(0, BLOCKS)
        first = (start + w) // PLANE * BLOCK_K + (start + w) % PLANE
        for part in tl.static_range(PARTS):
            if GROUP != -1:
                group = tl.minimum((block * BLOCK_K + part * (BLOCK_K // PARTS)) // GROUP, (K - 1) // GROUP)
                scale = tl.load(scale_ptr + group[None, :] * N + n_read[:, None]).to(tl.float32)
            sums = tl.zeros((ROWS, WORDS // 2), tl.float32)
            whole = tl.zeros((WORDS,), tl.float32)
            for plane in tl.static_range(part * (PLANES // PARTS), (part + 1) * (PLANES // PARTS)):
                column = first + plane * PLANE
                x = tl.load(x_ptr + column, mask=column < K, other=0.0).to(tl.float32)
                if NORM != -1:
                    x = normalize(
                        x[None, :], mean, inverse, norm_weight_ptr, norm_bias_ptr, column, column < K, NORM, DT
                    )
                    x = tl.where(column < K, tl.reshape(x.to(tl.float32), (WORDS,)), 0.0)
                even, odd = tl.split(tl.reshape(x * 2 ** -(BITS * plane), (WORDS // 2, 2)))
                sums += code_in_place(low, BITS, plane, ASM) * even[None, :]
                sums += code_in_place(high, BITS, plane, ASM) * odd[None, :]
                if HAS_ZERO:
                    whole += x
            blocks = tl.sum(tl.reshape(sums, (ROWS, BLOCKS, PLANE // 2)), 2)
            if HAS_ZERO:
                at = n_read[:, None] if GROUP == -1 else group[None, :] * N + n_read[:, None]
                zero = tl.load(zero_ptr + at).to(tl.float32) - MIDDLE
                blocks -= zero * tl.sum(tl.reshape(whole, (BLOCKS, PLANE)), 1)[None, :]
            acc += blocks if GROUP == -1 else blocks * scale
    out = tl.sum(acc, 1)
    if GROUP == -1:
        out *= tl.load(scale_ptr + n_read).to(tl.float32)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + n_read).to(tl.float32)
    # Of a pointer that is absent, nothing may be compiled.
    if length_ptr is not None:  # noqa: SIM102
        if tl.program_id(0) == 0:
            tl.store(length_ptr, tl.load(length_ptr) + 1)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(out, (2, ROWS // 2)), (1, 0)))
        out = activate(gate.to(DT).to(tl.float32), ACTIVATION).to(DT).to(tl.float32) * up.to(DT).to(tl.float32)
        width, column = N // 2, tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
    else:
        out = out if ACTIVATION == -1 else activate(out.to(DT).to(tl.float32), ACTIVATION)
        width, column = N, n
    if residual_ptr is not None:
        out = out.to(DT).to(tl.float32) + tl.load(residual_ptr + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + column, out.to(out_ptr.dtype.element_ty), mask=column < width)


def token_tile(K: int, bits: int) -> tuple[int, int]:
    """(Words of a row that are multiplied at once, warps) for K columns."""
    words = min(bucket(cdiv(K, planar_block(bits)) * PLANE), MOST_WARPS * WORDS_OF_A_WARP)
    return words, max(1, words // WORDS_OF_A_WARP)


def token_product(
    x_1K: Tensor,
    weight: Planar,
    bias_N: Tensor | None,
    norm: RowNorm | None,
    activation: Activation | None,
    gated: bool,
    residual_1N: Tensor | None,
    length: Tensor | None,
    rows: int = ROWS,
) -> Tensor:
    """`products.step_product` of one token."""
    K, N = x_1K.shape[1], weight.words.shape[0]
    out_1N = torch.empty(1, N // 2 if gated else N, dtype=x_1K.dtype, device=x_1K.device)
    parts, (words, warps) = norm or NO_NORM_PARTS, token_tile(K, weight.bits)
    token_kernel[(cdiv(N, rows),)](
        x_1K,
        parts.weight,
        parts.bias,
        weight.words,
        weight.scale,
        weight.zero,
        bias_N,
        residual_1N,
        length,
        out_1N,
        N,
        K,
        weight.words.stride(0),
        parts.epsilon,
        BITS=weight.bits,
        PLANE=PLANE,
        GROUP=weight.group_size,
        ROWS=rows,
        WORDS=words,
        DT=tl.float32 if INTERPRET else TRITON_DTYPE[x_1K.dtype],
        HAS_ZERO=weight.zero is not None,
        ASM=ASSEMBLY,
        NORM=NO_NORM if norm is None else int(norm.variant),
        CHUNK=min(NORM_CHUNK, bucket(K)),
        ACTIVATION=NO_ACTIVATION if activation is None else int(activation),
        GATED=gated,
        num_warps=warps,
        enable_fp_fusion=True,
    )
    return out_1N
