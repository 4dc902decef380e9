"""The layout of AWQ checkpoints, version "gemm": AutoAWQ's, which vLLM, SGLang, TGI and others read.

`checkpoint.read.gptq_awq` has the tensors.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from compress.checkpoint.export.exporter import Exporter, Written
from compress.checkpoint.export.integers import Integers, grid_of, uncompressed, why_not_integers, write_layers
from compress.checkpoint.export.limits import LIMITS
from compress.checkpoint.export.place import Place
from compress.checkpoint.export.read_back import read_back
from compress.checkpoint.read.compressed_layers import stored_in
from compress.checkpoint.read.configuration import AWQ
from compress.checkpoint.read.gptq_awq import AWQ_BITS, ORDER, to_words
from compress.checkpoint.read.source import Source


class AWQLayout(Exporter):
    """Codes of 4 bits, symmetric or asymmetric."""

    about = "AWQ's layout (gemm), for vLLM, SGLang, TGI and other readers of it; codes of 4 bits"
    kind = "awq"
    reads_back = True

    def why_not(self, checkpoint: Source) -> list[str]:
        """Weight-only codes of 4 bits, of one group size, whose outputs fill whole words."""
        if found := why_not_integers(checkpoint, LIMITS["awq"]):
            return found
        for name, layer in stored_in(checkpoint).layers.items():
            if layer.shape[0] % len(ORDER):
                return [f"{name} has {layer.shape[0]} outputs; allowed: multiples of {len(ORDER)}"]
        return []

    def write(self, checkpoint: Source, place: Place) -> Written:
        """Repack the layers, one after the other, and write config.json."""
        written = write_layers(checkpoint, place, _words, 3)
        place.json("config.json", {**checkpoint.config, "quantization_config": _quantization(checkpoint)})
        return written

    def read_back(self, folder: Path, record: Mapping[str, Any]) -> dict[str, Any]:
        """By our reader, and by GPTQModel where it is installed."""
        return read_back(folder, record)


def _words(held: Integers, bits: int) -> dict[str, Tensor]:
    assert bits == AWQ_BITS
    return {
        "qweight": to_words(held.codes.t()),
        "qzeros": to_words(held.zero.t()),
        "scales": held.scale.t().contiguous(),
    }


def _quantization(source: Source) -> dict[str, Any]:
    grid = grid_of(next(iter(stored_in(source).layers.values())))
    return {
        "quant_method": AWQ,
        "version": "gemm",
        "bits": AWQ_BITS,
        "group_size": grid.group_size or -1,
        "zero_point": True,
        "modules_to_not_convert": uncompressed(source),
    }
