"""Reads the configuration of NVFP4 and float8 checkpoints that NVIDIA's ModelOpt writes.

    {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, ...}     in config.json, or
    {"quantization": {"quant_algo": "NVFP4", ...}}                                 in hf_quant_config.json alone

Algorithms are NVFP4 and W4A16_NVFP4, FP8 (one scale per tensor, for the input, too), FP8_PER_CHANNEL_PER_TOKEN, MXFP8,
and MIXED_PRECISION, which has layers of several. Tensors are those of `weights.formats.levels.ModelOptNVFP4`, of MXFP8
and of float8 rows, whose scales of outputs are [N]. A layer counts as compressed where the
checkpoint holds its `weight_scale`; the lists of modules are ignored. Scales of a float8 key-value cache, which lie in
the layers that make keys and values, are shown where compressed-tensors has them, in the attention:

    self_attn.k_proj.k_scale []    ->    self_attn.k_scale [1]
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from compress.base.errors import CheckpointError
from compress.checkpoint.files import read_json
from compress.checkpoint.read.configuration import Header
from compress.checkpoint.read.views import ViewedFiles, reshape
from compress.checkpoint.read.weight_files import WeightFiles
from compress.weights.compressed_tensors import cache_entry
from compress.weights.formats.codes import Float8Rows
from compress.weights.formats.levels import MXFP8, NVFP4, ModelOptNVFP4
from compress.weights.grid import Grid
from compress.weights.kv_cache_codes import SCALES, CacheScheme
from compress.weights.scheme import Scheme

METHOD = "modelopt"
BESIDE, SCALE = "hf_quant_config.json", ".weight_scale"
GROUP = ModelOptNVFP4.on.group_size
MIXED = "MIXED_PRECISION"
ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8", MIXED)
WITHOUT_GROUPS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "MXFP8")
CACHES = ("FP8",)
FLOAT8 = Grid(bits=8, type="float", granularity="tensor")
ROWS8, TOKENS8 = replace(FLOAT8, granularity="channel"), replace(FLOAT8, granularity="token")


def beside(folder: Path) -> dict[str, Any] | None:
    """The quantization_config that `hf_quant_config.json` in a folder stands for; None where there is none. Raises
    CheckpointError for a file that holds no algorithm."""
    path = folder / BESIDE
    if not path.is_file():
        return None
    found = read_json(path)
    told = found.get("quantization") if isinstance(found, dict) else None
    if not isinstance(told, dict) or not isinstance(told.get("quant_algo"), str | None):
        raise CheckpointError(f"{path} has no quantization with a quant_algo")
    return {"quant_method": METHOD, **told} if told.get("quant_algo") or told.get("kv_cache_quant_algo") else None


def view(files: WeightFiles, quantization: Mapping[str, Any], where: Path) -> tuple[WeightFiles, dict[str, Any]]:
    """(Files with scales of key-value caches where compressed-tensors has them, the configuration that says so). Raises
    CheckpointError, which names `where`, for another algorithm, group size or cache."""
    config = dict(quantization)
    algorithm, size = config.get("quant_algo"), config.get("group_size") or GROUP
    if algorithm not in ALGORITHMS or (algorithm not in WITHOUT_GROUPS and size != GROUP):
        raise CheckpointError(
            f"{where} is quantized as {METHOD} {algorithm} in groups of {size}; readable: {', '.join(ALGORITHMS)}, "
            f"NVFP4 in groups of {GROUP}"
        )
    entry, name = config.pop("kv_cache_scheme", None), config.pop("kv_cache_quant_algo", None)
    of_rows = {n: (shape[0], 1) for n, (shape, _) in files.headers.items() if n.endswith(SCALE) and len(shape) == 1}
    files = ViewedFiles(files, (), {n: reshape(files, n, shape) for n, shape in of_rows.items() if shape[0] > 1})
    if not entry and not name:
        return files, config
    fixed = {"num_bits": 8, "type": "float", "dynamic": False}
    if (entry and any(entry.get(key, value) != value for key, value in fixed.items())) or name not in (None, *CACHES):
        raise CheckpointError(f"{where} rounds its key-value cache ({name or entry}); readable: {', '.join(CACHES)}")
    config["kv_cache_scheme"] = cache_entry(CacheScheme(type="float", granularity="tensor"), None)
    moved: dict[str, str] = {}
    for each in files:
        layer, _, part = each.rpartition(".")
        attention, _, leaf = layer.rpartition(".")
        if part in SCALES and leaf.endswith("_proj"):
            moved[f"{attention}.{part}"] = each
    views = {own: reshape(files, stored, (1,)) for own, stored in moved.items()}
    return ViewedFiles(files, moved.values(), views), config


def scheme_of(layer: str, tensors: Mapping[str, Header]) -> Scheme:
    """The scheme of a layer of a checkpoint with these tensors. Inputs are rounded where it holds their scale."""
    _, dtype = tensors.get(f"{layer}.weight", ((), ""))
    if dtype == "F8_E4M3":
        shape, scales = tensors.get(f"{layer}.weight_scale", ((), ""))
        if scales == "U8":
            return Scheme(terms=(MXFP8(grid=MXFP8.on),), inputs=MXFP8.on)
        if prod(shape) > 1:
            return Scheme(terms=(Float8Rows(grid=ROWS8),), inputs=TOKENS8)
        return Scheme(terms=(Float8Rows(grid=FLOAT8),), inputs=FLOAT8, dynamic=False)
    term = ModelOptNVFP4(grid=ModelOptNVFP4.on)
    return Scheme(terms=(term,), inputs=term.on if f"{layer}.{term.of_inputs}" in tensors else None)


def algorithm_of(scheme: Scheme) -> str | None:
    """The word for layers of a scheme; None where there is none."""
    (term, *others), inputs = scheme.terms, scheme.inputs
    if others or scheme.outputs is not None or scheme.rotation is not None:
        return None
    if isinstance(term, NVFP4) and inputs in (None, NVFP4.on):
        return "W4A16_NVFP4" if inputs is None else "NVFP4"
    if isinstance(term, MXFP8) and inputs == MXFP8.on:
        return "MXFP8"
    if not isinstance(term, Float8Rows):
        return None
    known: dict[tuple[Grid, Grid | None, bool], str] = {
        (FLOAT8, FLOAT8, False): "FP8",
        (ROWS8, TOKENS8, True): "FP8_PER_CHANNEL_PER_TOKEN",
    }
    return known.get((term.grid, inputs, scheme.dynamic))
