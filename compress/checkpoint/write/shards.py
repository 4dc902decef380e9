"""Writes the files of blocks, and from these the weight files of a finished checkpoint, byte by byte.

A safetensors file is the length of its header (8 bytes, little-endian), the header (JSON: name -> dtype, shape, begin
and end of the data) and the data, without holes. Here tensors of wide numbers come first, so that every tensor begins
at a multiple of its numbers' width, as readers that map files need.

From blocks to the checkpoint nothing is converted: bytes are copied, and the SHA-256 of each tensor is compared with
the one recorded when it was written, so that a byte that changed on disk in between is detected.
"""

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from compress.base.errors import CheckpointError, CompressError
from compress.checkpoint.read.weight_files import DTYPES
from compress.model.finite_weights import is_damaged

SHARD_BYTES = 5_000_000_000  # of data in one file: long the default of transformers, which every reader takes
METADATA = "__metadata__"
ALIGNMENT = 8  # the data begins at a multiple of it
LENGTH_BYTES = 8
LONGEST_HEADER = 100_000_000  # the limit of the safetensors library
CHUNK = 1 << 22  # bytes
PIECE = 1 << 22  # numbers
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Header:
    """A tensor in a file's header: `length` bytes. dtype is safetensors' name for it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    length: int


def header(entries: Sequence[Header]) -> bytes:
    """The beginning of a safetensors file whose tensors follow in this order."""
    fields: dict[str, Any] = {METADATA: {"format": "pt"}}
    end = 0
    for each in entries:
        offsets = [end, end + each.length]
        fields[each.name] = {"dtype": each.dtype, "shape": list(each.shape), "data_offsets": offsets}
        end += each.length
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


@dataclass(frozen=True)
class Piece(Header):
    """A tensor in a file, from its byte `begin` on."""

    file: Path
    begin: int

    @property
    def width(self) -> int:
        """Bytes of one number; 0 for an empty tensor."""
        count = 1
        for size in self.shape:
            count *= size
        return self.length // count if count else 0

    def chunks(self, source: BinaryIO) -> Iterator[bytes]:
        """The bytes of the tensor from its opened file. Raises CheckpointError where the file ends early."""
        source.seek(self.begin)
        left = self.length
        while left:
            chunk = source.read(min(CHUNK, left))
            if not chunk:
                raise CheckpointError(f"{self.file} ends inside {self.name}")
            left -= len(chunk)
            yield chunk


def pieces_of(path: Path) -> list[Piece]:
    """The tensors of a safetensors file, by its header. Raises CheckpointError for a file that is damaged or
    incomplete.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if length > min(size, LONGEST_HEADER):
                raise CheckpointError(f"{path} is damaged or incomplete")
            said = json.loads(file.read(length))
            base = LENGTH_BYTES + length
            pieces = []
            for name, entry in said.items():
                if name != METADATA:
                    begin, end = entry["data_offsets"]
                    shape = tuple(entry["shape"])
                    pieces.append(Piece(name, entry["dtype"], shape, end - begin, path, base + begin))
        if base + sum(piece.length for piece in pieces) != size:
            raise CheckpointError(f"{path} is damaged or incomplete")
        return pieces
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged or incomplete ({error})") from None


def plan_shards(pieces: Sequence[Piece], whole: str, limit: int) -> dict[str, list[Piece]]:
    """{file name: its tensors}, in the order given, in files of at most `limit` bytes of data (one tensor at least).
    whole: the name where one file is enough."""
    shards: list[list[Piece]] = [[]]
    room = limit
    for piece in pieces:
        if shards[-1] and piece.length > room:
            shards.append([])
            room = limit
        shards[-1].append(piece)
        room -= piece.length
    if len(shards) == 1:
        return {whole: shards[0]}
    stem = whole.removesuffix(".safetensors")
    return {f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}


def write_shard(target: Path, pieces: Sequence[Piece], checksums: Mapping[str, str]) -> None:
    """Copy tensors into one file, which is on the disk when this returns. Raises CheckpointError, which names a tensor
    whose bytes differ from its checksum; OSError where the file cannot be written."""
    ordered = sorted(pieces, key=lambda piece: (-piece.width, piece.name))
    with ExitStack() as opened:
        sources = {path: opened.enter_context(path.open("rb")) for path in {piece.file for piece in ordered}}
        for piece, digest in zip(
            ordered, _write(target, ordered, (p.chunks(sources[p.file]) for p in ordered)), strict=True
        ):
            if digest != checksums[piece.name]:
                raise CheckpointError(f"{piece.name} in {piece.file} has changed since it was written")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], buffers: Collection[str]) -> dict[str, str]:
    """Write a file, which is on the disk when this returns; returns {tensor: SHA-256 of its bytes}. Beside the tensors
    it takes memory for one piece of PIECE numbers. Raises CompressError for numbers that are not finite, except
    infinities in `buffers`; OSError where it cannot be written."""
    ordered = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    entries = [Header(n, NAMES[tensors[n].dtype], tuple(tensors[n].shape), tensors[n].nbytes) for n in ordered]
    return dict(
        zip(ordered, _write(path, entries, (_bytes_of(n, tensors[n], n in buffers) for n in ordered)), strict=True)
    )


def _bytes_of(name: str, tensor: Tensor, infinities: bool) -> Iterator[memoryview]:
    for piece in tensor.detach().cpu().contiguous().flatten().split(PIECE):
        check_finite(name, piece, infinities)
        # A copy: torch lets nobody resize what numpy has seen, as FSDP does with a gathered parameter.
        yield piece.clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().data


def _write(path: Path, entries: Sequence[Header], tensors: Iterable[Iterable[bytes | memoryview]]) -> Iterator[str]:
    """Write a file; yields the SHA-256 of each tensor once it is written. It is on the disk after the last."""
    with path.open("wb") as out:
        out.write(header(entries))
        for chunks in tensors:
            digest = hashlib.sha256()
            for chunk in chunks:
                digest.update(chunk)
                out.write(chunk)
            yield digest.hexdigest()
        out.flush()
        os.fsync(out.fileno())


def check_finite(name: str, tensor: Tensor, infinities: bool) -> None:
    """Raises CompressError for a tensor with numbers that are not finite. infinities: allow infinities."""
    if is_damaged(tensor, not infinities):
        raise CompressError(f"{name} is not made of finite numbers, so it is not written; the model is damaged")
