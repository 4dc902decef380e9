"""Rounding to nearest as a decision, for passes that round nothing else or have prepared what they round."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from compress.kernels.layouts.words import some_rows
from compress.passes.protocol.sites import Site
from compress.solvers.outliers import nearest
from compress.weights.decision import Decision
from compress.weights.grid import Grid, working_dtype
from compress.weights.matrix import Matrix
from compress.weights.rounding import ActivationCodes


def round_to_nearest(
    site: Site, grid: Grid, inputs: Mapping[str, ActivationCodes], outliers: float = 0.0
) -> dict[str, Decision]:
    """Every layer of a site by itself, each weight to the nearest point of the grid. inputs: how those are rounded.
    outliers: the share of weights that stay exact."""
    decisions = {}
    for name, weight in site.weights.items():
        rounded = nearest(weight, grid, site.scale_dtypes[name], outliers)
        decisions[name] = Decision(rounded, {"weight_error": weight_error(weight, rounded)}, inputs.get(name))
    return decisions


def weight_error(weight_NK: Tensor, decided: Matrix) -> float:
    """The relative error of a decided weight: the norm of its difference from the weight over the weight's norm."""
    error = size = 0.0
    for rows in some_rows(*weight_NK.shape):
        exact = weight_NK[rows].to(working_dtype(weight_NK))
        error += float((decided.rows(rows).dequantize(exact.dtype) - exact).square().sum(dtype=torch.float64))
        size += float(exact.square().sum(dtype=torch.float64))
    return math.sqrt(error / max(size, 1e-60))
