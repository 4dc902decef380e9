"""Writes tensors to a safetensors file in pieces: beside the tensors themselves it takes memory for one piece."""

import hashlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from compress.base.errors import CompressError
from compress.checkpoint.read.weight_files import DTYPES
from compress.checkpoint.write.shards import Header, header

PIECE = 1 << 22  # numbers
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def write_tensors(path: Path, tensors: Mapping[str, Tensor], buffers: Collection[str]) -> dict[str, str]:
    """Write a file, which is on the disk when this returns; returns {tensor: SHA-256 of its bytes}. Raises
    CompressError for numbers that are not finite, except infinities in `buffers`; OSError where it cannot be written.
    """
    ordered = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    entries = [Header(n, NAMES[tensors[n].dtype], shapes[n], tensors[n].nbytes) for n in ordered]
    sums = {}
    with path.open("wb") as out:
        out.write(header(entries))
        for name in ordered:
            digest = hashlib.sha256()
            for piece in tensors[name].detach().cpu().contiguous().flatten().split(PIECE):
                check_finite(name, piece, infinities=name in buffers)
                # A copy: torch lets nobody resize what numpy has seen, as FSDP does with a gathered parameter.
                content = piece.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().data
                digest.update(content)
                out.write(content)
            sums[name] = digest.hexdigest()
        out.flush()
        os.fsync(out.fileno())
    return sums


def check_finite(name: str, tensor: Tensor, infinities: bool) -> None:
    """Raises CompressError for a tensor with numbers that are not finite. infinities: allow infinities."""
    if not tensor.is_floating_point():
        return
    wide = tensor.float() if tensor.itemsize == 1 else tensor  # float8 has few operators
    if bool(wide.isnan().any()) or not (infinities or bool(wide.isfinite().all())):
        raise CompressError(f"{name} is not made of finite numbers, so it is not written; the model is damaged")
