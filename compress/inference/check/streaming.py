"""Loads the model of a checkpoint so that its layers hold values only while the block around them runs.

Running the whole model then takes the memory of one block, of everything outside the blocks, and of the mapped files.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from compress.checkpoint.read.source import Source
from compress.inference.layers.linear import QuantLinear
from compress.inference.load.assembly import Unread, convert_layer
from compress.inference.load.block_streaming import Opening
from compress.inference.load.dense_model import dequantize_by_block
from compress.inference.load.loading import ON_CPU, load_source

Watch = Callable[[str, QuantLinear], AbstractContextManager[None]]


def stream(
    source: Source, dtype: torch.dtype | None, watch: Watch, *, dequantize: bool = False
) -> tuple[nn.Module, dict[str, Opening]]:
    """(The model of `load_source`, {layer: opening} for `run_by_block`). watch: makes the context that is entered
    around the use of a layer on codes. dequantize: load dense weights instead, without `watch`."""
    if source.quantization is not None and dequantize:
        return dequantize_by_block(source, dtype)
    model = load_source(source, dtype, replace(ON_CPU, unready=True))
    unread = [name for name, module in model.named_modules() if isinstance(module, Unread)]
    return model, {name: partial(_watch, model, name, watch) for name in unread}


@contextmanager
def _watch(model: nn.Module, name: str, watch: Watch) -> Iterator[None]:
    with convert_layer(model, name) as layer, watch(name, layer):
        yield
