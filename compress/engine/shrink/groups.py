"""Decisions of `structure` about one coupling: the groups that stay, and the new weights of the layers that read them.

Shapes: N outputs, K inputs, G groups of s inputs each, S inputs that stay (`solvers.removal`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compress.base.collectives import Comm
from compress.passes.protocol.removal import RemovalOptions
from compress.solvers.hessian_with_drift import drift_correction
from compress.solvers.removal import (
    Costs,
    CutConsumer,
    LeastSquares,
    Zeroing,
    best,
    compensate,
    greedy,
    relative_loss,
)
from compress.solvers.statistics.hessian import HessianResult


@dataclass(frozen=True)
class Reading:
    """A layer that reads what may go: weight [N, K], bias [N] or none, the finished statistics of its input, and the
    inputs of each group."""

    weight: Tensor
    bias: Tensor | None
    stats: Mapping[str, Any]
    columns_Gs: Tensor

    @property
    def plain(self) -> Tensor:
        """[N, K] the weight in float64, with the bias as one more input's where second moments have one."""
        weight = self.weight.double()
        return weight if self.bias is None else torch.cat([weight, self.bias.double()[:, None]], 1)

    @property
    def squares(self) -> Tensor:
        """[K] sum over tokens (or mean) of the squares of each input."""
        if "norm" in self.stats:
            return self.stats["norm"].double().square()
        return self.stats["hessian"].hessian.diagonal().double()


@dataclass(frozen=True)
class Chosen:
    """The groups that stay, in order; {reader: (weight [N, S], bias [N])} of those that make up for the others; figures
    for the record."""

    kept: Tensor
    solved: Mapping[str, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    figures: Mapping[str, float | int] = field(default_factory=dict)


def choose(
    p: RemovalOptions, groups: tuple[int, int], readings: Mapping[str, Reading], written_G: Tensor, comm: Comm
) -> Chosen:
    """Decide about a coupling. groups: how many there are, and how many stay. written: [G] sum of squares of the
    weights that make each group. A collective: the groups are those of the first rank."""
    count, staying = groups
    consumers = {name: consumer_of(p, each, comm) for name, each in readings.items()} if p.solves else {}
    kept_groups = groups_left(p, count, count - staying, readings, list(consumers.values()), written_G)
    kept_groups = torch.tensor(comm.gather_objects(kept_groups.tolist())[0])
    solved: dict[str, tuple[Tensor, Tensor | None]] = {}
    losses: list[tuple[float, float]] = []
    tokens = 0
    for name, consumer in consumers.items():
        inputs = consumer.inputs(kept_groups)
        plain = readings[name].plain[:, inputs]
        weight = compensate(consumer, inputs) if p.compensate else plain
        losses.append((relative_loss(consumer, inputs, weight), relative_loss(consumer, inputs, plain)))
        tokens = readings[name].stats["hessian"].tokens
        if p.compensate:
            bias = readings[name].bias
            solved[name] = (weight, None) if bias is None else (weight[:, :-1], weight[:, -1])
    figures: dict[str, float | int] = {}
    if losses:
        own, zeroed = (sum(pair[i] for pair in losses) / len(losses) for i in (0, 1))
        figures = {"loss": own, "zeroed_loss": zeroed, "tokens": tokens}
    return Chosen(kept_groups, solved, figures)


def consumer_of(p: RemovalOptions, reading: Reading, comm: Comm) -> CutConsumer:
    """The second moments of a reader as they are relied on, and the weight that makes up for what was cut before it."""
    statistics: HessianResult = reading.stats["hessian"]
    if p.shrink:
        statistics = statistics.shrunk()
    statistics = statistics.double()
    hessian, weight = statistics.hessian, reading.plain
    if statistics.drift is not None and not (p.shrink and statistics.few):
        noise = len(hessian) / max(statistics.tokens, 1) if p.shrink else 0.0
        correction = drift_correction(statistics, p.damp + noise)
        if correction is not None:
            weight, _ = correction.target(comm, weight, hessian, p.drift, p.shrink)
    return CutConsumer(weight, hessian, reading.columns_Gs, p.damp)


def groups_left(
    p: RemovalOptions,
    groups: int,
    count: int,
    readings: Mapping[str, Reading],
    consumers: Sequence[CutConsumer],
    written_G: Tensor,
) -> Tensor:
    """The groups that stay where so many go."""
    if p.importance == "loss":
        costs: list[Costs] = [LeastSquares(c) if p.compensate else Zeroing(c) for c in consumers]
        return greedy(costs, groups, count, p.rounds)
    scores = torch.zeros(groups, dtype=torch.float64) if p.importance == "activation" else written_G.double().cpu()
    for reading in readings.values():
        squares_K = reading.weight.double().square().sum(0)
        if p.importance == "activation":
            squares_K = squares_K * reading.squares
        scores = scores + squares_K[reading.columns_Gs].sum(1).cpu()
    return best(scores, count)
