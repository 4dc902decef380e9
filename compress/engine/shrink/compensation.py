"""Blocks behind those that are dropped make up for them: from what they are given without these, they return what they
returned with them.

    dropped blocks -> for every block behind the first of them: for every layer: statistics of its input, without and
    with the dropped blocks -> the weight that is closest in what it returns
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.base.collectives import Comm
from compress.engine.layer_versions import Versions
from compress.engine.plan.matching import Ignored
from compress.engine.residency import Local
from compress.engine.shrink.groups import Reading, consumer_of
from compress.engine.walk.collect import collected
from compress.engine.walk.forward import suspended_forward
from compress.engine.walk.sites import structure_of
from compress.engine.walk.state import Streams
from compress.model.calls import Arrival, Call
from compress.model.edits.changes import DATA, Applied, change
from compress.model.layers import Layer, Stack, layers_of, obstacle
from compress.model.open_block import Opened
from compress.model.sharing import shared_parameters
from compress.passes.protocol.removal import RemovalOptions


@dataclass(frozen=True)
class Compensation:
    """Compensation for dropped blocks in a model whose blocks are all still there. A collective."""

    model: nn.Module
    p: RemovalOptions
    residency: Local
    ignored: Ignored
    comm: Comm

    def changes(self, stack: Stack, captured: list[list[Call]], gone: Set[int]) -> Iterator[Applied]:
        """Change the layers behind the blocks in `gone`; yields each change, made. captured: the calls of every block
        of the stack in the original model."""
        streams = Streams(captured[0], captured[0])
        for i, (name, block) in enumerate(stack.blocks):
            streams = streams.called_as(captured[i])
            with self.residency.open(block, keep=False) as opened, torch.no_grad():
                if i in gone:
                    others = [opened.block(*call.args, **call.kwargs) for call in streams.reference]
                    streams = Streams(streams.calls, streams.after(others, others).reference)
                    continue
                solved, streams = self.adjusted(name, opened, streams, min(gone) < i)
            for layer, weight, bias in solved:
                changes = [change(layer.parameter, DATA, layer.stored(weight).to(layer.parameter.data))]
                if bias is not None:
                    parameter: Any = layer.module.bias
                    changes.append(change(parameter, DATA, bias.to(parameter.data)))
                yield Applied(tuple(changes))

    def adjusted(
        self, name: str, opened: Opened, streams: Streams, solves: bool
    ) -> tuple[list[tuple[Layer, Tensor, Tensor | None]], Streams]:
        """The layers of an open block that make up for what went before it, with weights and biases in the dtypes that
        the model stores, and the calls of the next block."""
        found: list[tuple[Layer, Tensor, Tensor | None]] = []
        versions = Versions()
        shared = shared_parameters(self.model)
        layers = [each for each in layers_of(opened.block, name) if obstacle(each.module) is None] if solves else []
        layers = [each for each in layers if id(each.parameter) not in shared and not self.ignored.asked_for(each.name)]
        by_name = {layer.name: layer for layer in layers}
        structure = structure_of(opened.block, streams.calls, layers)

        def visit(site: Sequence[Layer], arrivals: Iterable[Arrival | None]) -> None:
            biased = {layer.name: getattr(layer.module, "bias", None) for layer in site}
            for bias in dict.fromkeys(b is not None for b in biased.values()):
                alike = [layer for layer in site if (biased[layer.name] is not None) == bias]
                statistics = collected(self.p.needs_of(bias), alike[0], arrivals, self.comm)
                if statistics is None:
                    continue
                for layer in alike:
                    none = torch.empty(0, 1, dtype=torch.long, device=layer.weight.device)
                    reading = Reading(layer.weight, biased[layer.name], statistics[0], none)
                    weight = consumer_of(self.p, reading, self.comm).weight
                    own = (weight[:, :-1], weight[:, -1]) if bias else (weight, None)
                    found.append((layer, *stored_as(opened, layer, *own)))
                    versions.replace(layer.parameter, layer.stored(found[-1][1]).to(layer.parameter.data))
                    if found[-1][2] is not None:
                        parameter: Any = layer.module.bias
                        versions.replace(parameter, found[-1][2].to(parameter.data))

        sites = [[by_name[n] for n in names] for names in structure.sites]
        passed = suspended_forward(opened.block, streams.calls, sites, visit, streams.reference, versions)
        return found, streams.after(passed.outputs, passed.reference)


def stored_as(opened: Opened, layer: Layer, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A weight and a bias in the dtypes that the model stores."""
    held = None if bias is None else bias.to(opened.dtype_of(layer.module.bias))  # type: ignore[arg-type]
    return weight.to(opened.dtype_of(layer.parameter)), held
