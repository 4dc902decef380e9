"""Schemes in the words of transformers' `fp8`, in which DeepSeek-V3 and others after it are published.

    {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
     "modules_to_not_convert": [...]}

A layer is compressed where the checkpoint has `weight_scale_inv` of it, whatever the lists of modules say.
"""

from collections.abc import Mapping
from typing import Any

from compress.errors import CheckpointError
from compress.kernels.layouts.scale_blocks import WEIGHT_BLOCK
from compress.weights.formats.codes import FineGrained
from compress.weights.scheme import Scheme, block_scheme

METHOD = "fp8"
# What each word has to say to be read; one that is not there, or null, says the first.
READABLE: Mapping[str, tuple[Any, ...]] = {
    "fmt": ("e4m3",),
    "activation_scheme": ("dynamic",),
    "scale_fmt": ("float",),
    "dequantize": (False,),
}
# Which layers it is about, which the tensors say, too.
OF_MODULES = {"quant_method", "modules_to_not_convert", "ignored_layers", "expert_dtype"}


def read_fine_grained(quantization: Mapping[str, Any], where: object) -> Scheme:
    """The scheme of all compressed layers. Raises CheckpointError, naming `where`, for what cannot be read: inputs of a
    fixed range, scales that are powers of two (those of their inputs are, too), other blocks, one scale per tensor."""
    given = {key: value for key, value in quantization.items() if key not in OF_MODULES and value is not None}
    if given.pop("weight_block_size", None) != list(WEIGHT_BLOCK):
        size = quantization.get("weight_block_size")
        raise CheckpointError(f"{where} has fp8 weights in blocks of {size}; readable: {list(WEIGHT_BLOCK)}")
    for key, value in given.items():
        if key not in READABLE:
            raise CheckpointError(f"{where} has fp8 weights with {key} {value!r}, which is not known")
        if value not in READABLE[key]:
            raise CheckpointError(f"{where} has fp8 weights with {key} {value!r}; readable: {READABLE[key][0]!r}")
    return block_scheme(FineGrained)
