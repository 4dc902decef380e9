"""A product of one step's few tokens with what stands before and behind it in a block of a decoder, in one launch:

    out = [residual +] [act(gate) up of] norm(x) weight^T + bias

over planar words of 4 or 8 bits, by the loop of `planar_gemm`.

    one token   has a kernel of its own (`one_token`), which also computes the norm
    norm        of several tokens, in a launch before
    gate, up    a program multiplies half a tile of rows of each, so that it holds both factors of what it stores
    residual    added, rounded as torch rounds a product first, by the program that stores the tile
    length      the number of tokens in a cache, one more from here on: the attention before this product has read it

Given up: more than BLOCK_M tokens.
"""

from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.kernels import workspace
from compress.kernels.layouts.words import Planar, planar_block
from compress.kernels.step_functions import Activation
from compress.kernels.triton.planar_gemm import INTERPRET, TRITON_DTYPE, planar_constants, planar_sums
from compress.kernels.triton.split_k import arrives_last, collect, tile_partials
from compress.kernels.triton.steps.activations import NO_ACTIVATION, activate
from compress.kernels.triton.steps.norms import RowNorm, norm_rows
from compress.kernels.triton.steps.one_token import token_product
from compress.kernels.tuning.choose import Device, choose, device_of, fused, kind_of
from compress.kernels.tuning.table import ProductKind, Shape, cdiv

BLOCK_M = 16  # tokens: the least tile of the matrix instruction


# Tokens only bound loads and stores: a compilation per number of tokens would buy nothing.
@triton.jit(do_not_specialize=["M", "blocks_per_split"])
def step_kernel(
    x_ptr,
    words_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    residual_ptr,
    length_ptr,
    out_ptr,
    partial_ptr,
    counter_ptr,
    M,
    N,
    K,
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
    SCALE_SUMS: tl.constexpr,
    EVEN_K: tl.constexpr,
    ASM: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
):
    """x [M, K] and residual [M, N] contiguous, words [N, W] int16, scale and zero [G, N], bias [N], length int64 [1].
    Grid: (N tiles, 1, SPLIT_K). ACTIVATION: -1 for none. GATED: the first half of the rows is the gate, the second what
    it multiplies."""
    tile_n = tl.program_id(0)
    m = tl.arange(0, BLOCK_M)
    i = tl.arange(0, BLOCK_N)
    if GATED:
        HALF: tl.constexpr = BLOCK_N // 2
        n = tl.where(i < HALF, tile_n * HALF + i, N // 2 + tile_n * HALF + i - HALF)
    else:
        n = tile_n * BLOCK_N + i
    acc = planar_sums(
        x_ptr,
        tl.where(m < M, m, 0),
        K,
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
    )
    # Of a pointer that is absent, nothing may be compiled.
    if length_ptr is not None:  # noqa: SIM102
        if tile_n + tl.program_id(2) == 0:
            tl.store(length_ptr, tl.load(length_ptr) + 1)
    stores = True
    if SPLIT_K > 1:
        stores = arrives_last(acc, partial_ptr, counter_ptr, BLOCK_M, BLOCK_N, SPLIT_K)
    if stores:
        if SPLIT_K > 1:
            acc = collect(partial_ptr, counter_ptr, BLOCK_M, BLOCK_N, SPLIT_K)
        if bias_ptr is not None:
            acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (2, BLOCK_N // 2, BLOCK_M)), (1, 2, 0)))
            out = activate(gate.to(DT).to(tl.float32), ACTIVATION).to(DT).to(tl.float32) * up.to(DT).to(tl.float32)
            width, column = N // 2, tile_n * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        else:
            out = acc if ACTIVATION == -1 else activate(acc.to(DT).to(tl.float32), ACTIVATION)
            width, column = N, n
        at = m[None, :] * width + column[:, None]
        kept = (m[None, :] < M) & (column[:, None] < width)
        if residual_ptr is not None:
            out = out.to(DT).to(tl.float32) + tl.load(residual_ptr + at, mask=kept, other=0.0).to(tl.float32)
        tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=kept)


@cache
def step_shape(kind: ProductKind, M: int, N: int, K: int, device: Device) -> Shape:
    """The configuration of a product of at most BLOCK_M tokens: that of `planar_gemm`."""
    found = choose(kind, M, N, K, device)
    shape = found if isinstance(found, Shape) else fused(M, N, K, kind.bits, kind.group_size, device)
    shape = replace(shape, block_m=BLOCK_M)
    return shape if cdiv(N, shape.block_n) <= workspace.SLICE else replace(shape, split_k=1)


def step_product(
    x_MK: Tensor,
    weight: Planar,
    bias_N: Tensor | None = None,
    *,
    norm: RowNorm | None = None,
    activation: Activation | None = None,
    gated: bool = False,
    residual_MN: Tensor | None = None,
    length: Tensor | None = None,
    shape: Shape | None = None,
) -> Tensor:
    """[M, N] = norm(x) weight^T + bias, in the dtype of x; act of it; [M, N / 2] = act(gate) up where `gated`; plus
    residual. x fp16 or bf16 [M <= BLOCK_M, K], contiguous. length: incremented."""
    (M, K), N = x_MK.shape, weight.words.shape[0]
    assert 0 < M <= BLOCK_M
    assert weight.table is None
    assert x_MK.is_contiguous()
    assert weight.scale.is_contiguous()
    if M == 1:
        return token_product(x_MK, weight, bias_N, norm, activation, gated, residual_MN, length)
    if norm is not None:
        x_MK = norm_rows(x_MK, norm)
    if shape is None:
        kind = kind_of("weight_only", weight.bits, weight.group_size, weight.zero is not None, x_MK.dtype)
        shape = step_shape(kind, M, N, K, device_of(x_MK.device))
    out_MN = torch.empty(M, N // 2 if gated else N, dtype=x_MK.dtype, device=x_MK.device)
    tiles = cdiv(N, shape.block_n)
    partial, counters = tile_partials(tiles, out_MN, shape, torch.float32)
    step_kernel[(tiles, 1, shape.split_k)](
        x_MK,
        weight.words,
        weight.scale,
        weight.zero,
        bias_N,
        residual_MN,
        length,
        out_MN,
        partial,
        counters,
        M,
        N,
        K,
        weight.words.stride(0),
        cdiv(cdiv(K, planar_block(weight.bits)), shape.split_k),
        DT=tl.float32 if INTERPRET else TRITON_DTYPE[x_MK.dtype],
        SCALE_SUMS=shape.scales_sums(weight.group_size, weight.bits),
        ACTIVATION=NO_ACTIVATION if activation is None else int(activation),
        GATED=gated,
        **planar_constants(weight, K, shape),
    )
    return out_MN
