"""The dtype of a model whose configuration says a wider one than its files hold."""

import torch

from compress.checkpoint.read.source import Source
from compress.checkpoint.read.weight_files import DTYPES

DTYPE_KEYS = ("dtype", "torch_dtype")  # in config.json; the second one of transformers before 5


def narrower(source: Source) -> torch.dtype | None:
    """The one dtype of all floats of an uncompressed model's files, where the configuration says a wider one; None
    elsewhere. What stays dense would take more bytes in that, and have no more digits."""
    said = getattr(torch, str(next((source.config[key] for key in DTYPE_KEYS if key in source.config), None)), None)
    held = {DTYPES[dtype] for _, dtype in source.headers.values() if dtype in DTYPES}
    floats = [dtype for dtype in held if dtype.is_floating_point]
    if source.quantization is not None or not isinstance(said, torch.dtype) or len(floats) != 1:
        return None
    return floats[0] if 1 < floats[0].itemsize < said.itemsize else None
