"""The layout of AWQ checkpoints, version "gemm": AutoAWQ's, which vLLM, SGLang, TGI and others read.

Of a layer with N outputs, K inputs, G groups and codes q of 4 bits, whose values are (q - z) scale:

    qweight   int32 [K, N / 8]     eight outputs in a word; nibble i, from the lowest, holds output ORDER[i] of them
    qzeros    int32 [G, N / 8]     z, in the same order
    scales    float16 [G, N]
"""

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
from compress.checkpoint.read.stored import stored_in
from compress.kernels.layouts.words import pack_rows

BITS = 4
GROUPS = (-1, 16, 32, 64, 128)
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


class AWQLayout(Exporter):
    """Codes of 4 bits, symmetric or asymmetric."""

    about = "AWQ's layout (gemm), for vLLM, SGLang, TGI and other readers of it; codes of 4 bits"
    kind = "awq"

    def why_not(self, checkpoint: Source) -> list[str]:
        """Weight-only codes of 4 bits, of one group size, whose outputs fill whole words."""
        if found := why_not_integers(checkpoint, (BITS,), GROUPS):
            return found
        for name, layer in stored_in(checkpoint).layers.items():
            if layer.shape[0] % len(ORDER):
                return [f"{name} has {layer.shape[0]} outputs; allowed: multiples of {len(ORDER)}"]
        return []

    def write(self, checkpoint: Source, place: Place) -> Written:
        """Repack the layers, one after the other, and write config.json."""
        say_what_is_lost(checkpoint, place)
        layers, rest = stored_in(checkpoint).layers, list(copied(checkpoint))
        place.tensors(_tensors(checkpoint, rest), len(rest) + 3 * len(layers))
        place.json("config.json", {**checkpoint.config, "quantization_config": _quantization(checkpoint)})
        return Written(len(layers))


def _tensors(source: Source, rest: list[str]) -> Iterator[tuple[str, Tensor]]:
    for name in rest:
        yield name, source.weights.tensor(name)
    for name in stored_in(source).layers:
        yield from ((f"{name}.{part}", tensor) for part, tensor in packed(source, name).items())


def packed(source: Source, name: str) -> dict[str, Tensor]:
    """The tensors of a layer, by their names in it."""
    held = integers_of(source, name)
    return {
        "qweight": _in_order(held.codes.t()),
        "qzeros": _in_order(held.zero.t()),
        "scales": held.scale.t().contiguous(),
    }


def _in_order(codes: Tensor) -> Tensor:
    """[R, N] codes, eight of a row in a word of int32."""
    places = torch.arange(codes.shape[1]).view(-1, len(ORDER))[:, list(ORDER)].flatten()
    return pack_rows(codes[:, places].contiguous(), BITS, signed=False)


def _quantization(source: Source) -> dict[str, Any]:
    grid = grid_of(next(iter(stored_in(source).layers.values())))
    return {
        "quant_method": "awq",
        "version": "gemm",
        "bits": BITS,
        "group_size": grid.group_size or -1,
        "zero_point": True,
        "modules_to_not_convert": uncompressed(source),
    }
