"""Rounding to nearest as a decision, for passes that round nothing else or have prepared what they round."""

from collections.abc import Mapping

from compress.passes.protocol.sites import Site
from compress.solvers.loss import weight_error
from compress.solvers.outliers import nearest
from compress.weights.decision import Decision
from compress.weights.grid import Grid
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
