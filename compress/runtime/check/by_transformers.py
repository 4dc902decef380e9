"""Loads a checkpoint by transformers alone, decompressed by compressed-tensors: block by block in the place of its
decompression of the whole model at the first forward."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from compress.checkpoint.read.pretrained import from_pretrained
from compress.checkpoint.read.source import Source
from compress.errors import CheckpointError
from compress.runtime.load.by_block import Opening
from compress.runtime.load.loading import transformers_alone
from compress.weights.compressed_tensors import needs_dequantizing, read_scheme

# The attribute that holds compressed-tensors' hook for decompressing a whole model at its first forward.
WHOLE = "ct_decompress_hook"


def load_with_transformers(source: Source, dtype: torch.dtype | None = None) -> tuple[nn.Module, str]:
    """(The checkpoint as any user of transformers loads it, the way: "default" or "dequantize=True").

    A quantized checkpoint needs compressed-tensors. The default load takes no packed asymmetric weights and no packed
    embeddings, and fails for architectures whose initialization reads the weights (T5). Dequantizing while loading
    works for checkpoints of one scheme; it would read all schemes as the first. Raises CheckpointError where neither
    works (`initializes_codes` tells a reason for that).
    """
    with transformers_alone():
        return _load(source, dtype or "auto")


def _load(source: Source, dtype: torch.dtype | str) -> tuple[nn.Module, str]:
    quantization = source.quantization or {}
    groups = (quantization.get("config_groups") or {}).values()
    schemes = [read_scheme(group, quantization.get("format"), f"a layer of {source.path}") for group in groups]
    if not any(needs_dequantizing(scheme) for scheme in schemes):
        try:
            return from_pretrained(source, str(source.path), dtype=dtype), "default"
        except CheckpointError:
            if len(groups) != 1:
                raise
    elif len(groups) > 1:
        raise CheckpointError("packed asymmetric weights beside layers of another scheme")
    from transformers import CompressedTensorsConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers remarks that it was given a second configuration
        config = CompressedTensorsConfig(dequantize=True)
        return from_pretrained(source, str(source.path), dtype=dtype, quantization_config=config), "dequantize=True"


def initializes_codes(error: CheckpointError) -> bool:
    """True for an error of `load_with_transformers` by an initialization that reads the weight of a compressed layer,
    which has codes in its place. transformers before 5.23 initializes so where it dequantizes, too."""
    reason = error.__cause__
    return isinstance(reason, AttributeError) and reason.name == "weight" and hasattr(reason.obj, "weight_packed")


def decompressed_by_block(model: nn.Module) -> dict[str, Opening]:
    """{layer: opening} for `run_by_block`, which decompresses layers one block at a time. For a model that transformers
    loaded compressed; its hook that decompresses all layers is removed. Empty for a model without that hook."""
    hook: Any = model.__dict__.get(WHOLE)
    if hook is None:
        return {}
    from compressed_tensors.quantization.utils import is_module_quantized

    hook.remove()
    delattr(model, WHOLE)
    return {n: partial(_decompressed, m) for n, m in model.named_modules() if is_module_quantized(m)}


@contextmanager
def _decompressed(module: nn.Module) -> Iterator[None]:
    """Has compressed-tensors decompress a module for the body, and restores it afterwards."""
    from compressed_tensors.compressors.base import decompress_module

    own: Any = module
    parameters, buffers, status = dict(module._parameters), dict(module._buffers), own.quantization_status
    decompress_module(module)
    try:
        yield
    finally:
        module._parameters.clear()
        module._buffers.clear()
        module._parameters.update(parameters)
        module._buffers.update(buffers)
        own.quantization_status = status
