"""The layout of GPTQ checkpoints, format 1: AutoGPTQ's, which GPTQModel, ExLlama, vLLM, SGLang and others read.

`weights.formats.gptq_awq` has the tensors. Zero points are stored less one, so 0 has no place: asymmetric codes are
refused. Scales may be negative.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compress.base.version import VERSION
from compress.checkpoint.export.exporter import Exporter, Written
from compress.checkpoint.export.integers import grid_of, uncompressed, why_not_integers, write_layers
from compress.checkpoint.export.place import Place
from compress.checkpoint.export.read_back import read_back
from compress.checkpoint.read.compressed_layers import stored_in
from compress.checkpoint.read.source import Source
from compress.kernels.layouts.words import WORD
from compress.weights.formats.gptq_awq import GPTQWords
from compress.weights.gptq_awq import GPTQ, GPTQ_BITS

GROUPS = (-1, 16, 32, 64, 128, 256, 512, 1024)  # those that GPTQModel takes
HEAD = "lm_head"


class GPTQLayout(Exporter):
    """Symmetric codes of 2, 3, 4 or 8 bits."""

    about = "GPTQ's layout (format 1), for GPTQModel, ExLlama, vLLM and other readers of it; symmetric codes"
    kind = "gptq"
    reads_back = True

    def why_not(self, checkpoint: Source) -> list[str]:
        """Weight-only codes, symmetric, of one width and group size, whose sizes fill whole words."""
        if found := why_not_integers(checkpoint, GPTQ_BITS, GROUPS, WORD):
            return found
        for name, layer in stored_in(checkpoint).layers.items():
            if not grid_of(layer).symmetric:
                return ["its codes are asymmetric; `--to awq` takes those of 4 bits"]
            rows, columns = layer.shape
            if rows * grid_of(layer).bits % WORD:
                return [f"{name} is [{rows}, {columns}], and its codes do not fill words of {WORD} bits both ways"]
        return []

    def write(self, checkpoint: Source, place: Place) -> Written:
        """Repack the layers, one after the other, and write config.json and quantize_config.json."""
        written = write_layers(checkpoint, place, GPTQWords)
        quantization = _quantization(checkpoint)
        place.json("config.json", {**checkpoint.config, "quantization_config": quantization})
        place.json("quantize_config.json", quantization)
        return written

    def read_back(self, folder: Path, record: Mapping[str, Any]) -> dict[str, Any]:
        """By our reader, and by GPTQModel where it is installed."""
        return read_back(folder, record)


def _quantization(source: Source) -> dict[str, Any]:
    grid = grid_of(next(iter(stored_in(source).layers.values())))
    dense = [name for name in uncompressed(source) if name != HEAD]
    found: dict[str, Any] = {
        "quant_method": GPTQ,
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
