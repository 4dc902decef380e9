"""The statistics of one site, for any kind of layer, and the decisions made from them.

A linear layer has one set of statistics. So has a convolution, of its patches [M, K], which are the rows that its
weight [N, K] multiplies; a grouped one has a set for each group, and the pass that decides sees each group as a layer
of its own. Ranges of an input (`reads_elements`) count its elements instead, one set for all groups. So do those of an
output, which is computed from its input once the layer is decided.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compress.base.collectives import Comm
from compress.model.calls import Arrival
from compress.model.convolution import patches_in_parts
from compress.model.layers import Layer
from compress.solvers.statistics.hessian import HessianResult
from compress.solvers.statistics.input_statistics import Statistic, StatisticFactory
from compress.weights.decision import Figures


class Collector:
    """Statistics for the layers of a site, of which `layer` is one, by name."""

    def __init__(self, needs: Mapping[str, StatisticFactory], layer: Layer) -> None:
        columns, device = layer.shape[1], layer.weight.device
        self.geometry, self.channels, self.device = layer.geometry, layer.channels, device
        made = {key: make(layer.channels, device) for key, make in needs.items()}
        if self.geometry is None:
            self.rows, self.parts = made, [dict[str, Statistic]()]
            return
        self.rows = {key: s for key, s in made.items() if getattr(s, "reads_elements", False)}
        rest = {key: make for key, make in needs.items() if key not in self.rows}
        groups = self.geometry.groups if rest else 1
        self.parts = [{key: make(columns, device) for key, make in rest.items()} for _ in range(groups)]

    def update(self, arrival: Arrival | None) -> None:
        """Count a micro-batch. None stands for one that did not reach the layer; statistics that depend on the order
        count it, too."""
        if arrival is None:
            nothing = torch.empty(0, self.channels, device=self.device)
            for statistic in self.rows.values():
                statistic.update(nothing, nothing)
            return
        x_MK, reference_MK = arrival.weighted
        for statistic in self.rows.values():
            if arrival.weight_M is not None and getattr(statistic, "reads_elements", False):
                statistic.update(arrival.own, None)  # a range has no weights
            else:
                statistic.update(x_MK, reference_MK)
        if not self.parts[0]:
            return
        assert self.geometry is not None
        assert arrival.samples is not None
        patches = patches_in_parts(arrival.samples, self.geometry)
        if arrival.reference_samples is None:
            for x_gMK in patches:
                self._count(x_gMK, None)
            return
        others = patches_in_parts(arrival.reference_samples, self.geometry)
        for x_gMK, other_gMK in zip(patches, others, strict=True):
            self._count(x_gMK, other_gMK)

    def _count(self, x_gMK: Tensor, reference_gMK: Tensor | None) -> None:
        for group, statistics in enumerate(self.parts):
            for statistic in statistics.values():
                statistic.update(x_gMK[group], None if reference_gMK is None else reference_gMK[group])

    def sync(self, comm: Comm) -> None:
        """Combine with the other ranks."""
        for statistics in (self.rows, *self.parts):
            for statistic in statistics.values():
                statistic.sync(comm)

    def results(self) -> list[dict[str, Any]]:
        """The finished statistics: one set, or one for each group of a grouped convolution."""
        whole = {key: statistic.result() for key, statistic in self.rows.items()}
        return [{**whole, **{key: s.result() for key, s in statistics.items()}} for statistics in self.parts]


def collect(
    needs: Mapping[str, StatisticFactory],
    layer: Layer,
    arrivals: Iterable[Arrival | None],
    comm: Comm,
    offloads: bool = False,
) -> list[dict[str, Any]] | None:
    """`Collector.results` over all micro-batches and ranks; None where no token came by. A collective. offloads:
    whether second moments wait on the host.

    Raises CompressError, on every rank, for a micro-batch that cannot enter the statistics.
    """
    collector = Collector(needs, layer)
    problem, seen = None, 0
    for arrival in arrivals:
        problem = problem or _problem(layer, arrival)
        if problem is None:
            collector.update(arrival)
            seen += 0 if arrival is None else len(arrival.x_MK)
        del arrival  # before the next one is made
    comm.fail_together(problem)
    collector.sync(comm)
    total = comm.all_reduce(torch.tensor(seen, device=layer.weight.device))
    if not int(total):
        return None
    results = collector.results()
    if not offloads:
        return results
    return [{key: r.aside() if isinstance(r, HessianResult) else r for key, r in part.items()} for part in results]


def collect_outputs(
    needs: Mapping[str, StatisticFactory], layers: Sequence[Layer], outputs: Iterable[Iterable[Tensor]], comm: Comm
) -> list[dict[str, Any]]:
    """The finished statistics of the outputs of each of a site's layers, over all micro-batches and ranks. A
    collective.

    outputs: for every micro-batch, the output of each layer, [M, N]. Raises CompressError, on every rank, where one of
    them is not finite.
    """
    layer_statistics = [
        {key: make(layer.shape[0], layer.weight.device) for key, make in needs.items()} for layer in layers
    ]
    problem = None
    for outputs_of_batch in outputs:
        for layer, statistics, y_MN in zip(layers, layer_statistics, outputs_of_batch, strict=True):
            if not bool(torch.isfinite(y_MN).all()):
                problem = problem or (
                    f"the output of {layer.name} has non-finite values during calibration; the model overflows in this "
                    "dtype"
                )
            for statistic in statistics.values():
                statistic.update(y_MN, None)
    comm.fail_together(problem)
    for statistics in layer_statistics:
        for statistic in statistics.values():
            statistic.sync(comm)
    return [{key: statistic.result() for key, statistic in statistics.items()} for statistics in layer_statistics]


class RoutedTokens:
    """Counts of a site's tokens that an expert was routed, of an expert's micro-batches, and of micro-batches whose
    tokens could not be paired with those of the original."""

    def __init__(self) -> None:
        self.counts = [0, 0, 0]

    def note(self, arrival: Arrival | None) -> Arrival | None:
        """Count an arrival, and return it."""
        if arrival is not None:
            self.counts[2] += arrival.elsewhere
            if arrival.weight_M is not None:
                self.counts[0] += int((arrival.weight_M == 1).sum())
                self.counts[1] += 1
        return arrival

    def figures(self, comm: Comm, device: torch.device) -> Figures:
        """`routed_tokens`, where the site is an expert's, and `elsewhere`, where tokens were not paired. A
        collective."""
        own, of_expert, elsewhere = map(int, comm.all_reduce(torch.tensor(self.counts, device=device)).tolist())
        return {**({"routed_tokens": own} if of_expert else {}), **({"elsewhere": elsewhere} if elsewhere else {})}


def _problem(layer: Layer, arrival: Arrival | None) -> str | None:
    """The reason why a micro-batch cannot enter the statistics of a layer; None where it can."""
    if arrival is None:
        return None
    x = arrival.x_MK
    if x.shape[1] != layer.channels:
        return f"a calibration batch gives {layer.name} {x.shape[1]} inputs; it has {layer.channels}"
    if len(x) and not bool(torch.stack(torch.aminmax(x)).isfinite().all()):  # without a copy of x
        return (
            f"the input of {layer.name} has non-finite values during calibration; the model overflows in this dtype or "
            "its weights are damaged"
        )
    return None
