"""Reads schemes from the `fp8` configuration of transformers, in which DeepSeek-V3 and later models are published.

    {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
     "modules_to_not_convert": [...]}

A layer counts as compressed where the checkpoint holds its `weight_scale_inv`; the lists of modules are ignored. With
`"scale_fmt": "ue8m0"` (DeepSeek-V3.1), scales are powers of two, of inputs too: no layer here rounds these so.
"""

from collections.abc import Mapping
from typing import Any

from compress.base.errors import CheckpointError
from compress.kernels.layouts.scale_blocks import WEIGHT_BLOCK
from compress.weights.formats.codes import FineGrained
from compress.weights.scheme import Scheme, block_scheme

METHOD = "fp8"
# The readable values of each key; a key that is missing or null has the first.
READABLE: Mapping[str, tuple[Any, ...]] = {
    "fmt": ("e4m3",),
    "activation_scheme": ("dynamic",),
    "scale_fmt": ("float", "ue8m0"),
    "dequantize": (False,),
}
# Keys that name layers; the tensors show the same.
OF_MODULES = {"quant_method", "modules_to_not_convert", "ignored_layers", "expert_dtype"}


def read_fine_grained(quantization: Mapping[str, Any], where: object) -> Scheme:
    """The scheme of all compressed layers. Raises CheckpointError, which names `where`, for unreadable schemes: inputs
    of a fixed range, other blocks, one scale per tensor."""
    given = {key: value for key, value in quantization.items() if key not in OF_MODULES and value is not None}
    if given.pop("weight_block_size", None) != list(WEIGHT_BLOCK):
        size = quantization.get("weight_block_size")
        raise CheckpointError(f"{where} has fp8 weights in blocks of {size}; readable: {list(WEIGHT_BLOCK)}")
    for key, value in given.items():
        if key not in READABLE:
            raise CheckpointError(f"{where} has fp8 weights with {key} {value!r}, which is not known")
        if value not in READABLE[key]:
            allowed = ", ".join(map(repr, READABLE[key]))
            raise CheckpointError(f"{where} has fp8 weights with {key} {value!r}; readable: {allowed}")
    return block_scheme(FineGrained)


def check_runs(quantization: Mapping[str, Any] | None, where: object) -> None:
    """Raises CheckpointError for inputs that are rounded as no layer here rounds them."""
    if (quantization or {}).get("scale_fmt", "float") != "float":
        raise CheckpointError(
            f"{where} rounds inputs with scales that are powers of two (scale_fmt 'ue8m0'), which no layer here does; "
            "quantize it: that begins with its weights, and leaves inputs as they are"
        )
