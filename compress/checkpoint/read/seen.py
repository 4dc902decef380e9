"""Checkpoints of others in our words: their tensors under names and in layouts that a reader here knows."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from compress.checkpoint.read import bitsandbytes, gpt_oss, modelopt, narrow_bytes
from compress.checkpoint.read.configuration import METHOD as COMPRESSED_TENSORS
from compress.checkpoint.read.weight_files import WeightFiles

Seen = Callable[[WeightFiles, Mapping[str, Any], Path], tuple[WeightFiles, dict[str, Any]]]
METHODS: dict[Any, Seen] = {
    COMPRESSED_TENSORS: narrow_bytes.seen,
    gpt_oss.METHOD: gpt_oss.seen,
    bitsandbytes.METHOD: bitsandbytes.seen,
    modelopt.METHOD: modelopt.seen,
}


def in_our_words(files: WeightFiles, config: dict[str, Any], folder: Path) -> tuple[WeightFiles, dict[str, Any]]:
    """(Weight files, configuration) of a checkpoint, as our readers take them; as they are, where nothing has to be
    translated. Raises CheckpointError for a checkpoint of a known method that is damaged or cannot be read."""
    quantization = config.get("quantization_config") or modelopt.beside(folder)
    method = METHODS.get((quantization or {}).get("quant_method"))
    if quantization is None or method is None:
        return files, config
    found, told = method(files, quantization, folder)
    return found, {**config, "quantization_config": told}
