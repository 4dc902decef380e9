"""The linear of codes in tiles (`layouts.tiles`), with or without sparse rows beside them, as a torch operator.

Like those of `words` and `sparse`, and by the same paths: Triton for few tokens (codes, then entries) and for many
(blocks of the weight dequantized, entries added, cuBLAS); C++ on a CPU for codes in strips (`lay_tiles_in_strips`), one
pass over codes and entries; torch elsewhere.

Shapes: x [..., K], M tokens once flattened, N outputs, E entries.
"""

from collections.abc import Iterator

from torch import Tensor

from compress.kernels import reference
from compress.kernels.cpu import build as cpu
from compress.kernels.cpu import gemm as cpu_gemm
from compress.kernels.layouts.entries import Entries
from compress.kernels.layouts.strips import why_not_strips
from compress.kernels.layouts.tiles import TileWords, pack_tile_strips, tile_block, tile_weight, unpack_tile_strips
from compress.kernels.layouts.words import ROWS
from compress.kernels.operators.blocks import gradient_of_blocks, row_blocks
from compress.kernels.operators.devices import FLOATS, HALF, as_rows, why_not_floats
from compress.kernels.operators.register import gradient_operator, operator, outputs
from compress.kernels.operators.sparse import DECODE_TOKENS, sparse_gradient, why_not_sparse
from compress.kernels.operators.words import check_columns, rows_of_words

# Why many tokens are not multiplied by the fused kernel.
MANY = "for so many tokens unpacking once is taken to be faster"


def why_not_dequantize_tiles(x: Tensor, weight: TileWords) -> list[str]:
    """Reasons why Triton cannot dequantize this weight for x; empty when it can."""
    reasons = why_not_floats(x.device, x=x.dtype, ranges=weight.ranges.dtype)
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


def lay_tiles_in_strips(weight: TileWords, columns: int) -> TileWords | None:
    """A weight of `columns` columns on a CPU in strips; None where it is better off in planar words."""
    if weight.words.device.type != "cpu":
        return None
    sizes = (len(weight.words), columns, weight.bits, weight.group_size)
    return None if why_not_lay_tiles_in_strips(*sizes) else pack_tile_strips(weight, columns)


def _planar(weight: TileWords, columns: int) -> TileWords:
    """A weight in planar words, laid out anew where it is in strips."""
    return unpack_tile_strips(weight, columns) if weight.in_strips else weight


def _blocks(weight: TileWords, columns: int) -> Iterator[tuple[slice, Tensor]]:
    for rows in row_blocks(len(weight.words), columns, weight.tile_rows):
        yield rows, tile_weight(tile_block(weight, rows.start, rows.stop), columns)


@operator("compress::tiles_linear", outputs(rows_of_words))
def tiles_linear(
    x: Tensor,
    words: Tensor,
    levels: Tensor,
    ranges: Tensor,
    bias: Tensor | None,
    bits: int,
    group_size: int,
    tile_rows: int,
    row_start: Tensor | None = None,
    column: Tensor | None = None,
    value: Tensor | None = None,
) -> Tensor:
    """[..., N] = x (weight + entries)^T + bias, in the dtype of x. The weight is the parts of a `TileWords`;
    the three parts of `Entries` are all there, or none is."""
    entries, weight = (
        Entries.of(row_start, column, value),
        TileWords(words, levels, ranges, bits, group_size, tile_rows),
    )
    x_MK = as_rows(x)
    check_columns(x, weight)
    refused = not weight.in_strips or cpu_gemm.why_not("tiles", x, ranges, group_size)
    if not refused and (value is None or value.dtype in FLOATS):
        return cpu_gemm.tiles(x_MK, weight, bias, entries).view(*x.shape[:-1], len(words) * ROWS)
    weight = _planar(weight, x.shape[-1])
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


@gradient_operator(tiles_linear, bias=None)
def tiles_gradient(
    grad: Tensor,
    shape: tuple[int, ...],
    words: Tensor,
    levels: Tensor,
    ranges: Tensor,
    bias: Tensor | None,
    bits: int,
    group_size: int,
    tile_rows: int,
    *entries: Tensor | None,
) -> Tensor:
    """[..., K] = grad (weight + entries), in the dtype of grad [..., N]: the input gradient of `tiles_linear`."""
    columns, sparse = shape[-1], Entries.of(*entries)
    weight, grad_MN = _planar(TileWords(words, levels, ranges, bits, group_size, tile_rows), columns), as_rows(grad)
    if why_not_dequantize_tiles(grad.new_empty(0, columns), weight):
        out_MK = gradient_of_blocks(grad_MN, _blocks(weight, columns), columns)
    else:
        from compress.kernels.triton import tile_gemm

        out_MK = tile_gemm.input_gradient(grad_MN, weight, columns)
    out_MK = out_MK if sparse is None else out_MK + sparse_gradient(grad_MN, out_MK.shape, *sparse, None, columns)
    return out_MK.view(shape)
