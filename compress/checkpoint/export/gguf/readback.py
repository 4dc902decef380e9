"""Reads a GGUF file with gguf-py and compares its values with those that were decided."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import torch

from compress.base.errors import CheckpointError, InputError, first_line
from compress.base.schema import fits
from compress.checkpoint.files import RECORD, checksum
from compress.checkpoint.gguf.blocks import Q2_0
from compress.checkpoint.gguf.library import gguf, missing, reader


class WrittenFile(TypedDict):
    """The entry `gguf` of a record: the file's name, compressed layers, and {tensor: {type, dtype, sha256}}."""

    file: str
    layers: int
    tensors: dict[str, dict[str, str]]


def read_back(folder: Path, written: Mapping[str, Any]) -> dict[str, Any]:
    """Compare every tensor of a file with the record of its values.

    written: the entry `gguf` of the record. Returns {layers, reader, tensors, unread, remarks}: compressed
    layers and tensors that were compared, the package that read them, and {type: tensors} of types that it cannot
    dequantize. Raises
    CheckpointError, which names a tensor that differs, and InputError where the package is missing.
    """
    if (line := missing()) is not None:
        raise InputError(line)
    fits(written, WrittenFile, folder / RECORD)
    path, expected = folder / written["file"], written["tensors"]
    try:
        tensors = {tensor.name: tensor for tensor in gguf().GGUFReader(path).tensors}
    except (ValueError, IndexError, KeyError, OverflowError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read by {reader()}: {first_line(error)}") from None
    if names := sorted(expected.keys() ^ tensors.keys()):
        where = "is missing from" if names[0] in expected else "was not written, but is in"
        raise CheckpointError(f"{names[0]} {where} {path}; write it again")
    unread: dict[str, int] = {}
    for name, wanted in expected.items():
        tensor = tensors[name]
        if tensor.tensor_type.name != wanted["type"]:
            raise CheckpointError(f"{name} of {path} has the type {tensor.tensor_type.name}, not {wanted['type']}")
        try:
            if wanted["type"] == Q2_0.name:  # gguf-py 0.19.0 has no reader of it
                codes, scale = Q2_0.codes(torch.from_numpy(tensor.data.copy()))
                values = codes * scale.float().repeat_interleave(Q2_0.size, 1) + 0.0  # no zero has a sign
            else:
                values = torch.from_numpy(gguf().quants.dequantize(tensor.data, tensor.tensor_type).copy())
        except NotImplementedError:
            unread[wanted["type"]] = unread.get(wanted["type"], 0) + 1
            continue
        if checksum(values.to(getattr(torch, wanted["dtype"]))) != wanted["sha256"]:
            raise CheckpointError(f"{name} of {path}, as {reader()} reads it, is not what was decided; write it again")
    count = sum(unread.values())
    report = {"layers": written["layers"] - count, "reader": reader(), "tensors": len(expected) - count}
    return report | {"unread": unread, "remarks": [unread_line(kind, number) for kind, number in unread.items()]}


def unread_line(kind: str, count: int) -> str:
    """A line about tensors that the package cannot dequantize."""
    return f"{count} tensors of {kind} are not read back: {reader()} has no reader of that type"
