"""Makes the weight files of a finished checkpoint from the files of its blocks, byte by byte.

A safetensors file is the length of its header (8 bytes, little-endian), the header (JSON: name -> dtype, shape, begin
and end of the data) and the data, without holes. Here tensors of wide numbers come first, so that every tensor begins
at a multiple of its numbers' width, as readers that map files need.

Nothing is converted: bytes are copied, and the SHA-256 of each tensor is compared with the one recorded when it was
written, so that a byte that changed on disk in between is detected.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from compress.base.errors import CheckpointError
from compress.checkpoint.files import WHOLE

SHARD_BYTES = 5_000_000_000  # of data in one file: long the default of transformers, which every reader takes
METADATA = "__metadata__"
ALIGNMENT = 8  # the data begins at a multiple of it
LENGTH_BYTES = 8
LONGEST_HEADER = 100_000_000  # the limit of the safetensors library
CHUNK = 1 << 22


@dataclass(frozen=True)
class Header:
    """A tensor in a file's header: `length` bytes. dtype is safetensors' name for it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    length: int


def header(entries: Sequence[Header]) -> bytes:
    """The beginning of a safetensors file whose tensors follow in this order."""
    said: dict[str, Any] = {METADATA: {"format": "pt"}}
    end = 0
    for each in entries:
        offsets = [end, end + each.length]
        said[each.name] = {"dtype": each.dtype, "shape": list(each.shape), "data_offsets": offsets}
        end += each.length
    text = json.dumps(said, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


@dataclass(frozen=True)
class Piece:
    """A tensor in a file: `length` bytes from `begin`. dtype is safetensors' name for it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    length: int

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
            found = []
            for name, entry in said.items():
                if name != METADATA:
                    begin, end = entry["data_offsets"]
                    found.append(Piece(name, entry["dtype"], tuple(entry["shape"]), path, base + begin, end - begin))
        if base + sum(piece.length for piece in found) != size:
            raise CheckpointError(f"{path} is damaged or incomplete")
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged or incomplete ({error})") from None


def planned(pieces: Sequence[Piece], whole: str = WHOLE, limit: int | None = None) -> dict[str, list[Piece]]:
    """{file name: its tensors}, in the order given, in files of at most `limit` bytes of data (one tensor at least).
    whole: the name where one file is enough."""
    limit = SHARD_BYTES if limit is None else limit
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
    sources: dict[Path, BinaryIO] = {}
    try:
        with target.open("wb") as out:
            out.write(header([Header(piece.name, piece.dtype, piece.shape, piece.length) for piece in ordered]))
            for piece in ordered:
                if piece.file not in sources:
                    sources[piece.file] = piece.file.open("rb")
                digest = hashlib.sha256()
                for chunk in piece.chunks(sources[piece.file]):
                    digest.update(chunk)
                    out.write(chunk)
                if digest.hexdigest() != checksums[piece.name]:
                    raise CheckpointError(f"{piece.name} in {piece.file} has changed since it was written")
            out.flush()
            os.fsync(out.fileno())
    finally:
        for source in sources.values():
            source.close()
