"""Overflow of float16: values of a model, computed in a wider dtype, that float16 has no number for.

A checkpoint of float16 whose activations pass 65504 gives infinities, then NaN, to whoever loads it as it is stored.
Computed in float32, as `evaluate` does on a CPU, nothing of that shows. So each output of a module, and each input of a
layer, is compared with the range of float16 while the model is measured.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compress.model.calls import removing

MOST = torch.finfo(torch.float16).max


@dataclass
class Largest:
    """The largest value seen that float16 has no number for, and the module that had it; 0 where there was none."""

    value: float = 0.0
    where: str = ""

    @property
    def said(self) -> str | None:
        """The overflow in words; None where there is none."""
        if not self.where:
            return None
        return (
            f"values reach {self.value:.3g} in {self.where}, and float16 ends at {MOST:.0f}: loaded in the dtype that "
            "it is stored in, it gives infinities and NaN (--dtype stored measures it so); bfloat16 has the range"
        )


@contextmanager
def watch_overflow(network: nn.Module, stored: torch.dtype | None) -> Iterator[Largest]:
    """Watch a model inside the context, if it is stored in float16 and computed in a wider dtype."""
    seen = Largest()
    wide = next(network.parameters()).dtype != torch.float16
    watched = network.named_modules() if stored == torch.float16 and wide else ()
    handles = [module.register_forward_hook(partial(_look, seen, name)) for name, module in watched]
    with removing(handles):
        yield seen


def _look(seen: Largest, name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    inputs = args if next(module.children(), None) is None else ()
    outputs = output if isinstance(output, tuple | list) else (output,)
    for each in (*inputs, *outputs):
        if isinstance(each, Tensor) and each.is_floating_point() and each.numel():
            value = max(abs(float(end)) for end in each.detach().aminmax())
            if value > max(MOST, seen.value):
                seen.value, seen.where = value, name
