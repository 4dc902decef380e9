"""Reads a GGUF file with gguf-py and compares its values with those that were decided."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import torch

from compress.base.errors import CheckpointError, InputError
from compress.base.schema import fits
from compress.checkpoint.files import RECORD, checksum
from compress.checkpoint.gguf.library import missing, reader
from compress.checkpoint.read.gguf import GGUFFiles


class WrittenFile(TypedDict):
    """The entry `gguf` of a record: the file's name, compressed layers, and {tensor: {type, dtype, sha256}}."""

    file: str
    layers: int
    tensors: dict[str, dict[str, str]]


def read_back(folder: Path, written: Mapping[str, Any]) -> dict[str, Any]:
    """Compare every tensor of a file with the record of its values.

    written: the entry `gguf` of the record. Returns {layers, reader, tensors, unread, remarks}: compressed layers and
    tensors that were compared, the package that read them, and {type: tensors} of types that it cannot dequantize.
    Raises CheckpointError, which names a tensor that differs, and InputError where the package is missing.
    """
    if (line := missing()) is not None:
        raise InputError(line)
    fits(written, WrittenFile, folder / RECORD)
    path, expected = folder / written["file"], written["tensors"]
    files = GGUFFiles(path)
    if names := sorted(expected.keys() ^ files.keys()):
        where = "is missing from" if names[0] in expected else "was not written, but is in"
        raise CheckpointError(f"{names[0]} {where} {path}; write it again")
    unread: dict[str, int] = {}
    for name, wanted in expected.items():
        if (kind := files.kinds[name]) != wanted["type"]:
            raise CheckpointError(f"{name} of {path} has the type {kind}, not {wanted['type']}")
        try:
            values = files.dequantized(name)
        except NotImplementedError:
            unread[wanted["type"]] = unread.get(wanted["type"], 0) + 1
            continue
        if checksum(values.to(getattr(torch, wanted["dtype"]))) != wanted["sha256"]:
            raise CheckpointError(f"{name} of {path}, as {reader()} reads it, is not what was decided; write it again")
    count = sum(unread.values())
    remarks = [f"{n} tensors of {kind} are not read back: {reader()} has no reader of it" for kind, n in unread.items()]
    report = {"layers": written["layers"] - count, "reader": reader(), "tensors": len(expected) - count}
    return report | {"unread": unread, "remarks": remarks}
