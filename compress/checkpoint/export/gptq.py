"""The layout of GPTQ checkpoints, format 1: AutoGPTQ's, which GPTQModel, ExLlama, vLLM, SGLang and others read.

`checkpoint.read.gptq_awq` has the tensors. Zero points are stored less one, so 0 has no place: asymmetric codes are
refused. Scales may be negative.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from compress.base.version import VERSION
from compress.checkpoint.export.exporter import Exporter, Written
from compress.checkpoint.export.integers import Integers, grid_of, uncompressed, why_not_integers, write_layers
from compress.checkpoint.export.limits import LIMITS
from compress.checkpoint.export.place import Place
from compress.checkpoint.export.read_back import read_back
from compress.checkpoint.read.compressed_layers import stored_in
from compress.checkpoint.read.configuration import GPTQ
from compress.checkpoint.read.gptq_awq import LESS, groups_in_order
from compress.checkpoint.read.source import Source
from compress.kernels.layouts.words import WORD, pack_rows

HEAD = "lm_head"
FORMAT = "gptq"  # format 1


class GPTQLayout(Exporter):
    """Symmetric codes of 2, 3, 4 or 8 bits."""

    about = "GPTQ's layout (format 1), for GPTQModel, ExLlama, vLLM and other readers of it; symmetric codes"
    kind = "gptq"
    reads_back = True

    def why_not(self, checkpoint: Source) -> list[str]:
        """Weight-only codes, symmetric, of one width and group size, whose sizes fill whole words."""
        if found := why_not_integers(checkpoint, LIMITS["gptq"]):
            return found
        for name, layer in stored_in(checkpoint).layers.items():
            rows, columns = layer.shape
            if rows * grid_of(layer).bits % WORD:
                return [f"{name} is [{rows}, {columns}], and its codes do not fill words of {WORD} bits both ways"]
        return []

    def write(self, checkpoint: Source, place: Place) -> Written:
        """Repack the layers, one after the other, and write config.json and quantize_config.json."""
        written = write_layers(checkpoint, place, _words, 4)
        quantization = _quantization(checkpoint)
        place.json("config.json", {**checkpoint.config, "quantization_config": quantization})
        place.json("quantize_config.json", quantization)
        return written

    def read_back(self, folder: Path, record: Mapping[str, Any]) -> dict[str, Any]:
        """By our reader, and by GPTQModel where it is installed."""
        return read_back(folder, record)


def _words(held: Integers, bits: int) -> dict[str, Tensor]:
    return {
        "qweight": pack_rows(held.codes, bits, signed=False).t().contiguous(),
        "qzeros": pack_rows((held.zero - LESS[FORMAT]).t().contiguous(), bits, signed=False),
        "scales": held.scale.t().contiguous(),
        "g_idx": groups_in_order(held.codes.shape[1], held.scale.shape[1]),
    }


def _quantization(source: Source) -> dict[str, Any]:
    grid = grid_of(next(iter(stored_in(source).layers.values())))
    dense = [name for name in uncompressed(source) if name != HEAD]
    found: dict[str, Any] = {
        "quant_method": GPTQ,
        "checkpoint_format": FORMAT,
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
