"""Scales of blocks: one for so many rows and columns of a matrix, as in DeepSeek-V3 (arXiv 2412.19437, section 3.3).

    of a weight    128 x 128        scale_inv [ceil(N / 128), ceil(K / 128)]
    of an input      1 x 128        a token and 128 of its columns

Blocks at the right and the lower edge may be partial. Shapes: N rows, K columns, blocks of R rows and C columns.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 128
Block = tuple[int, int]
WEIGHT_BLOCK: Block = (BLOCK, BLOCK)
INPUT_BLOCK: Block = (1, BLOCK)


def blocks_of(shape: Sequence[int], block: Block) -> Block:
    """(Rows of blocks, columns of blocks) of a matrix; partial blocks count."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])


def spread(scale: Tensor, shape: Sequence[int], block: Block) -> Tensor:
    """[N, K] of each element the scale of its block; scale [ceil(N / R), ceil(K / C)]."""
    return scale.repeat_interleave(block[0], 0)[: shape[0]].repeat_interleave(block[1], 1)[:, : shape[1]]


def blocked(x_NK: Tensor, block: Block) -> Tensor:
    """[ceil(N / R), ceil(K / C), R C] the elements of each block; zeros stand for those that the edges lack."""
    (height, width), (rows, columns) = block, x_NK.shape
    filled = torch.nn.functional.pad(x_NK, (0, -columns % width, 0, -rows % height))
    return filled.unflatten(0, (-1, height)).unflatten(2, (-1, width)).transpose(1, 2).flatten(2)


def unblocked(blocks: Tensor, shape: Sequence[int], block: Block) -> Tensor:
    """Inverse of `blocked`: [N, K] = shape."""
    whole = blocks.unflatten(2, block).transpose(1, 2).flatten(2).flatten(0, 1)
    return whole[: shape[0], : shape[1]]


def block_rows(part: slice, height: int) -> slice:
    """Convert a slice of rows to a slice of rows of blocks; `part` begins where a block does."""
    assert part.start % height == 0
    return slice(part.start // height, -(-part.stop // height))


def multiply_(x_NK: Tensor, scale: Tensor, block: Block) -> Tensor:
    """x in place, each element times the scale of its block."""
    (rows, columns), width = x_NK.shape, block[1]
    by_row = scale.repeat_interleave(block[0], 0)[:rows].unsqueeze(-1)
    whole = columns // width
    if whole:
        x_NK[:, : whole * width].unflatten(1, (whole, width)).mul_(by_row[:, :whole])
    if columns % width:
        x_NK[:, whole * width :].mul_(by_row[:, -1])
    return x_NK
