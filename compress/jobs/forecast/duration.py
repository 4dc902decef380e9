"""The time that a run takes here, from shapes and two rates that are measured on the spot, in half a second.

    products     floating-point operations of a large matrix product, per second
    rounding     weights that a pass rounds, and compares with the original, in a second, in a small layer of random
                 weights; of a pass of second order, without what its products take

Reading and writing files are not counted: a page may be in memory already, or come over a network.

A block's forward is 2 T N K operations for every stream of T tokens; where forwards are repeated for lack of memory,
each of the first sites adds one of all that comes before it. For a site of second order (N rows, K inputs):

    statistics   X^T X on one side of its diagonal T K^2, drift 2 T K^2
    factors      2 K^3 / 3 for each of the two, which run at half the rate of products
    correction   two solutions of a system, 2 K^3 each, or of N rows where these are few, and 8 N K^2
    sweep        N K^2; each round of refit or descent 2 N K^2, and 2 N K^2 for the gradient before the first
    figures      4 N K^2
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch

from compress.base.collectives import Comm
from compress.engine.plan.plan import Plan
from compress.engine.walk.forward import REPEATED_SITES
from compress.jobs.forecast.peak_memory import TokenCounts, looks_beyond, sites_of, weights_in
from compress.model.layers import Layer
from compress.passes.options.second_order import SecondOrder
from compress.passes.protocol.base import Pass
from compress.passes.protocol.round_to_nearest import weight_error
from compress.passes.protocol.sites import Site
from compress.passes.protocol.stages import Decide
from compress.solvers.statistics.hessian import Hessian

SIDE = 768  # of the product that is measured; small, for a plan should take little memory itself
ROWS, COLUMNS = 256, 1024  # of the layer that is rounded
SOLVED = 256, 512  # by second order
TURNS = ("refit", "sweeps")  # options of which each unit takes as long as another
MOST_TURNS = 4  # that are run to be timed
FACTORS = 2  # how much slower a factorization is than a product of as many operations


def seconds_of(plan: Plan, tokens: TokenCounts, repeats: bool = False) -> float | None:
    """Seconds on this CPU, with the threads that torch has; None where a pass is not of those that are measured.

    repeats: whether forwards are repeated.
    """
    if not plan.passes or any(looks_beyond(p) or (p.calibrated and not _solves(p)) for p in plan.passes):
        return None
    rate = product_rate()
    streams = 1 + plan.compares if plan.calibrated else 0
    forward = sum(weights_in(layers) + (_repeated_weights(layers) if repeats else 0) for layers in plan.layers.values())
    operations: float = 2 * streams * tokens.count * forward
    seconds = 0.0
    for p in plan.passes:
        treated = [[layer for layer in layers if p.wants(layer.name)] for layers in plan.layers.values()]
        seconds += sum(map(weights_in, treated)) * _rounding_seconds(p, rate)
        if _solves(p):
            for site in (site for layers in treated for site in sites_of(layers)):
                rows, columns = sum(layer.shape[0] for layer in site), site[0].shape[1]
                operations += tokens.count * columns**2 * (3 if p.drift else 1) + _solving(p, rows, columns)
    return seconds + operations / rate


def _repeated_weights(layers: Sequence[Layer]) -> int:
    """The weights that repeated forwards of a block multiply by, beside one forward of all of it."""
    sizes = [weights_in(site) for site in sites_of(layers)]
    return sum(sum(sizes[:i]) for i in range(min(len(sizes), REPEATED_SITES)))


def product_rate() -> float:
    """Operations per second of a product of two float32 matrices: the best of three."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(SIDE, SIDE, generator=generator) for _ in range(2))
    return 2 * SIDE**3 / min(_seconds(lambda: a @ b) for _ in range(3))


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _solves(p: Pass) -> TypeGuard[SecondOrder]:
    """True for a pass that solves by second order, which one that only rounds to nearest does not."""
    return isinstance(p, SecondOrder) and p.calibrated


def _rounding_seconds(p: Pass, rate: float) -> float:
    """Seconds for each weight, beside products, of a layer as small as fits the pass."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = SOLVED if _solves(p) else (ROWS, COLUMNS)
    group = (None if p.code_grid is None else p.code_grid.group_size) or columns
    columns = group * max(1, columns // group)
    weight = torch.randn(rows, columns, generator=generator)
    stats, alone = {}, p.fitted({columns}).without_reference()
    few: dict[str, Any] = {name: MOST_TURNS for name in TURNS if getattr(alone, name, 0) > MOST_TURNS}
    if few:
        alone = replace(alone, **few)
    if _solves(alone):
        statistic = Hessian(columns, torch.device("cpu"))
        statistic.update(torch.randn(4 * columns, columns, generator=generator), None)
        stats = {"hessian": statistic.result()}
    decides = alone.stage(Decide)
    assert decides is not None
    site = Site({"layer": weight}, stats, {"layer": torch.bfloat16}, Comm())
    seconds = min(_seconds(lambda: weight_error(weight, decides.apply(site)["layer"].weight)) for _ in range(2))
    if _solves(alone):
        seconds -= _solving(alone, rows, columns) / rate
    return max(seconds, 0.0) * _turns(p) / _turns(alone) / weight.numel()


def _turns(p: Pass) -> int:
    return 1 + sum(getattr(p, name, 0) for name in TURNS)


def _solving(p: SecondOrder, rows: int, columns: int) -> float:
    factors = columns**3 * 2 / 3 * FACTORS
    steps = getattr(p, "refit", 1) + getattr(p, "sweeps", 1)
    found = factors + rows * columns**2 * (1 + 2 * (steps + 1 if steps else 0) + 4)
    if p.drift:
        found += factors + 4 * min(columns, rows) * columns**2 + 8 * rows * columns**2
    return found
