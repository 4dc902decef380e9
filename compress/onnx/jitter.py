"""The distance between two exact runs of a model that rounds its inputs: what sums in another order make of it.

A sum of K products in float32 moves by about eps sqrt(K) of itself when its order changes. A number that lies half-way
between two codes then takes the other code, and the next layer's with it. `jitter` makes runs of ours in which every
layer's input is moved by so much, at random, and says how far their outputs are from the first run's.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from compress.inference.layers.linear import QuantLinear

DRAWS = 4


def jitter(run: Callable[[], Tensor], first: Tensor) -> list[float]:
    """Mean distances between the first run's outputs and those of `DRAWS` moved ones. run: makes the outputs."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(DRAWS):
        with moved(generator):
            found.append(float((run() - first).abs().mean()))
    return found


@contextmanager
def moved(generator: torch.Generator) -> Iterator[None]:
    """Moves what layers of all models read by a rounding of float32 sums, for the body."""

    def move(module: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d | QuantLinear) or not given:
            return None
        x = given[0]
        terms = module.weight[0].numel() if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) else x.shape[-1]
        size = torch.finfo(torch.float32).eps * terms**0.5
        shift = torch.empty(x.shape).uniform_(-size, size, generator=generator)
        return (x * (1 + shift), *given[1:])

    handle = register_module_forward_pre_hook(cast(Any, move))
    try:
        yield
    finally:
        handle.remove()
