"""ModelOpt's layout, which TensorRT-LLM, vLLM and SGLang read: the inverse of `checkpoint.read.modelopt`.

    NVFP4, W4A16_NVFP4           weight uint8 [N, K/2], weight_scale e4m3 [N, K/16], weight_scale_2 = 1 / the global
                                 scale; input_scale = 1 / that of inputs
    FP8                          weight e4m3, weight_scale, input_scale
    FP8_PER_CHANNEL_PER_TOKEN    weight e4m3, weight_scale [N]
    MXFP8                        weight e4m3, weight_scale uint8 [N, K/32]

Codes stay as they are; numbers of one element are float32 []. Sources: Model-Optimizer@a2fbac7
(modelopt/torch/export/quant_utils.py, convert_hf_config.py), vLLM 0.32.0 (layers/quantization/modelopt.py).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.base.version import VERSION
from compress.checkpoint.export.exporter import Exporter, Written
from compress.checkpoint.export.integers import names_to_copy, uncompressed, why_no_tables
from compress.checkpoint.export.place import Place
from compress.checkpoint.export.read_back import read_by_us, summary
from compress.checkpoint.read.compressed_layers import StoredLayer, stored_in, weight_of
from compress.checkpoint.read.fused import LOADING, fusing, mixed_groups, naming, unlike_numbers
from compress.checkpoint.read.modelopt import BESIDE, GROUP, METHOD, MIXED, algorithm_of
from compress.checkpoint.read.source import Source
from compress.weights.formats.levels import NVFP4, ModelOptNVFP4
from compress.weights.grid import Quantized

NAMES = {"weight_packed": "weight", "weight_global_scale": "weight_scale_2", "input_global_scale": "input_scale"}
INVERTED = ("weight_scale_2", "input_scale")  # of NVFP4, where compressed-tensors has divisors
FIXED8 = {"dynamic": False, "num_bits": 8, "type": "float"}


class ModelOptLayout(Exporter):
    """NVFP4, float8 and MXFP8; layers may differ, but not within those of which engines make one."""

    about = "ModelOpt's layout, for TensorRT-LLM, vLLM and SGLang; nvfp4, fp8, mxfp8"
    kind = METHOD
    reads_back = True

    def why_not(self, checkpoint: Source) -> list[str]:
        """Layers of schemes that ModelOpt has, alike where engines fuse them, and caches of float8 per tensor."""
        if (checkpoint.quantization or {}).get("quant_method") == METHOD:
            return [f"it is in {METHOD}'s layout already"]
        stored = stored_in(checkpoint)
        if not stored.layers:
            return ["it holds no codes"]
        for name, layer in stored.layers.items():
            if algorithm_of(layer.scheme) is None:
                return [
                    f"{name} is stored as {layer.scheme}; {METHOD} has nvfp4, nvfp4a16, mxfp8, fp8, and fp8 with "
                    "per_tensor and activations=static"
                ]
        if (kind := checkpoint.config.get("model_type")) in LOADING["vLLM"].joined:
            return [f"readers pass over single experts of {kind}"]
        schemes = {name: layer.scheme for name, layer in stored.layers.items()}
        if groups := mixed_groups({**dict.fromkeys(uncompressed(checkpoint)), **schemes}):
            return [f"{fusing()} make one layer of {naming(groups[0])}, which differ; give all of them one scheme"]
        caches = stored.caches
        if caches is not None and (caches.scheme.number, caches.scheme.granularity) != ("fp8", "tensor"):
            return [
                f"keys and values are rounded ({caches.scheme}); {METHOD} has fp8 per tensor: --kv-cache fp8:tensor"
            ]
        return why_no_tables(checkpoint)

    def write(self, checkpoint: Source, place: Place) -> Written:
        """Write the layers, one after the other, config.json and hf_quant_config.json."""
        for line in unlike_numbers(checkpoint):
            place.note(line)
        stored, rest, values = stored_in(checkpoint), list(names_to_copy(checkpoint)), dict[str, str]()
        caches = {} if stored.caches is None else stored.caches.scales
        count = len(rest) + sum(len(_parts(layer)) for layer in stored.layers.values())
        place.tensors(_tensors(checkpoint, rest, values), count + sum(map(len, caches.values())))
        kinds = {name: _words(algorithm_of(layer.scheme) or "") for name, layer in stored.layers.items()}
        several = len({str(kind) for kind in kinds.values()}) > 1
        usual = {"quant_algo": MIXED, "quantized_layers": kinds} if several else next(iter(kinds.values()))
        dense, producer = uncompressed(checkpoint), {"producer": {"name": METHOD, "version": f"compress {VERSION}"}}
        words = {"kv_cache_quant_algo": "FP8"} if caches else {"kv_cache_quant_algo": None}
        place.json(BESIDE, {**producer, "quantization": {**usual, **words, "exclude_modules": dense}})
        cache = {"kv_cache_scheme": FIXED8} if caches else {}
        told = {"quant_method": METHOD, **usual, **cache, "ignore": dense, **producer}
        place.json("config.json", {**checkpoint.config, "quantization_config": told})
        return Written(len(stored.layers), {"values": values})

    def read_back(self, folder: Path, record: Mapping[str, Any]) -> dict[str, Any]:
        """By our reader of ModelOpt's checkpoints."""
        return {"layers": len(stored_in(read_by_us(folder, record)).layers), "reader": f"compress {VERSION}"}


def _words(algorithm: str) -> dict[str, Any]:
    """The entries of a configuration about layers of one algorithm."""
    return {"quant_algo": algorithm, **({"group_size": GROUP} if "NVFP4" in algorithm else {})}


def _parts(layer: StoredLayer) -> dict[str, str]:
    """{name in ModelOpt: name of the stored tensor} of a layer."""
    return {NAMES.get(part, part): name for part, name in layer.parts.items()}


def _tensors(source: Source, rest: list[str], values: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    """(Name, tensor) of everything to write. values: takes a summary of each layer's."""
    for name in rest:
        yield name, source.weights.tensor(name)
    stored = stored_in(source)
    for attention, held in ({} if stored.caches is None else stored.caches.scales).items():
        for part, (name, _) in held.items():
            yield f"{attention}.{part[0]}_proj.{part}", source.weights.tensor(name).float().reshape(())
    for layer, of in stored.layers.items():
        parts = {part: _converted(part, source.weights.tensor(name), of) for part, name in _parts(of).items()}
        (term,) = weight_of(source, layer).terms
        assert isinstance(term, Quantized)
        if isinstance(of.scheme.codes, NVFP4):
            known = ModelOptNVFP4(grid=ModelOptNVFP4.on)
            term = known.read({part: parts[part] for part in known.parts(*of.shape)}, *of.shape)
        values[layer] = summary(replace(term, scale=term.scale.float()).dequantize())
        yield from ((f"{layer}.{part}", tensor) for part, tensor in parts.items())


def _converted(part: str, tensor: Tensor, layer: StoredLayer) -> Tensor:
    """A tensor of a layer as ModelOpt has it."""
    if part in INVERTED and isinstance(layer.scheme.codes, NVFP4):
        return (1 / tensor.float()).reshape(())
    if part == "weight" or tensor.dtype in (torch.uint8, torch.float8_e4m3fn):
        return tensor
    return tensor.float().reshape(()) if tensor.numel() == 1 else tensor.float().flatten()
