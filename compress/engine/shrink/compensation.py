"""Blocks behind those that are dropped make up for them: from what they are given without these, they return what they
returned with them.

    dropped blocks -> for every block behind the first of them: for every layer: statistics of its input, without and
    with the dropped blocks -> the weight that is closest in what it returns
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.engine.layer_versions import Versions
from compress.engine.shrink.blocks import WholeModel
from compress.engine.shrink.cuts import Refit
from compress.engine.shrink.groups import Reading, consumer_of
from compress.engine.walk.collect import collect
from compress.engine.walk.forward import suspended_forward
from compress.engine.walk.sites import structure_of
from compress.engine.walk.state import Streams
from compress.model.calls import Arrival, Call
from compress.model.layers import Layer, Stack, layers_of, obstacle
from compress.model.open_block import Opened
from compress.model.sharing import shared_parameters
from compress.passes.protocol.removal import RemovalOptions


@dataclass(frozen=True)
class Compensation:
    """Compensation for dropped blocks in a model whose blocks are all still there. A collective."""

    whole: WholeModel
    p: RemovalOptions

    def edits(self, stack: Stack, captured: list[list[Call]], gone: Set[int]) -> Iterator[tuple[str, Refit]]:
        """(Name of a block behind those in `gone`, the edit of its layers). captured: the calls of every block of the
        stack in the original model."""
        streams = Streams(captured[0], captured[0])
        for i, (name, block) in enumerate(stack.blocks):
            streams = streams.called_as(captured[i])
            with self.whole.residency.open(block, keep=False) as opened, torch.no_grad():
                if i in gone:
                    others = [opened.block(*call.args, **call.kwargs) for call in streams.reference]
                    streams = Streams(streams.calls, streams.after(others, others).reference)
                    continue
                solved, streams = self.refit(name, opened, streams, min(gone) < i)
            yield name, Refit(solved)

    def refit(
        self, name: str, opened: Opened, streams: Streams, solves: bool
    ) -> tuple[list[tuple[Layer, Tensor, Tensor | None]], Streams]:
        """The layers of an open block that make up for what went before it, with weights and biases in the dtypes that
        the model stores, and the calls of the next block."""
        solved: list[tuple[Layer, Tensor, Tensor | None]] = []
        versions = Versions()
        shared, ignored = shared_parameters(self.whole.model), self.whole.ignored
        layers = [each for each in layers_of(opened.block, name) if obstacle(each.module) is None] if solves else []
        layers = [each for each in layers if id(each.parameter) not in shared and not ignored.asked_for(each.name)]
        by_name = {layer.name: layer for layer in layers}
        structure = structure_of(opened.block, streams.calls, layers)

        def visit(site: Sequence[Layer], arrivals: Iterable[Arrival | None]) -> None:
            biases = {layer.name: getattr(layer.module, "bias", None) for layer in site}
            for biased in dict.fromkeys(b is not None for b in biases.values()):
                alike = [layer for layer in site if (biases[layer.name] is not None) == biased]
                statistics = collect(self.p.needs_of(biased), alike[0], arrivals, self.whole.comm)
                if statistics is None:
                    continue
                for layer in alike:
                    none = torch.empty(0, 1, dtype=torch.long, device=layer.weight.device)
                    reading = Reading(layer.weight, biases[layer.name], statistics[0], none)
                    weight = consumer_of(self.p, reading, self.whole.comm).weight
                    own = (weight[:, :-1], weight[:, -1]) if biased else (weight, None)
                    refit = Refit.of(opened, [(layer, *own)])
                    refit.stand_in(versions)
                    solved.extend(refit.solved)

        sites = [[by_name[n] for n in names] for names in structure.sites]
        passed = suspended_forward(opened.block, streams.calls, sites, visit, streams.reference, versions)
        return solved, streams.after(passed.outputs, passed.reference)
