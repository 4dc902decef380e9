"""The layout of GPTQ checkpoints, format 1: AutoGPTQ's, which GPTQModel, ExLlama, vLLM, SGLang and others read.

Of a layer with N outputs, K inputs, G groups and codes q of n bits, whose values are (q - z) scale, z = 2^(n-1):

    qweight   int32 [K n / 32, N]     q, a bit stream along the inputs, lowest bits first
    qzeros    int32 [G, N n / 32]     z - 1, a bit stream along the outputs
    scales    float16 [G, N]
    g_idx     int32 [K]               the group of each input, here in order

As the zero point is stored less one, 0 has no place: asymmetric codes are refused. Scales may be negative.
"""

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.export.exporter import Exporter, Written
from compress.checkpoint.export.integers import (
    copied,
    grid_of,
    integers_of,
    say_what_is_lost,
    uncompressed,
    why_not_integers,
)
from compress.checkpoint.export.place import Place
from compress.checkpoint.read.source import Source
from compress.checkpoint.read.stored import StoredLayer, stored_in
from compress.kernels.layouts.words import WORD, pack_rows
from compress.system.version import VERSION

BITS = (2, 3, 4, 8)
GROUPS = (-1, 16, 32, 64, 128, 256, 512, 1024)  # those that GPTQModel takes
HEAD = "lm_head"


class GPTQLayout(Exporter):
    """Symmetric codes of 2, 3, 4 or 8 bits."""

    about = "GPTQ's layout (format 1), for GPTQModel, ExLlama, vLLM and other readers of it; symmetric codes"
    kind = "gptq"

    def why_not(self, checkpoint: Source) -> list[str]:
        """Weight-only codes, symmetric, of one width and group size, whose sizes fill whole words."""
        if found := why_not_integers(checkpoint, BITS, GROUPS):
            return found
        for name, layer in stored_in(checkpoint).layers.items():
            if not grid_of(layer).symmetric:
                return ["its codes are asymmetric; `--to awq` takes those of 4 bits"]
            rows, columns = layer.shape
            if columns % WORD or rows * grid_of(layer).bits % WORD:
                return [f"{name} is [{rows}, {columns}], and its codes do not fill words of {WORD} bits both ways"]
        return []

    def write(self, checkpoint: Source, place: Place) -> Written:
        """Repack the layers, one after the other, and write config.json and quantize_config.json."""
        say_what_is_lost(checkpoint, place)
        layers, rest = stored_in(checkpoint).layers, list(copied(checkpoint))
        place.tensors(_tensors(checkpoint, rest), len(rest) + 4 * len(layers))
        quantization = _quantization(checkpoint)
        place.json("config.json", {**checkpoint.config, "quantization_config": quantization})
        place.json("quantize_config.json", quantization)
        return Written(len(layers))


def _tensors(source: Source, rest: list[str]) -> Iterator[tuple[str, Tensor]]:
    for name in rest:
        yield name, source.weights.tensor(name)
    for name, layer in stored_in(source).layers.items():
        yield from ((f"{name}.{part}", tensor) for part, tensor in packed(source, name, layer).items())


def packed(source: Source, name: str, layer: StoredLayer) -> dict[str, Tensor]:
    """The tensors of a layer, by their names in it."""
    held, bits, inputs = integers_of(source, name), grid_of(layer).bits, layer.shape[1]
    return {
        "qweight": pack_rows(held.codes, bits, signed=False).t().contiguous(),
        "qzeros": pack_rows((held.zero - 1).t().contiguous(), bits, signed=False),
        "scales": held.scale.t().contiguous(),
        "g_idx": (torch.arange(inputs) // (inputs // held.scale.shape[1])).to(torch.int32),
    }


def _quantization(source: Source) -> dict[str, Any]:
    grid = grid_of(next(iter(stored_in(source).layers.values())))
    dense = [name for name in uncompressed(source) if name != HEAD]
    found: dict[str, Any] = {
        "quant_method": "gptq",
        "checkpoint_format": "gptq",
        "bits": grid.bits,
        "group_size": grid.group_size or -1,
        "sym": True,
        "desc_act": False,
        "true_sequential": True,
        "lm_head": HEAD in stored_in(source).layers,
        "pack_dtype": "int32",
        "meta": {"quantizer": [f"compress:{VERSION}"]},
    }
    return found | ({"dynamic": {f"-:^{re.escape(name)}$": {} for name in dense}} if dense else {})
