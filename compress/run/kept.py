"""Statistics that are gathered once, and kept for runs that ask for the same (`checkpoint.statistics_folder`).

Only statistics of the original model's inputs are kept (`Decide.original`): those behind compressed layers are of one
scheme alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from compress.calibration.collect import collected, routed
from compress.calibration.stats import StatisticFactory, described_factory
from compress.checkpoint.statistics_folder import KeptKind, StatisticsFolder
from compress.model.calls import Arrival
from compress.model.layers import Layer
from compress.passes.protocol.stages import Decide, Needs
from compress.run.plan.plan import Plan
from compress.system.comm import Comm
from compress.weights.decision import Figures


@dataclass(frozen=True)
class GatheredInput:
    """The statistics of a site's input, a set for each group of a grouped convolution, and figures about its tokens."""

    statistics: Sequence[Mapping[str, Any]]
    figures: Figures


@dataclass
class KeptStatistics:
    """The statistics in a folder that belong to one text and to the settings of a run. about: these. read, gathered:
    the numbers of inputs so far."""

    folder: StatisticsFolder
    about: Mapping[str, Any]
    kinds: dict[str, KeptKind] = field(default_factory=dict)
    read: int = 0
    gathered: int = 0

    def open(self, needs: Needs) -> bool:
        """True if anything is kept of one of these statistics. Raises InputError for what is damaged."""
        kinds = [self._kind(make) for make in needs.values()]
        return any(kind.blocks for kind in kinds)

    def differing(self, asked: Sequence[Needs]) -> list[str]:
        """The settings in which all that is there of these statistics differs."""
        kinds = [self._kind(make) for needs in asked for make in needs.values()]
        return next((keys for kind in kinds if (keys := self.folder.others(kind.about))), [])

    def holds(self, block: str, layers: Iterable[str], needs: Needs) -> bool:
        """True if these layers of a block have all their statistics, or a reason why they have none."""
        kinds = [self._kind(make) for make in needs.values()]
        return all(k.entry(block, n) is not None or n in k.alone(block) for n in layers for k in kinds)

    def holds_all(self, plan: Plan) -> bool:
        """True if nothing that the passes of a plan look at is left to gather."""
        return not plan.looks_behind and all(
            self.holds(block, [layer.name for layer in layers if p.wants(layer.name)], decides.needs)
            for p in plan.passes
            if (decides := p.stage(Decide)) is not None
            for block, layers in plan.layers.items()
        )

    def sites(self, block: str, layers: Iterable[str], needs: Needs) -> list[list[str]]:
        """Those of the layers that have statistics, by the input that they read, in the order of the block."""
        kind = self._kind(next(iter(needs.values())))
        found: dict[str, list[str]] = {}
        for name in layers:
            entry = kind.entry(block, name)
            if entry is not None:
                found.setdefault(entry["file"], []).append(name)
        order = [each["file"] for each in kind.blocks[block]["inputs"]] if found else []
        return [found[file] for file in order if file in found]

    def alone(self, block: str, layers: Iterable[str], needs: Needs) -> dict[str, str]:
        """{layer: why it has no statistics}, of these layers of a block."""
        known = self._kind(next(iter(needs.values()))).alone(block)
        return {name: known[name] for name in layers if name in known}

    def input_of(self, block: str, layer: str, needs: Needs, device: torch.device) -> GatheredInput | None:
        """The statistics of a layer's input; None where one of them is missing."""
        kinds = {name: self._kind(make) for name, make in needs.items()}
        entries = {name: entry for name, kind in kinds.items() if (entry := kind.entry(block, layer)) is not None}
        if len(entries) < len(needs):
            return None
        self.read += 1
        found = {name: kinds[name].read(entry, device) for name, entry in entries.items()}
        groups = len(next(iter(found.values()))[0])
        statistics = [{name: results[i] for name, (results, _) in found.items()} for i in range(groups)]
        return GatheredInput(statistics, next(iter(found.values()))[1])

    def keep(self, block: str, layers: Sequence[str], needs: Needs, found: GatheredInput) -> None:
        """Write the statistics of an input that these layers read."""
        self.gathered += 1
        for name, make in needs.items():
            kind = self._kind(make)
            if kind.entry(block, layers[0]) is None:
                kind.keep(block, layers, [each[name] for each in found.statistics], found.figures)

    def finish(self, block: str, needs: Needs, alone: Mapping[str, str]) -> None:
        """Make what was kept of a block count, once all of its inputs were seen."""
        for make in needs.values():
            self._kind(make).finish(block, alone)

    def told(self) -> str:
        """A remark about where statistics came from."""
        return f"{self.folder.place}: statistics of {self.read} inputs read, of {self.gathered} gathered and kept"

    def _kind(self, make: StatisticFactory) -> KeptKind:
        words = described_factory(make)
        if words not in self.kinds:
            self.kinds[words] = self.folder.kind({"statistic": words, **self.about})
        return self.kinds[words]


def gathered(
    kept: KeptStatistics | None,
    block: str,
    needs: Needs,
    site: Sequence[Layer],
    arrivals: Iterable[Arrival | None],
    comm: Comm,
) -> GatheredInput | None:
    """The statistics of a site's input: those that are kept, or else gathered now. None where no token came by."""
    device = site[0].weight.device
    found = None if kept is None else kept.input_of(block, site[0].name, needs, device)
    if found is not None:
        return found
    statistics = collected(needs, site[0], arrivals, comm)
    if statistics is None:
        return None
    made = GatheredInput(statistics, routed(arrivals, comm, device))
    if kept is not None:
        kept.keep(block, [layer.name for layer in site], needs, made)
    return made
