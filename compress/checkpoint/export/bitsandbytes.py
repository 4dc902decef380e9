"""The layout of bitsandbytes' NF4 checkpoints, which transformers and peft (QLoRA) load with bitsandbytes installed.

`checkpoint.read.bitsandbytes` has the tensors. Scales become float32 absmax, of which none is rounded again.
"""

import json
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.base.errors import CheckpointError
from compress.checkpoint.export.exporter import Exporter, Written
from compress.checkpoint.export.integers import names_to_copy, note_losses, uncompressed, why_no_tables
from compress.checkpoint.export.place import Place
from compress.checkpoint.export.read_back import read_by_us, reader_of, summary
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
        stored = stored_in(checkpoint)
        if not stored.layers:
            return ["it holds no codes"]
        if reasons := why_no_tables(checkpoint):
            return reasons
        for name, layer in stored.layers.items():
            if not isinstance(layer.scheme.codes, NF4):
                return [f"{name} is stored as {layer.scheme}; quantize with --scheme nf4a16"]
        if any(isinstance(module, Experts) for module in empty_model(checkpoint).modules()):
            return [f"its experts are one tensor in transformers, which {METHOD} leaves as they are"]
        return []

    def write(self, checkpoint: Source, place: Place) -> Written:
        """Repack the layers, one after the other, and write config.json."""
        note_losses(checkpoint, place)
        rest, layers = list(names_to_copy(checkpoint)), stored_in(checkpoint).layers
        values: dict[str, str] = {}
        place.tensors(_tensors(checkpoint, rest, values), len(rest) + len(PARTS) * len(layers))
        dtype = _word(read_config(checkpoint).dtype)
        quantization = {
            "quant_method": METHOD,
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": KIND,
            "bnb_4bit_use_double_quant": False,
            "bnb_4bit_compute_dtype": dtype,
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": uncompressed(checkpoint),
        }
        place.json("config.json", {**checkpoint.config, "quantization_config": quantization})
        return Written(len(layers), {"values": values})

    def read_back(self, folder: Path, record: Mapping[str, Any]) -> dict[str, Any]:
        """By our reader, and by bitsandbytes where it is installed."""
        source = read_by_us(folder, record)
        layers = stored_in(source).layers
        for name in layers if find_spec(METHOD) else ():
            theirs, ours = _by_bitsandbytes(source, name), weight_of(source, name).dequantize()
            if not torch.equal(theirs, ours.to(theirs.dtype)):
                raise CheckpointError(f"{name} of {folder}, as {METHOD} reads it, is not what was decided")
        return {"layers": len(layers), "reader": reader_of(METHOD)}


def _tensors(source: Source, rest: list[str], values: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    """(Name, tensor) of everything to write. values: takes a summary of each layer's."""
    for name in rest:
        yield name, source.weights.tensor(name)
    model = read_config(source).dtype or torch.float32
    for name, layer in stored_in(source).layers.items():
        held = layer.read(source)
        values[name] = summary(weight_of(source, name, model).dequantize().to(model))
        state = {"quant_type": KIND, "blocksize": GROUP, "dtype": _word(model), "shape": list(layer.shape)}
        parts = (
            exchange_halves(held["weight_packed"]).view(-1, 1),
            held["weight_scale"].to(torch.float32).flatten(),
            torch.tensor(levels.NF4.values),
            torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
        )
        yield from ((f"{name}.weight{ending}", part) for ending, part in zip(PARTS, parts, strict=True))


def _by_bitsandbytes(source: Source, name: str) -> Tensor:
    """The weight of a layer of an export, as bitsandbytes computes it."""
    from bitsandbytes.functional import QuantState, dequantize_4bit

    held = {ending: source.weights.stored_tensor(f"{name}.weight{ending}") for ending in PARTS}
    packed = held.pop("")
    state = QuantState.from_dict({f"weight{ending}": part for ending, part in held.items()}, device="cpu")
    found: Tensor = dequantize_4bit(packed, state)
    return found


def _word(dtype: torch.dtype | None) -> str:
    return str(dtype or torch.float32).removeprefix("torch.")
