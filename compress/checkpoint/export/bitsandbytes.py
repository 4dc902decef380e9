"""The layout of bitsandbytes' NF4 checkpoints, which transformers and peft (QLoRA) load with bitsandbytes installed.

`checkpoint.read.bitsandbytes` has the tensors. Scales become float32 absmax, of which none is rounded again.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.export.exporter import Exporter, Written
from compress.checkpoint.export.integers import uncompressed, why_no_linear_codes, write_layers
from compress.checkpoint.export.place import Place
from compress.checkpoint.export.read_back import read_by_package
from compress.checkpoint.read.bitsandbytes import GROUP, KIND, METHOD, STATE, exchange_halves
from compress.checkpoint.read.compressed_layers import stored_in, weight_of
from compress.checkpoint.read.pretrained import empty_model, read_config
from compress.checkpoint.read.source import Source
from compress.model.experts import Experts
from compress.weights import levels
from compress.weights.formats.levels import NF4

PARTS = ("", ".absmax", ".quant_map", f"{STATE}{KIND}")


class BitsandbytesLayout(Exporter):
    """Layers of NF4 alone."""

    about = "bitsandbytes' NF4 layout, for transformers and peft with bitsandbytes installed; codes of nf4a16"
    kind = "bitsandbytes"
    reads_back = True

    def why_not(self, checkpoint: Source) -> list[str]:
        """NF4 in linear layers that are no experts, inputs not rounded."""
        if reasons := why_no_linear_codes(checkpoint):
            return reasons
        for name, layer in stored_in(checkpoint).layers.items():
            if not isinstance(layer.scheme.codes, NF4):
                return [f"{name} is stored as {layer.scheme}; quantize with --scheme nf4a16"]
        if any(isinstance(module, Experts) for module in empty_model(checkpoint).modules()):
            return [
                f"its experts are one tensor in transformers, which {METHOD} leaves as they are; `--to dense` takes it"
            ]
        return []

    def write(self, checkpoint: Source, place: Place) -> Written:
        """Repack the layers, one after the other, and write config.json."""
        dtype = read_config(checkpoint).dtype or torch.float32
        word = str(dtype).removeprefix("torch.")

        def values(name: str) -> Tensor:
            return weight_of(checkpoint, name, dtype).dequantize().to(dtype)

        written = write_layers(checkpoint, place, partial(_parts, checkpoint, word), len(PARTS), values)
        quantization = {
            "quant_method": METHOD,
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": KIND,
            "bnb_4bit_use_double_quant": False,
            "bnb_4bit_compute_dtype": word,
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": uncompressed(checkpoint),
        }
        place.json("config.json", {**checkpoint.config, "quantization_config": quantization})
        return written

    def read_back(self, folder: Path, record: Mapping[str, Any]) -> dict[str, Any]:
        """By our reader, and by bitsandbytes where it is installed."""
        return read_by_package(folder, record, METHOD, _differs)


def _parts(source: Source, dtype: str, name: str) -> dict[str, Tensor]:
    """The tensors of a layer. dtype: of the model."""
    layer = stored_in(source).layers[name]
    held = layer.read(source)
    state = {"quant_type": KIND, "blocksize": GROUP, "dtype": dtype, "shape": list(layer.shape)}
    parts = (
        exchange_halves(held["weight_packed"]).view(-1, 1),
        held["weight_scale"].to(torch.float32).flatten(),
        torch.tensor(levels.NF4.values),
        torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    )
    return {f"weight{ending}": part for ending, part in zip(PARTS, parts, strict=True)}


def _differs(source: Source, name: str) -> bool:
    """True where bitsandbytes computes another weight for a layer of an export than we do."""
    from bitsandbytes.functional import QuantState, dequantize_4bit

    held = {ending: source.weights.stored_tensor(f"{name}.weight{ending}") for ending in PARTS}
    packed = held.pop("")
    state = QuantState.from_dict({f"weight{ending}": part for ending, part in held.items()}, device="cpu")
    found = dequantize_4bit(packed, state)
    return not torch.equal(found, weight_of(source, name).dequantize().to(found.dtype))
