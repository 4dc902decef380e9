"""The loops over columns that a device has: Triton's on a GPU, C++ on a CPU."""

import torch
from torch import Tensor

from compress.kernels.columns import ColumnBlock, DecidedColumns, RangeSearch, SweptBlock
from compress.kernels.cpu import build
from compress.kernels.cpu import column_sweep as cpu
from compress.kernels.cpu.arguments import TYPES
from compress.kernels.operators.devices import why_not_triton

# Members of the largest group whose scale a program of a GPU searches.
MOST_MEMBERS = 2**16
LARGEST_GROUP = 512  # whose scale a sweep on a GPU finds


def takes(x: Tensor, scale_dtype: torch.dtype, only_on_gpu: bool = False) -> bool:
    """True for tensors that the loops can work on here: float32, on a GPU or a CPU that they could be built for."""
    if x.dtype != torch.float32 or scale_dtype not in TYPES:
        return False
    return on_gpu(x) or (x.device.type == "cpu" and not only_on_gpu and not build.why_not("columns"))


def searches(x: Tensor, scale_dtype: torch.dtype) -> bool:
    """True for groups x [..., g] whose scales the loops can search here."""
    return takes(x, scale_dtype) and (not on_gpu(x) or x.shape[-1] <= MOST_MEMBERS)


def on_gpu(x: Tensor) -> bool:
    """True for tensors whose loops are Triton's."""
    return not why_not_triton(x.device)


def sweep_columns(block: SweptBlock, held: DecidedColumns, begin: int, end: int) -> None:
    """Decide columns begin ... end of a block one after another, each compensating for the errors of those before
    it."""
    if on_gpu(block.target):
        from compress.kernels.triton.column_sweep import sweep_columns

        sweep_columns(block, held, begin, end)
    else:
        cpu.sweep_columns(block, held, begin, end)


def sweep_groups(
    block: SweptBlock, held: DecidedColumns, search: RangeSearch, importance_K: Tensor, group: int
) -> None:
    """Decide a block of whole groups, and find each group's scale before its first column; on a GPU."""
    from compress.kernels.triton.column_sweep import sweep_columns

    sweep_columns(block, held, 0, len(block.target), search, importance_K, group)


def descend_columns(block: ColumnBlock, held: DecidedColumns) -> None:
    """Move the codes of a block's columns, one column after another, each to the code nearest its optimum where that is
    closer than its present code."""
    if on_gpu(block.target):
        from compress.kernels.triton.column_sweep import descend_columns

        descend_columns(block, held)
    else:
        cpu.descend_columns(block, held)


def search_ranges(x_gN: Tensor, importance_g: Tensor | None, search: RangeSearch) -> tuple[Tensor, Tensor]:
    """(scale, zero) [N] of N groups: errors are weighted by importance."""
    if on_gpu(x_gN):
        from compress.kernels.triton.column_sweep import search_ranges

        return search_ranges(x_gN, importance_g, search)
    return cpu.search_ranges(x_gN, importance_g, search)
