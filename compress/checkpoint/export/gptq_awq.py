"""The layouts of GPTQ checkpoints (format 1: AutoGPTQ's, which GPTQModel, ExLlama, vLLM, SGLang and others read) and of
AWQ checkpoints (version "gemm": AutoAWQ's, which vLLM, SGLang, TGI and others read).

`checkpoint.read.gptq_awq` has the tensors. GPTQ's zero points are stored less one, so 0 has no place: asymmetric codes
are refused. Scales may be negative in both.
"""

import re
from collections.abc import Mapping
from math import gcd
from typing import Any, ClassVar

import torch
from torch import Tensor

from compress.base.version import VERSION
from compress.checkpoint.export.exporter import Exporter, Written
from compress.checkpoint.export.integers import (
    Integers,
    grid_of,
    integers_of,
    uncompressed,
    why_not_integers,
    write_layers,
)
from compress.checkpoint.export.limits import LIMITS
from compress.checkpoint.export.place import Place
from compress.checkpoint.export.read_back import read_back
from compress.checkpoint.read.compressed_layers import stored_in
from compress.checkpoint.read.gptq_awq import LESS, groups_in_order, to_words
from compress.checkpoint.read.source import Source
from compress.kernels.layouts.words import WORD, pack_rows

HEAD = "lm_head"
FORMAT = "gptq"  # format 1


class GPTQLayout(Exporter):
    """Symmetric codes of 2, 3, 4 or 8 bits."""

    about = "GPTQ's layout (format 1), for GPTQModel, ExLlama, vLLM and other readers of it; symmetric codes"
    kind = "gptq"
    reads_back = True
    read_back = staticmethod(read_back)
    parts = 4  # tensors of a layer
    version: ClassVar[Mapping[str, str]] = {"checkpoint_format": FORMAT}

    def why_not(self, checkpoint: Source) -> list[str]:
        """Weight-only codes of one width and group size, whose sizes fill whole words."""
        if found := why_not_integers(checkpoint, LIMITS[self.kind]):
            return found
        for name, layer in stored_in(checkpoint).layers.items():
            unit = WORD // gcd(WORD, grid_of(layer).bits)
            if layer.shape[0] % unit:
                return [
                    f"{name} has {layer.shape[0]} outputs; allowed: multiples of {unit}, which fill words; leave that "
                    f"out, --ignore {name}"
                ]
        return []

    def write(self, checkpoint: Source, place: Place) -> Written:
        """Repack the layers, one after the other, and write config.json (of GPTQ also quantize_config.json)."""
        written = write_layers(checkpoint, place, lambda name: self.words(integers_of(checkpoint, name)), self.parts)
        grid = grid_of(next(iter(stored_in(checkpoint).layers.values())))
        numbers = {"bits": grid.bits, "group_size": grid.group_size or -1}
        quantization = {"quant_method": self.kind, **self.version, **numbers, **self.quantization(checkpoint)}
        place.json("config.json", {**checkpoint.config, "quantization_config": quantization})
        if self.kind == FORMAT:
            place.json("quantize_config.json", quantization)
        return written

    def words(self, held: Integers) -> dict[str, Tensor]:
        """The tensors of a layer."""
        return {
            "qweight": pack_rows(held.codes, held.bits, signed=False).t().contiguous(),
            "qzeros": pack_rows((held.zero - LESS[FORMAT]).t().contiguous(), held.bits, signed=False),
            "scales": held.scale.to(torch.float16).t().contiguous(),
            "g_idx": groups_in_order(held.codes.shape[1], held.scale.shape[1]),
        }

    def quantization(self, source: Source) -> dict[str, Any]:
        """The entries of the `quantization_config` behind the width and the size of groups."""
        dense = [name for name in uncompressed(source) if name != HEAD]
        return {
            "sym": True,
            "desc_act": False,
            "true_sequential": True,
            "lm_head": HEAD in stored_in(source).layers,
            "pack_dtype": "int32",
            "meta": {"quantizer": [f"compress:{VERSION}"]},
            **({"dynamic": {f"-:^{re.escape(name)}$": {} for name in dense}} if dense else {}),
        }


class AWQLayout(GPTQLayout):
    """Codes of 4 bits, symmetric or asymmetric."""

    about = "AWQ's layout (gemm), for vLLM, SGLang, TGI and other readers of it; codes of 4 bits"
    kind = "awq"
    parts = 3
    version: ClassVar[Mapping[str, str]] = {"version": "gemm"}

    def words(self, held: Integers) -> dict[str, Tensor]:
        return {
            "qweight": to_words(held.codes.t()),
            "qzeros": to_words(held.zero.t()),
            "scales": held.scale.to(torch.float16).t().contiguous(),
        }

    def quantization(self, source: Source) -> dict[str, Any]:
        return {"zero_point": True, "modules_to_not_convert": uncompressed(source)}
