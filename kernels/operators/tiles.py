"""The linear of codes in tiles (`layouts.tiles.TileWords`), with or without sparse rows beside them, as a torch
operator.

Like those of `ops` and `sparse`, and by the same paths: Triton for few tokens (codes, then entries) and for many
(blocks of the weight dequantized, entries added, cuBLAS); C++ on a CPU for codes in strips (`layouts.tiles.TileStrips`,
`lay_tiles_in_strips`), one pass over codes and entries; torch elsewhere.

Shapes: x [..., K], M tokens once flattened, N outputs, E entries.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from compress.kernels import reference
from compress.kernels.cpu import build as cpu
from compress.kernels.cpu import gemm as cpu_gemm
from compress.kernels.layouts.entries import Entries
from compress.kernels.layouts.strips import ROWS, STRIPS_DIMENSIONS, why_not_strips
from compress.kernels.layouts.tiles import (
    TileStrips,
    TileWords,
    pack_tile_strips,
    tile_block,
    tile_weight,
    unpack_tile_strips,
)
from compress.kernels.operators.blocks import gradient_of_blocks, row_blocks
from compress.kernels.operators.register import operator
from compress.kernels.operators.sparse import DECODE_TOKENS, FLOATS, sparse_gradient, why_not_sparse
from compress.kernels.operators.strips import check_lines
from compress.kernels.operators.words import HALF, _check_words, _like_product, _rows, _why_not_triton

# Why many tokens are not multiplied by the fused kernel.
MANY = "for so many tokens unpacking once is taken to be faster"


def why_not_dequantize_tiles(x: Tensor, weight: TileWords) -> list[str]:
    """Reasons why Triton cannot dequantize this weight for x; empty when it can."""
    reasons = [*_why_not_triton(x.device)]
    for what, dtype in (("x is", x.dtype), ("ranges are", weight.ranges.dtype)):
        if dtype not in FLOATS:
            reasons.append(f"{what} {dtype}; allowed: float16, bfloat16, float32")
    return reasons + cpu_gemm.why_not_sizes("tiles", x.shape[-1], weight.group_size)


def why_not_tiles(x: Tensor, weight: TileWords) -> list[str]:
    """Reasons why the Triton kernel cannot multiply x by this weight; empty when it can."""
    reasons = why_not_dequantize_tiles(x, weight)
    if x.dtype not in HALF:
        reasons.append(f"x is {x.dtype}; allowed: float16, bfloat16")
    if x.shape[:-1].numel() > DECODE_TOKENS:
        reasons.append(MANY)
    return reasons


def why_not_lay_tiles_in_strips(rows: int, columns: int, bits: int, group_size: int) -> list[str]:
    """Reasons why codes in words of so many bits are not better off in strips on this CPU; empty when they are."""
    reasons = why_not_strips(rows, bits) + cpu_gemm.why_not_sizes("tiles", columns, group_size)
    return reasons or [*cpu.why_not()]


def lay_tiles_in_strips(weight: TileWords, columns: int) -> TileStrips | None:
    """A weight of `columns` columns on a CPU in strips; None where it is better off in planar words."""
    if weight.words.device.type != "cpu":
        return None
    sizes = (len(weight.words), columns, weight.bits, weight.group_size)
    return None if why_not_lay_tiles_in_strips(*sizes) else pack_tile_strips(weight, columns)


def _planar(columns: int, words: Tensor, *others: Any) -> TileWords:
    """A weight in planar words, laid out anew where it is in strips."""
    if words.dim() == STRIPS_DIMENSIONS:
        return unpack_tile_strips(TileStrips(words, *others), columns)
    return TileWords(words, *others)


def _blocks(weight: TileWords, columns: int) -> Iterator[tuple[slice, Tensor]]:
    for rows in row_blocks(len(weight.words), columns, weight.tile_rows):
        yield rows, tile_weight(tile_block(weight, rows.start, rows.stop), columns)


@operator("compress::tiles_linear")
def tiles_linear(
    x: Tensor,
    words: Tensor,
    levels: Tensor,
    ranges: Tensor,
    bias: Tensor | None,
    bits: int,
    group_size: int,
    tile_rows: int,
    row_start: Tensor | None,
    column: Tensor | None,
    value: Tensor | None,
) -> Tensor:
    """[..., N] = x (weight + entries)^T + bias, in the dtype of x. The weight is the parts of a `TileWords` or of
    `TileStrips`; the three parts of `Entries` are all there, or none is."""
    entries, held = Entries.of(row_start, column, value), (words, levels, ranges, bits, group_size, tile_rows)
    x_MK = _rows(x)
    if words.dim() == STRIPS_DIMENSIONS:
        check_lines(words, x.shape[-1], bits)
        if not cpu_gemm.why_not("tiles", x, ranges, group_size) and (value is None or value.dtype in FLOATS):
            return cpu_gemm.tiles(x_MK, TileStrips(*held), bias, entries).view(*x.shape[:-1], len(words) * ROWS)
    else:
        _check_words(x, words, bits)
    weight = _planar(x.shape[-1], *held)
    reasons = [] if value is None else why_not_sparse(x, value)
    if not reasons + why_not_dequantize_tiles(x, weight):
        from compress.kernels.triton.sparse_rows import add_product
        from compress.kernels.triton.tile_gemm import tile_dequantize_gemm, tile_gemm

        if why_not_tiles(x, weight):
            out_MN = tile_dequantize_gemm(x_MK, weight, bias, entries)
        else:
            out_MN = tile_gemm(x_MK, weight, bias)
            out_MN = out_MN if entries is None else add_product(x_MK, entries, out_MN)
    else:
        out_MN = x_MK.new_empty(len(x_MK), len(weight.words))
        for rows, dense_NK in _blocks(weight, x.shape[-1]):
            out_MN[:, rows] = reference.linear(x_MK, dense_NK, None if bias is None else bias[rows])
        out_MN = out_MN if entries is None else out_MN + reference.sparse_rows(x_MK, *entries)
    return out_MN.view(*x.shape[:-1], len(weight.words))


@tiles_linear.register_fake
def _(
    x: Tensor,
    words: Tensor,
    levels: Tensor,
    ranges: Tensor,
    bias: Tensor | None,
    bits: int,
    group_size: int,
    tile_rows: int,
    row_start: Tensor | None,
    column: Tensor | None,
    value: Tensor | None,
) -> Tensor:
    if words.dim() == STRIPS_DIMENSIONS:
        return x.new_empty(*x.shape[:-1], words.shape[0] * ROWS)
    return _like_product(x, words, bits)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, words, levels, ranges, _, bits, group_size, tile_rows, *entries = inputs
    ctx.save_for_backward(words, levels, ranges, *entries)
    ctx.layout = (bits, group_size, tile_rows, x.shape[-1])


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    words, levels, ranges, row_start, column, value = ctx.saved_tensors
    back = tiles_gradient(grad, words, levels, ranges, *ctx.layout)
    if value is not None:
        back = back + sparse_gradient(grad, row_start, column, value, ctx.layout[-1])
    return back, *(None,) * 10


tiles_linear.register_autograd(_gradient, setup_context=_save)


@operator("compress::tiles_gradient")
def tiles_gradient(
    grad: Tensor,
    words: Tensor,
    levels: Tensor,
    ranges: Tensor,
    bits: int,
    group_size: int,
    tile_rows: int,
    columns: int,
) -> Tensor:
    """[..., K] = grad weight, in the dtype of grad [..., N]: the input gradient of `tiles_linear` without entries."""
    weight, grad_MN = _planar(columns, words, levels, ranges, bits, group_size, tile_rows), _rows(grad)
    if why_not_dequantize_tiles(grad.new_empty(0, columns), weight):
        out_MK = gradient_of_blocks(grad_MN, _blocks(weight, columns), columns)
    else:
        from compress.kernels.triton import tile_gemm

        out_MK = tile_gemm.input_gradient(grad_MN, weight, columns)
    return out_MK.view(*grad.shape[:-1], columns)


@tiles_gradient.register_fake
def _(
    grad: Tensor,
    words: Tensor,
    levels: Tensor,
    ranges: Tensor,
    bits: int,
    group_size: int,
    tile_rows: int,
    columns: int,
) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], columns)


def _save_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *weight, bits, group_size, tile_rows, _ = inputs
    ctx.save_for_backward(*weight)
    ctx.layout = (bits, group_size, tile_rows)


def _gradient_of_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    back = tiles_linear(grad, *ctx.saved_tensors, None, *ctx.layout, None, None, None)
    return back, *(None,) * 7


tiles_gradient.register_autograd(_gradient_of_gradient, setup_context=_save_gradient)
