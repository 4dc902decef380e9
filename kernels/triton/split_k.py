"""Several programs share a tile of the output: each multiplies a part of K, the last one adds the parts and goes on.

Otherwise few tokens would leave most of a processor idle. Each program writes its partial sums, and the last to arrive
(counted per tile) adds them in a fixed order: the result does not depend on timing. It also returns the counter to 0,
so that nothing has to be cleared between calls. The grid is (N tiles, M tiles, SPLIT_K).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.kernels import workspace
from compress.kernels.tuning.table import Shape, cdiv


@triton.jit
def _tile_ptrs(partial_ptr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_K: tl.constexpr):
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    return partial_ptr + tile.to(tl.int64) * SPLIT_K * BLOCK_N * BLOCK_M + place


@triton.jit
def arrives_last(acc, partial_ptr, counter_ptr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_K: tl.constexpr):
    """Store the partial sums acc [BLOCK_N, BLOCK_M] of this program; true for the program that stores last of its
    tile."""
    tile_ptrs = _tile_ptrs(partial_ptr, BLOCK_M, BLOCK_N, SPLIT_K)
    tl.store(tile_ptrs + tl.program_id(2) * BLOCK_N * BLOCK_M, acc)
    tl.debug_barrier()
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    return tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == SPLIT_K - 1


@triton.jit
def collect(partial_ptr, counter_ptr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT_K: tl.constexpr):
    """[BLOCK_N, BLOCK_M] the sum over all programs of this tile, for the one that arrived last."""
    tile_ptrs = _tile_ptrs(partial_ptr, BLOCK_M, BLOCK_N, SPLIT_K)
    acc = tl.zeros((BLOCK_N, BLOCK_M), partial_ptr.dtype.element_ty)
    for part in range(SPLIT_K):
        acc += tl.load(tile_ptrs + part * BLOCK_N * BLOCK_M, cache_modifier=".cg")
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    tl.atomic_xchg(counter_ptr + tile, 0, sem="relaxed")
    return acc


@triton.jit
def store(acc, m, n, out_ptr, bias_ptr, M, N, HAS_BIAS: tl.constexpr):
    """Store acc^T [n, m] plus bias to out [M, N]."""
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    out_ptrs = out_ptr + m.to(tl.int64)[None, :] * N + n[:, None]
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=(m[None, :] < M) & (n[:, None] < N))


@triton.jit
def finish(
    acc,
    m,
    n,
    out_ptr,
    bias_ptr,
    partial_ptr,
    counter_ptr,
    M,
    N,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Store the tile acc^T [BLOCK_N, BLOCK_M], or have the last of its SPLIT_K programs store the sum of them all."""
    if SPLIT_K > 1:
        if arrives_last(acc, partial_ptr, counter_ptr, BLOCK_M, BLOCK_N, SPLIT_K):
            acc = collect(partial_ptr, counter_ptr, BLOCK_M, BLOCK_N, SPLIT_K)
            store(acc, m, n, out_ptr, bias_ptr, M, N, HAS_BIAS)
    else:
        store(acc, m, n, out_ptr, bias_ptr, M, N, HAS_BIAS)


def pieces(M: int, N: int, shape: Shape) -> list[slice]:
    """Slices of M tokens, in whole tiles of a configuration, small enough that there are counters for all tiles that
    are split."""
    tiles = max(1, workspace.SLICE // cdiv(N, shape.block_n))
    most = M if shape.split_k == 1 else tiles * shape.block_m
    return [slice(first, min(first + most, M)) for first in range(0, M, most)]


def partials(out_MN: Tensor, shape: Shape, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Buffers for a split of K: partial sums of `dtype` and zeroed counters; any tensor where nothing is split."""
    tiles = cdiv(out_MN.shape[1], shape.block_n) * cdiv(out_MN.shape[0], shape.block_m)
    return tile_partials(tiles, out_MN, shape, dtype)


def tile_partials(tiles: int, out_MN: Tensor, shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Buffers as of `partials`, for a grid of so many tiles."""
    if shape.split_k == 1:
        return out_MN, out_MN
    assert tiles <= workspace.SLICE
    elements = tiles * shape.split_k * shape.block_n * shape.block_m
    return torch.empty(elements, dtype=dtype, device=out_MN.device), workspace.counters(out_MN.device)
