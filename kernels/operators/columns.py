"""The loops over columns that a device has: Triton's on a GPU, C++ on a CPU."""

from typing import Any

import torch
from torch import Tensor

from compress.kernels.columns import ColumnBlock, DecidedColumns, RangeSearch, SweptBlock
from compress.kernels.cpu import build
from compress.kernels.cpu import column_sweep as cpu
from compress.kernels.cpu.arguments import TYPES
from compress.kernels.operators.devices import why_not_triton

# Members of the largest groups whose scales a sweep on a GPU finds, and a search there.
LARGEST_GROUP, MOST_MEMBERS = 512, 2**16


def on_gpu(x: Tensor) -> bool:
    """True for tensors whose loops are Triton's."""
    return not why_not_triton(x.device)


def takes(x: Tensor, scale_dtype: torch.dtype) -> bool:
    """True for tensors that the loops can work on here: float32, on a GPU or a CPU that they could be built for."""
    if x.dtype != torch.float32 or scale_dtype not in TYPES:
        return False
    return on_gpu(x) or (x.device.type == "cpu" and not build.why_not("columns"))


def searches(x: Tensor, scale_dtype: torch.dtype) -> bool:
    """True for groups x [..., g] whose scales the loops can search here."""
    return takes(x, scale_dtype) and (not on_gpu(x) or x.shape[-1] <= MOST_MEMBERS)


def _loops(x: Tensor) -> Any:
    if not on_gpu(x):
        return cpu
    from compress.kernels.triton import column_sweep

    return column_sweep


def sweep_columns(
    block: SweptBlock, held: DecidedColumns, begin: int, end: int, search: RangeSearch | None = None
) -> None:
    """Decide columns begin ... end of a block one after another, each compensating for the errors of those before it.
    search: of the scale of each whole group among them, before its first column; on a GPU alone."""
    _loops(block.target).sweep_columns(block, held, begin, end, search)


def descend_columns(block: ColumnBlock, held: DecidedColumns) -> None:
    """Move the codes of a block's columns, one column after another, each to the code nearest its optimum where that is
    closer than its present code."""
    _loops(block.target).descend_columns(block, held)


def search_ranges(x_gN: Tensor, search: RangeSearch) -> tuple[Tensor, Tensor]:
    """(scale, zero) [N] of N groups."""
    found: tuple[Tensor, Tensor] = _loops(x_gN).search_ranges(x_gN, search)
    return found
