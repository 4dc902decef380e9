"""ModelOpt's layout, which TensorRT-LLM, vLLM and SGLang read: the inverse of `checkpoint.read.modelopt`.

    NVFP4, W4A16_NVFP4           weight uint8 [N, K/2], weight_scale e4m3 [N, K/16], weight_scale_2 = 1 / the global
                                 scale; input_scale = 1 / that of inputs
    FP8                          weight e4m3, weight_scale, input_scale
    FP8_PER_CHANNEL_PER_TOKEN    weight e4m3, weight_scale [N]
    MXFP8                        weight e4m3, weight_scale uint8 [N, K/32]

Codes stay as they are; numbers of one element are float32 []. Sources: Model-Optimizer@a2fbac7
(modelopt/torch/export/quant_utils.py, convert_hf_config.py), vLLM 0.32.0 (layers/quantization/modelopt.py).
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.base.version import VERSION
from compress.checkpoint.export.exporter import Exporter, Written
from compress.checkpoint.export.integers import uncompressed, why_no_linear_codes, write_layers
from compress.checkpoint.export.place import Place
from compress.checkpoint.export.read_back import read_by_us
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
        if reasons := why_no_linear_codes(checkpoint):
            return reasons
        stored = stored_in(checkpoint)
        for name, layer in stored.layers.items():
            if algorithm_of(layer.scheme) is None:
                return [
                    f"{name} is stored as {layer.scheme}; {METHOD} has nvfp4, nvfp4a16, mxfp8, fp8, and fp8 with "
                    "per_tensor and activations=static"
                ]
        if (kind := checkpoint.config.get("model_type")) in LOADING["vLLM"].joined:
            return [f"readers pass over single experts of {kind}; `--to dense` takes it"]
        schemes = {name: layer.scheme for name, layer in stored.layers.items()}
        if groups := mixed_groups({**dict.fromkeys(uncompressed(checkpoint)), **schemes}):
            return [f"{fusing()} make one layer of {naming(groups[0])}, which differ; give all of them one scheme"]
        caches = stored.caches
        if caches is not None and (caches.scheme.number, caches.scheme.granularity) != ("fp8", "tensor"):
            return [
                f"keys and values are rounded ({caches.scheme}); {METHOD} has fp8 per tensor: --kv-cache fp8:tensor"
            ]
        return []

    def write(self, checkpoint: Source, place: Place) -> Written:
        """Write the layers, one after the other, config.json and hf_quant_config.json."""
        for line in unlike_numbers(checkpoint):
            place.note(line)
        stored, parts, values = stored_in(checkpoint), partial(_parts, checkpoint), partial(_values, checkpoint)
        caches = {
            f"{attention}.{part[0]}_proj.{part}": checkpoint.weights.tensor(name).float().reshape(())
            for attention, held in ({} if stored.caches is None else stored.caches.scales).items()
            for part, (name, _) in held.items()
        }
        written = write_layers(checkpoint, place, parts, values_of=values, caches=caches)
        kinds = {name: _words(algorithm_of(layer.scheme) or "") for name, layer in stored.layers.items()}
        several = len({str(kind) for kind in kinds.values()}) > 1
        usual = {"quant_algo": MIXED, "quantized_layers": kinds} if several else next(iter(kinds.values()))
        dense, producer = uncompressed(checkpoint), {"producer": {"name": METHOD, "version": f"compress {VERSION}"}}
        words = {"kv_cache_quant_algo": "FP8"} if caches else {"kv_cache_quant_algo": None}
        place.json(BESIDE, {**producer, "quantization": {**usual, **words, "exclude_modules": dense}})
        cache = {"kv_cache_scheme": FIXED8} if caches else {}
        told = {"quant_method": METHOD, **usual, **cache, "ignore": dense, **producer}
        place.json("config.json", {**checkpoint.config, "quantization_config": told})
        return written

    def read_back(self, folder: Path, record: Mapping[str, Any]) -> dict[str, Any]:
        """By our reader of ModelOpt's checkpoints."""
        return {"layers": len(stored_in(read_by_us(folder, record)).layers), "reader": f"compress {VERSION}"}


def _words(algorithm: str) -> dict[str, Any]:
    """The entries of a configuration about layers of one algorithm."""
    return {"quant_algo": algorithm, **({"group_size": GROUP} if "NVFP4" in algorithm else {})}


def _parts(source: Source, name: str) -> dict[str, Tensor]:
    """The tensors of a layer."""
    layer = stored_in(source).layers[name]
    held = {NAMES.get(part, part): source.weights.tensor(each) for part, each in layer.parts.items()}
    return {part: _converted(part, tensor, layer) for part, tensor in held.items()}


def _values(source: Source, name: str) -> Tensor:
    """The values that the tensors of a layer stand for."""
    (term,), layer = weight_of(source, name).terms, stored_in(source).layers[name]
    assert isinstance(term, Quantized)
    if isinstance(layer.scheme.codes, NVFP4):
        known, parts = ModelOptNVFP4(grid=ModelOptNVFP4.on), _parts(source, name)
        term = known.read({part: parts[part] for part in known.parts(*layer.shape)}, *layer.shape)
    return replace(term, scale=term.scale.float()).dequantize()


def _converted(part: str, tensor: Tensor, layer: StoredLayer) -> Tensor:
    """A tensor of a layer as ModelOpt has it."""
    if part in INVERTED and isinstance(layer.scheme.codes, NVFP4):
        return (1 / tensor.float()).reshape(())
    if part == "weight" or tensor.dtype in (torch.uint8, torch.float8_e4m3fn):
        return tensor
    return tensor.float().reshape(()) if tensor.numel() == 1 else tensor.float().flatten()
