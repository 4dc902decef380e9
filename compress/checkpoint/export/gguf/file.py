"""Writes a GGUF file by gguf-py, one tensor after the other."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compress.checkpoint.export.place import Place
from compress.checkpoint.files import checksum
from compress.checkpoint.gguf.blocks import Q2_0
from compress.checkpoint.gguf.library import gguf

FILE = "model.gguf"
FLOATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class Entry:
    """A tensor of a file. type: its name in ggml. shape: rows first; of blocks, their bytes in the place of the inputs.
    of: its name in the checkpoint. data: makes what is written, values: what it is to stand for."""

    name: str
    type: str
    shape: tuple[int, ...]
    nbytes: int
    of: str
    data: Callable[[], Tensor]
    values: Callable[[], Tensor]


def write_file(
    place: Place, family: str, fill: Callable[[Any], None], entries: Sequence[Entry]
) -> dict[str, dict[str, str]]:
    """Write a file. fill: adds the metadata to a writer of gguf-py. Returns {tensor: its type, and the dtype and
    SHA-256 of its values}."""
    writer = gguf().GGUFWriter(place.file(FILE), family)
    fill(writer)
    kinds = gguf().GGMLQuantizationType
    for entry in entries:
        of_bytes = np.dtype(np.float32 if entry.type in FLOATS.values() else np.uint8)
        writer.add_tensor_info(entry.name, entry.shape, of_bytes, entry.nbytes, raw_dtype=kinds[entry.type])
    records = {}
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for i, entry in enumerate(entries, 1):
            writer.write_tensor_data(_array(entry.data()))
            values = as_read(entry.values(), entry.type)
            dtype = str(values.dtype).removeprefix("torch.")
            records[entry.name] = {"type": entry.type, "dtype": dtype, "sha256": checksum(values)}
            place.step(i, len(entries), entry.of)
    finally:
        writer.close()
    return records


def as_read(values: Tensor, kind: str) -> Tensor:
    """Values as a file of this type has them: in Q2_0 no zero has a sign."""
    return values + 0.0 if kind == Q2_0.name else values


def add_all(writer: Any, metadata: Mapping[str, Any]) -> None:
    """Add keys to a file, by the types of their values."""
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)


def _array(data: Tensor) -> np.ndarray[Any, Any]:
    """The bytes of a tensor; bfloat16 has no type in numpy."""
    data = data.contiguous()
    return (data.view(torch.int16) if data.dtype == torch.bfloat16 else data).numpy()
