"""Attention of one token per sequence, with what stands before it in a block of a decoder, in one launch:

    queries, keys -> (norms of heads) -> (rotary embedding by halves); key and value -> cache; softmax over the cache

    split      SPLIT programs share a head of keys: each takes every SPLIT-th block of tokens, and the last to arrive
               joins their sums. So a cache that is filled partly keeps all of them busy, and a captured graph serves
               any length.
    queries    of all heads that share a head of keys are one tile of the matrix instruction
    new token  the first program writes its key and value, and takes them from registers: no program reads the place
    length     tokens in a cache of fixed size, as a tensor (a graph that is replayed reads it anew); whoever launches
               the next product adds 1 to it

Given up: tiles of keys that several heads of keys share; scores and probabilities in less than fp32.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from compress.kernels import workspace
from compress.kernels.triton.planar_gemm import INTERPRET, TRITON_DTYPE
from compress.kernels.triton.split_k import arrives_last
from compress.kernels.triton.steps.norms import NO_NORM, NO_NORM_PARTS, RowNorm, normalize
from compress.kernels.tuning.choose import device_of
from compress.kernels.tuning.table import bucket

LEAST_ROWS = 16  # queries of a tile
SPLIT_LIMIT = 32
TILE = 8192  # numbers in a block of keys
MOST_SIZE = 256  # of a head
WARPS, STAGES = 4, 2
_LEAST = tl.constexpr(-1e30)  # a score below all others, without the NaN of a difference of infinities


@triton.jit
def head_states(
    x_ptrs,
    inside,
    weight_ptr,
    epsilon,
    cos_ptr,
    sin_ptr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROTATED: tl.constexpr,
    NORM: tl.constexpr,
    DT: tl.constexpr,
):
    """Heads [rows, WIDTH >= SIZE], normalized and rotated, in DT; zeros beyond SIZE. x_ptrs, inside: [rows]."""
    d = tl.arange(0, WIDTH)
    kept = inside[:, None] & (d < SIZE)[None, :]
    x = tl.load(x_ptrs[:, None] + d[None, :], mask=kept, other=0.0).to(tl.float32)
    if NORM != -1:
        inverse = tl.rsqrt(tl.sum(x * x, 1) / SIZE + epsilon)
        x = normalize(x, inverse * 0.0, inverse, weight_ptr, None, d, d < SIZE, NORM, DT).to(tl.float32)
    if ROTATED:
        turning = d < ROTATED
        other = tl.where(d < ROTATED // 2, d + ROTATED // 2, d - ROTATED // 2)
        y = tl.load(x_ptrs[:, None] + other[None, :], mask=inside[:, None] & turning[None, :], other=0.0).to(tl.float32)
        if NORM != -1:
            y = normalize(y, inverse * 0.0, inverse, weight_ptr, None, other, turning, NORM, DT).to(tl.float32)
        y = tl.where((d < ROTATED // 2)[None, :], -y, y)
        cos = tl.load(cos_ptr + d, mask=turning, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + d, mask=turning, other=0.0).to(tl.float32)
        x = tl.where(turning[None, :], x * cos[None, :] + y * sin[None, :], x)
    return tl.where(kept, x, 0.0).to(DT)


@triton.jit
def join(a_top, a_sum, a_acc, b_top, b_sum, b_acc):
    """Two parts of a softmax as one: largest scores [rows], sums of exponentials, and of values times these."""
    top = tl.maximum(a_top, b_top)
    a, b = tl.exp(a_top - top), tl.exp(b_top - top)
    return top, a_sum * a + b_sum * b, a_acc * a[:, None] + b_acc * b[:, None]


@triton.jit
def load_part(tops, parts, part, count, kept, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """A part of a softmax that another program has stored, or of nothing for one behind the last."""
    at, there = tops + part * 2 * ROWS, part + tl.zeros((ROWS,), tl.int32) < count
    top = tl.load(at, mask=there, other=_LEAST, cache_modifier=".cg")
    total = tl.load(at + ROWS, mask=there, other=0.0, cache_modifier=".cg")
    acc = tl.load(parts + part * ROWS * WIDTH, mask=kept & there[:, None], other=0.0, cache_modifier=".cg")
    return top, total, acc


# Lengths change with every step, and strides of a mask with them.
@triton.jit(do_not_specialize=["place", "first", "count", "stride_mb"])
def attend_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    query_weight_ptr,
    key_weight_ptr,
    cos_ptr,
    sin_ptr,
    keys_ptr,
    values_ptr,
    mask_ptr,
    length_ptr,
    out_ptr,
    partial_ptr,
    top_ptr,
    counter_ptr,
    place,
    first,
    count,
    stride_q,
    stride_k,
    stride_v,
    stride_turn,
    stride_kb,
    stride_kh,
    stride_kt,
    stride_vb,
    stride_vh,
    stride_vt,
    stride_mb,
    query_epsilon,
    key_epsilon,
    scale,
    SHARING: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    ROTATED: tl.constexpr,
    QUERY_NORM: tl.constexpr,
    KEY_NORM: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    DT: tl.constexpr,
):
    """query, key and value: rows of products, strides between tokens; cos, sin [1 or batch, ROTATED]; keys, values
    [batch, heads, tokens, size] with strides; mask [1 or batch, tokens]; out [batch, heads * VALUE_SIZE] contiguous;
    length int64 [1] or None. Attends to tokens [first, first + count), of which `place` is the new one; with a length:
    to [0, length], at most `count`, and the new one is at `length`. SHARING: queries of a head of keys. Grid: (heads of
    keys, batch, SPLIT).
    """
    head = tl.program_id(0)
    batch = tl.program_id(1)
    split = tl.program_id(2)
    if length_ptr is not None:
        place = tl.load(length_ptr).to(tl.int32)
        capacity = count
        count = min(place + 1, count)
        fits = (place < capacity).to(tl.int32)
    else:
        fits = 1
    row = tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    v = tl.arange(0, VALUE_WIDTH)
    query_head = head * SHARING + row
    cos_ptr += batch * stride_turn
    sin_ptr += batch * stride_turn
    query = query_ptr + batch * stride_q + query_head * SIZE
    q = head_states(
        query, row < SHARING, query_weight_ptr, query_epsilon, cos_ptr, sin_ptr, SIZE, WIDTH, ROTATED, QUERY_NORM, DT
    )
    keys_ptr += batch.to(tl.int64) * stride_kb + head * stride_kh
    values_ptr += batch.to(tl.int64) * stride_vb + head * stride_vh
    top = tl.full((ROWS,), _LEAST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, VALUE_WIDTH), tl.float32)
    if split == 0:
        one = tl.arange(0, 1)
        key = key_ptr + batch * stride_k + head * SIZE + one
        k = head_states(
            key, one == 0, key_weight_ptr, key_epsilon, cos_ptr, sin_ptr, SIZE, WIDTH, ROTATED, KEY_NORM, DT
        )
        value = tl.load(value_ptr + batch * stride_v + head * VALUE_SIZE + v, mask=v < VALUE_SIZE, other=0.0)
        key_at = keys_ptr + place.to(tl.int64) * stride_kt + d
        tl.store(key_at[None, :], k.to(keys_ptr.dtype.element_ty), mask=(d < SIZE * fits)[None, :])
        value_at = values_ptr + place.to(tl.int64) * stride_vt + v
        tl.store(value_at, value, mask=v < VALUE_SIZE * fits)
        own = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale
        seen = row >= 0
        if mask_ptr is not None:
            seen = seen & (tl.load(mask_ptr + batch * stride_mb + place - first) != 0)
        top = tl.where(seen, own, _LEAST)
        total = tl.where(seen, 1.0, 0.0)
        acc = total[:, None] * value.to(tl.float32)[None, :]
    blocks = tl.cdiv(count, BLOCK)
    for block in range(split, blocks, SPLIT):
        token = first + block * BLOCK + tl.arange(0, BLOCK)
        seen = (token < first + count) & (token != place)
        if mask_ptr is not None:
            seen = seen & (tl.load(mask_ptr + batch * stride_mb + token - first, mask=seen, other=0) != 0)
        far = token.to(tl.int64)
        key_ptrs = keys_ptr + far[None, :] * stride_kt + d[:, None]
        k = tl.load(key_ptrs, mask=seen[None, :] & (d < SIZE)[:, None], other=0.0).to(DT)
        value_ptrs = values_ptr + far[:, None] * stride_vt + v[None, :]
        value = tl.load(value_ptrs, mask=seen[:, None] & (v < VALUE_SIZE)[None, :], other=0.0).to(DT)
        scores = tl.dot(q, k) * scale
        scores = tl.where(seen[None, :], scores, _LEAST)
        larger = tl.maximum(top, tl.max(scores, 1))
        weights = tl.where(seen[None, :], tl.exp(scores - larger[:, None]), 0.0)
        shrunk = tl.exp(top - larger)
        total = total * shrunk + tl.sum(weights, 1)
        acc = tl.dot(weights.to(DT), value, acc * shrunk[:, None])
        top = larger
    out_ptrs = out_ptr + (batch * tl.num_programs(0) * SHARING + query_head)[:, None] * VALUE_SIZE + v[None, :]
    kept = (row < SHARING)[:, None] & (v < VALUE_SIZE)[None, :]
    if SPLIT > 1:
        tile = batch * tl.num_programs(0) + head
        tops = top_ptr + tile * SPLIT * 2 * ROWS + row
        tl.store(tops + split * 2 * ROWS, top)
        tl.store(tops + split * 2 * ROWS + ROWS, total)
        if arrives_last(acc, partial_ptr, counter_ptr, VALUE_WIDTH, ROWS, SPLIT):
            top = tl.full((ROWS,), _LEAST, tl.float32)
            total = tl.zeros((ROWS,), tl.float32)
            acc = tl.zeros((ROWS, VALUE_WIDTH), tl.float32)
            parts = partial_ptr + tile.to(tl.int64) * SPLIT * ROWS * VALUE_WIDTH
            parts = parts + row[:, None] * VALUE_WIDTH + v[None, :]
            count = max(1, min(SPLIT, blocks))
            for part in range(0, count, 4):  # whose loads do not wait for each other
                a_top, a_sum, a_acc = load_part(tops, parts, part, count, kept, ROWS, VALUE_WIDTH)
                b_top, b_sum, b_acc = load_part(tops, parts, part + 1, count, kept, ROWS, VALUE_WIDTH)
                c_top, c_sum, c_acc = load_part(tops, parts, part + 2, count, kept, ROWS, VALUE_WIDTH)
                d_top, d_sum, d_acc = load_part(tops, parts, part + 3, count, kept, ROWS, VALUE_WIDTH)
                a_top, a_sum, a_acc = join(a_top, a_sum, a_acc, b_top, b_sum, b_acc)
                c_top, c_sum, c_acc = join(c_top, c_sum, c_acc, d_top, d_sum, d_acc)
                a_top, a_sum, a_acc = join(a_top, a_sum, a_acc, c_top, c_sum, c_acc)
                top, total, acc = join(top, total, acc, a_top, a_sum, a_acc)
            tl.atomic_xchg(counter_ptr + tile, 0, sem="relaxed")
            tl.store(out_ptrs, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=kept)
    else:
        tl.store(out_ptrs, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=kept)


class HeadStates(NamedTuple):
    """Queries, keys and values [batch, heads * size] as products return them, the norms of heads, and cosines and sines
    [1 or batch, rotated], or None."""

    query: Tensor
    key: Tensor
    value: Tensor
    query_norm: RowNorm | None
    key_norm: RowNorm | None
    turn: tuple[Tensor, Tensor] | None


class CachedTokens(NamedTuple):
    """The cache that a step writes to: keys and values [batch, heads, tokens, size], the place of the new token and the
    tokens [first, first + tokens) that are attended to; length: the place as a tensor, int64, in place of all three."""

    keys: Tensor
    values: Tensor
    place: int
    first: int
    tokens: int
    length: Tensor | None = None


def splits_of(tiles: int, processors: int) -> int:
    """Programs per head of keys and sequence: they fill the processors twice."""
    split = SPLIT_LIMIT if tiles <= workspace.SLICE else 1
    while split > 1 and split * tiles > 2 * processors:
        split //= 2
    return split


def block_of(width: int) -> int:
    """Tokens of a block of keys of so many numbers."""
    return max(16, min(64, TILE // width))


def attend_step(
    states: HeadStates, cached: CachedTokens, mask: Tensor | None, scale: float, split: int | None = None
) -> Tensor:
    """[batch, heads * size of a value] of one token per sequence, whose key and value are written to the cache. fp16 or
    bf16. mask: bool [1 or batch, tokens], or None. Norms of heads are RMS norms."""
    (batch, key_heads, _, size), value_size = cached.keys.shape, cached.values.shape[3]
    heads, dtype, device = states.query.shape[1] // size, states.query.dtype, states.query.device
    split = splits_of(batch * key_heads, device_of(device).processors) if split is None else split
    rows = max(LEAST_ROWS, bucket(heads // key_heads))
    width, value_width = (max(16, bucket(n)) for n in (size, value_size))
    out = torch.empty(batch, heads * value_size, dtype=dtype, device=device)
    partial, counters = out, out
    if split > 1:
        places = batch * key_heads * split * rows
        partial = torch.empty(places * (value_width + 2), dtype=torch.float32, device=device)
        counters = workspace.counters(device)
    turn = states.turn or (states.query, states.query)  # not read where nothing turns
    norms = [n or NO_NORM_PARTS for n in (states.query_norm, states.key_norm)]
    attend_kernel[(key_heads, batch, split)](
        states.query,
        states.key,
        states.value,
        norms[0].weight,
        norms[1].weight,
        *turn,
        cached.keys,
        cached.values,
        mask,
        cached.length,
        out,
        partial,
        partial[-2 * places :] if split > 1 else partial,
        counters,
        cached.place,
        cached.first,
        cached.tokens,
        states.query.stride(0),
        states.key.stride(0),
        states.value.stride(0),
        0 if len(turn[0]) == 1 else turn[0].stride(0),
        *cached.keys.stride()[:3],
        *cached.values.stride()[:3],
        0 if mask is None or len(mask) == 1 else mask.stride(0),
        norms[0].epsilon,
        norms[1].epsilon,
        scale,
        SHARING=heads // key_heads,
        ROWS=rows,
        SIZE=size,
        WIDTH=width,
        VALUE_SIZE=value_size,
        VALUE_WIDTH=value_width,
        ROTATED=0 if states.turn is None else turn[0].shape[-1],
        QUERY_NORM=NO_NORM if states.query_norm is None else int(states.query_norm.variant),
        KEY_NORM=NO_NORM if states.key_norm is None else int(states.key_norm.variant),
        BLOCK=block_of(max(width, value_width)),
        SPLIT=split,
        DT=tl.float32 if INTERPRET else TRITON_DTYPE[dtype],
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return out
