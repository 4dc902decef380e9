"""A whole model run hollow: its layers, norms and embeddings return given numbers, and none of their weights is read.

The copy that runs holds no weight of a layer. What else computes (masks, positions, activations) is copied in float32.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compress.model.calls import Batch, Call, removing
from compress.model.layers import Layer, is_linear
from compress.model.structure.excerpt import short_call
from compress.model.structure.hollow_forward import HollowOutputs, as_given, given_output, hollow_forward
from compress.model.structure.producers import Producer, producers_of

Given = Callable[[str, Tensor], Tensor]


class HollowModel:
    """A model without its layers' weights, and one short micro-batch. tables: its embeddings, by name; odd_tables:
    those that return something else than multiples of their rows; producers: its layers and norms."""

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.model = _without_layers(model).eval()
        on_device = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.items()}
        widened = {k: v.float() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in on_device.items()}
        self.call = short_call(Call((), widened, None, None))
        modules = dict(self.model.named_modules())
        self.tables = {name: m for name, m in modules.items() if isinstance(m, nn.Embedding)}
        self.odd_tables: set[str] = set()
        linear = {n: Producer(m, "linear", Layer(n, m).shape[0]) for n, m in modules.items() if _is_layer(m)}
        self.producers: Mapping[str, Producer] = linear
        self.producers = producers_of(self.model, self.forward)
        self.base = self.forward()

    def width(self, name: str) -> int:
        """The channels of a layer, norm or embedding."""
        return self.tables[name].embedding_dim if name in self.tables else self.producers[name].channels

    def forward(self, given: Given = as_given, gradients: bool = False) -> HollowOutputs:
        """A hollow forward. given: replaces a given output [..., C], of an embedding or producer."""
        with self._given_embeddings(given):
            return hollow_forward(self.model, self.call, self.producers, given, gradients)

    @contextmanager
    def _given_embeddings(self, given: Given) -> Iterator[None]:
        counts = dict.fromkeys(self.tables, 0)

        def stand_in(name: str, module: nn.Embedding, args: Any, kwargs: Any, output: Tensor) -> Tensor:
            if counts[name] == 0 and not _multiplies_rows(module, args, kwargs):
                self.odd_tables.add(name)
            seed = f"{name}/{counts[name]}"
            counts[name] += 1
            return given(name, given_output(seed, output.shape[:-1], output.shape[-1]).to(output.device))

        hooks = [
            table.register_forward_hook(partial(stand_in, name), with_kwargs=True)
            for name, table in self.tables.items()
        ]
        with removing(hooks):
            yield


def _multiplies_rows(table: nn.Embedding, args: Any, kwargs: Any) -> bool:
    """True for an embedding that returns its rows times one number: zeros of zeros, one number of ones."""
    if table.max_norm is not None:
        return False
    before, outputs = table.weight.data, []
    try:
        for value in (0.0, 1.0):
            table.weight.data = before.new_full((1, 1), value).expand_as(before)  # takes no memory
            outputs.append(table.forward(*args, **kwargs))
    finally:
        table.weight.data = before
    zeros, ones = outputs
    return bool((zeros == 0).all() and (ones == ones.flatten()[0]).all() and ones.flatten()[0] != 0)


def _is_layer(module: nn.Module) -> bool:
    return is_linear(module) and "weight" in module._parameters


def _without_layers(model: nn.Module) -> nn.Module:
    """A copy in float32 whose layers have no values. Embeddings share their tables with the model: they run, to tell
    the shape of what they return."""
    memo: dict[int, object] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if isinstance(module, nn.Embedding):
                memo[id(parameter)] = nn.Parameter(parameter.detach())
            elif _is_layer(module):
                memo.setdefault(id(parameter), nn.Parameter(torch.empty(parameter.shape, device="meta")))
            else:
                memo.setdefault(id(parameter), nn.Parameter(parameter.detach().float().clone()))
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.float().clone() if buffer.is_floating_point() else buffer.clone()
    found: nn.Module = copy.deepcopy(model, memo)
    return found
