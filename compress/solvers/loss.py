"""The loss that solvers minimize, and how far a decided weight is from the original."""

import math

import torch
from torch import Tensor

from compress.base.collectives import Comm
from compress.kernels.layouts.words import some_rows
from compress.solvers.statistics.hessian import symmetric_blocks
from compress.weights.grid import working_dtype
from compress.weights.matrix import Matrix


def quadratic(comm: Comm, error_NK: Tensor, hessian_KK: Tensor) -> float:
    """tr(E H E^T) of a symmetric H, each rank computing its share of the rows."""
    mine = error_NK[comm.rows_of(len(error_NK))]
    total = mine.new_zeros(())
    for part in symmetric_blocks(len(hessian_KK)):
        own, rest = mine[:, part], mine[:, part.stop :]
        # What lies beyond the block counts for both sides of the diagonal.
        product = torch.addmm(own @ hessian_KK[part, part], rest, hessian_KK[part.stop :, part], alpha=2)
        total += (product * own).sum()
    return float(comm.all_reduce(total))


def weight_error(weight_NK: Tensor, found: Matrix) -> float:
    """The relative error of a decided weight: the norm of its difference from the weight over the weight's norm."""
    error = size = 0.0
    for rows in some_rows(*weight_NK.shape):
        exact = weight_NK[rows].to(working_dtype(weight_NK))
        error += float((found.rows(rows).dequantize(exact.dtype) - exact).square().sum(dtype=torch.float64))
        size += float(exact.square().sum(dtype=torch.float64))
    return math.sqrt(error / max(size, 1e-60))
