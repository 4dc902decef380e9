"""Products with trellis codes (`layouts.trellis`): a fused kernel for few tokens, dequantization for many.

A state is carried down the rows: each row appends its symbols, as the encoder did, so that a weight takes a shift and a
mask for its symbol, one more of each for its state, a product, and a sum of bytes (`dp4a`, which adds the sum to the
mantissa of 2^23: a float without a conversion). Rows that follow each other in a thread are ROWS = 8 of a segment; each
segment first reads the symbols of the H rows above it.

    tile      SEGMENTS = 16 segments, whose rows of one number are the left operand of a matrix product, so that a
              product has rows 0, 8, 16 ... of the tile, the next one rows 1, 9, 17 ...
    K         of a step SLICES x 32 inputs, a slice for each warp; their sums are added at the end. Programs share
              tiles, too (`split_k`).
    levels    whole numbers of 1 / 128 below 512: exact in float16, rounded to eight bits in bfloat16. Scales are of
              outputs, so sums are scaled.

Dense blocks (many tokens, gradients) take rows as they come, each from the symbols of its H + 1 rows: any run. Their
values are those of `operators.trellis.values_by_run`.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.kernels.layouts.trellis import INPUTS, Code, TrellisWords
from compress.kernels.triton.dequantize_gemm import block_gradient, block_product
from compress.kernels.triton.planar_gemm import ASSEMBLY, INTERPRET, TRITON_DTYPE
from compress.kernels.triton.split_k import finish, partials, pieces
from compress.kernels.tuning.choose import device_of, fused_trellis
from compress.kernels.tuning.table import Shape, cdiv

ROWS = 8  # of a segment
SLICES = 8
DENSE_ROWS = 64
DENSE_WARPS = 4
SUM_OF_BYTES = "dp4a.u32.u32 $0, $1, 0x01010101, 0x4b000000;"
_SUM_OF_BYTES = tl.constexpr(SUM_OF_BYTES)
_POWER = tl.constexpr(2.0**23)
_MIDDLE = tl.constexpr(510.0)


@triton.jit
def eights(ptrs, BITS: tl.constexpr):
    """Pointers [R] to the symbols of 32 columns -> [R, 4], integers with eight symbols each."""
    a = tl.load(ptrs)
    if BITS == 1:
        low = tl.join(a, a >> 8)
        high = tl.join(a >> 16, a >> 24)
    elif BITS == 2:
        b = tl.load(ptrs + 1)
        low = tl.join(a, a >> 16)
        high = tl.join(b, b >> 16)
    elif BITS == 3:
        b = tl.load(ptrs + 1)
        c = tl.load(ptrs + 2)
        low = tl.join(a, (a >> 24 & 255) | (b << 8))
        high = tl.join((b >> 16 & 65535) | (c << 16), c >> 8)
    else:
        low = tl.join(a, tl.load(ptrs + 1))
        high = tl.join(tl.load(ptrs + 2), tl.load(ptrs + 3))
    return tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (a.shape[0], 4))


@triton.jit
def appended(state, ptrs, BITS: tl.constexpr):
    """States [R, 4, 8] with the symbols of a row each. ptrs [R]."""
    symbols = eights(ptrs, BITS)[:, :, None] >> (BITS * tl.arange(0, 8))[None, None, :]
    return (state << BITS) | (symbols & (2**BITS - 1))


@triton.jit
def wholes(state, STATE_BITS: tl.constexpr, MULTIPLIER: tl.constexpr, ASM: tl.constexpr):
    """float32, 128 times the levels of states; bits above a state are left out."""
    product = (state & (2**STATE_BITS - 1)) * MULTIPLIER
    if ASM:
        bits = tl.inline_asm_elementwise(_SUM_OF_BYTES, "=r,r", [product], dtype=tl.int32, is_pure=True, pack=1)
        return bits.to(tl.float32, bitcast=True) - (_POWER + _MIDDLE)
    else:  # noqa: RET505  a constexpr branch must be an else to stay uncompiled
        total = (product & 255) + (product >> 8 & 255) + (product >> 16 & 255) + (product >> 24 & 255)
        return total.to(tl.float32) - _MIDDLE


@triton.jit(do_not_specialize=["M", "steps_per_split"])
def trellis_kernel(
    x_ptr,
    words_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    M,
    N,
    K,
    stored,
    stride_xm,
    stride_w,
    steps_per_split,
    BITS: tl.constexpr,
    STATE_BITS: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    RUN: tl.constexpr,
    HEAD: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SLICES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
    DT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ASM: tl.constexpr,
):
    """x [M, K], words int32 [stored, ...], scale [N], bias [N], out [M, N] contiguous. RUN: a multiple of 8.

    Grid: (tiles of 8 SEGMENTS rows, M tiles, SPLIT_K). DT: the dtype of the products; fp32 under the interpreter."""
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_read = tl.where(m < M, m, 0).to(tl.int64)
    pair = tl.arange(0, SLICES * SEGMENTS)
    start = (tl.program_id(0) * SEGMENTS + pair % SEGMENTS) * 8
    start = tl.where(start < N, start, 0)
    row = start + HEAD * (start // RUN + 1)
    inner = ((tl.arange(0, SLICES) * 32)[:, None] + tl.arange(0, 32)[None, :])[:, :, None]
    none = tl.zeros((SLICES, SEGMENTS, BLOCK_M), tl.float32)
    sums = (none, none, none, none, none, none, none, none)
    first = tl.program_id(2) * steps_per_split
    for block in range(first, min(first + steps_per_split, tl.cdiv(K, SLICES * 32))):
        at = block * SLICES * 32 + (pair // SEGMENTS) * 32
        ptrs = words_ptr + tl.where(at < K, at, 0) // 32 * BITS
        k = block * SLICES * 32 + inner
        x = tl.load(x_ptr + m_read[None, None, :] * stride_xm + k, mask=k < K, other=0.0).to(DT)
        state = tl.zeros((SLICES * SEGMENTS, 4, 8), tl.int32)
        for above in tl.static_range(HEAD):
            state = appended(state, ptrs + (row + (above - HEAD)).to(tl.int64) * stride_w, BITS)
        for i in tl.static_range(8):
            at_row = row if i == 0 else tl.minimum(row + i, stored - 1)
            state = appended(state, ptrs + at_row.to(tl.int64) * stride_w, BITS)
            weight = wholes(state, STATE_BITS, MULTIPLIER, ASM).to(x.dtype)
            done = tl.dot(tl.reshape(weight, (SLICES, SEGMENTS, 32)), x, sums[0])
            sums = sums[1:] + (done,)  # noqa: RUF005 - behind the others: eight rows later the order is the first again
    even = tl.join(tl.join(tl.sum(sums[0], 0), tl.sum(sums[4], 0)), tl.join(tl.sum(sums[2], 0), tl.sum(sums[6], 0)))
    odd = tl.join(tl.join(tl.sum(sums[1], 0), tl.sum(sums[5], 0)), tl.join(tl.sum(sums[3], 0), tl.sum(sums[7], 0)))
    acc = tl.permute(tl.reshape(tl.join(even, odd), (SEGMENTS, BLOCK_M, 8)), (0, 2, 1))
    acc = tl.reshape(acc, (SEGMENTS * 8, BLOCK_M))
    n = tl.program_id(0) * SEGMENTS * 8 + tl.arange(0, SEGMENTS * 8)
    acc *= tl.load(scale_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None] / 128
    finish(acc, m, n, out_ptr, bias_ptr, partial_ptr, counter_ptr, M, N, BLOCK_M, SEGMENTS * 8, SPLIT_K, HAS_BIAS)


@triton.jit
def dequantize_trellis_kernel(
    words_ptr,
    scale_ptr,
    out_ptr,
    first_row,
    first_column,
    rows,
    stride_w,
    stride_on,
    BITS: tl.constexpr,
    STATE_BITS: tl.constexpr,
    MULTIPLIER: tl.constexpr,
    RUN: tl.constexpr,
    HEAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ASM: tl.constexpr,
):
    """Rows from first_row on and 32 columns from first_column + 32 i on -> out [rows, ...]. Grid: (units of 32 columns,
    tiles of rows)."""
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = first_row + tl.where(row < rows, row, 0)
    held = n + HEAD * (n // RUN + 1)
    ptrs = words_ptr + (first_column // 32 + tl.program_id(0)) * BITS
    state = tl.zeros((BLOCK_N, 4, 8), tl.int32)
    for above in tl.static_range(HEAD + 1):
        state = appended(state, ptrs + (held + (above - HEAD)).to(tl.int64) * stride_w, BITS)
    level = tl.reshape(wholes(state, STATE_BITS, MULTIPLIER, ASM), (BLOCK_N, 32)) / 128
    # Levels and scales are exact in fp32: one rounding of their product, to the dtype of the scales.
    value = (level * tl.load(scale_ptr + n).to(tl.float32)[:, None]).to(scale_ptr.dtype.element_ty)
    out = out_ptr + row.to(tl.int64)[:, None] * stride_on + tl.program_id(0) * 32 + tl.arange(0, 32)[None, :]
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=(row < rows)[:, None])


def code_constants(code: Code, assembly: bool = ASSEMBLY) -> dict[str, int | bool]:
    """The constants that kernels are compiled for, of a code."""
    signed = code.multiplier - 2**32 if code.multiplier >= 2**31 else code.multiplier
    found = {"BITS": code.bits, "STATE_BITS": code.state_bits, "MULTIPLIER": signed}
    return {**found, "RUN": code.run, "HEAD": code.head, "ASM": assembly}


def dequantize(weight: TrellisWords, rows: range, columns: range, out: Tensor) -> None:
    """Write rows and columns (from a multiple of 32 on) of a weight to `out`."""
    assert columns.start % INPUTS == 0
    assert weight.words.stride(1) == 1
    if not rows or not columns:
        return
    dequantize_trellis_kernel[(len(columns) // INPUTS, cdiv(len(rows), DENSE_ROWS))](
        weight.words,
        weight.scale,
        out,
        rows.start,
        columns.start,
        len(rows),
        weight.words.stride(0),
        out.stride(0),
        **code_constants(weight.code),
        BLOCK_N=DENSE_ROWS,
        num_warps=DENSE_WARPS,
    )


def trellis_dequantize_gemm(x_MK: Tensor, weight: TrellisWords, bias_N: Tensor | None = None) -> Tensor:
    """[M, N] = x weight^T + bias by dense blocks, on a GPU (or under the interpreter), in the dtype of x."""
    return block_product(x_MK, weight.rows, x_MK.dtype, bias_N, partial(dequantize, weight))


def input_gradient(grad_MN: Tensor, weight: TrellisWords) -> Tensor:
    """[M, K] = grad weight on a GPU (or under the interpreter), in the dtype of grad."""
    return block_gradient(grad_MN, weight.columns, grad_MN.dtype, partial(dequantize, weight))


def trellis_gemm(
    x_MK: Tensor, weight: TrellisWords, bias_N: Tensor | None = None, shape: Shape | None = None
) -> Tensor:
    """[M, N] = x weight^T + bias on a GPU (or under the interpreter), in the dtype of x, fp16 or bf16."""
    (M, K), N = x_MK.shape, weight.rows
    assert x_MK.stride(1) == 1
    assert weight.words.stride(1) == 1
    assert weight.code.run % ROWS == 0 or N <= weight.code.run
    out_MN = torch.empty(M, N, dtype=x_MK.dtype, device=x_MK.device)
    if M == 0 or N == 0:
        return out_MN
    if shape is None:
        shape = fused_trellis(M, N, cdiv(K, SLICES * INPUTS), device_of(x_MK.device))
    for tokens in pieces(M, N, shape):
        _launch(x_MK[tokens], weight, bias_N, out_MN[tokens], shape)
    return out_MN


def _launch(x_MK: Tensor, weight: TrellisWords, bias_N: Tensor | None, out_MN: Tensor, shape: Shape) -> None:
    (M, K), N = x_MK.shape, weight.rows
    partial, counters = partials(out_MN, shape)
    trellis_kernel[(cdiv(N, shape.block_n), cdiv(M, shape.block_m), shape.split_k)](
        x_MK,
        weight.words,
        weight.scale,
        bias_N,
        out_MN,
        partial,
        counters,
        M,
        N,
        K,
        len(weight.words),
        x_MK.stride(0),
        weight.words.stride(0),
        cdiv(cdiv(K, SLICES * INPUTS), shape.split_k),
        **code_constants(weight.code),
        SEGMENTS=shape.block_n // ROWS,
        SLICES=SLICES,
        BLOCK_M=shape.block_m,
        SPLIT_K=shape.split_k,
        DT=tl.float32 if INTERPRET else TRITON_DTYPE[x_MK.dtype],
        HAS_BIAS=bias_N is not None,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
