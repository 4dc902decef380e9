"""Reads the configuration of NVFP4 checkpoints that NVIDIA's ModelOpt writes.

    {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, ...}

Tensors are those of `weights.formats.levels.ModelOptNVFP4`. A layer counts as compressed where the checkpoint holds its
`weight_scale`; the lists of modules are ignored.
"""

from collections.abc import Collection, Mapping
from typing import Any

from compress.errors import CheckpointError
from compress.weights.formats.levels import ModelOptNVFP4
from compress.weights.scheme import Scheme

METHOD = "modelopt"
ALGORITHM, GROUP = "NVFP4", ModelOptNVFP4.on.group_size


def read_modelopt(quantization: Mapping[str, Any], where: object) -> None:
    """Raises CheckpointError, which names `where`, for another format than NVFP4 in groups of 16, and for rounded
    key-value caches."""
    algorithm, size = quantization.get("quant_algo"), quantization.get("group_size", GROUP)
    if algorithm != ALGORITHM or size != GROUP:
        raise CheckpointError(
            f"{where} is quantized as {METHOD} {algorithm} in groups of {size}; readable: {ALGORITHM} in groups of "
            f"{GROUP}"
        )
    cache = quantization.get("kv_cache_scheme") or quantization.get("kv_cache_quant_algo")
    if cache:
        raise CheckpointError(f"{where} rounds its key-value cache ({cache}), which cannot be read from {METHOD}")


def scheme_of(layer: str, tensors: Collection[str]) -> Scheme:
    """The scheme of a layer of a checkpoint with these tensors. Inputs are rounded where it holds their scale."""
    term = ModelOptNVFP4(grid=ModelOptNVFP4.on)
    return Scheme(terms=(term,), inputs=term.on if f"{layer}.{term.of_inputs}" in tensors else None)
