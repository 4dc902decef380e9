"""SHA-256 of the content of files, computed once for a file that stays as it is.

Pieces of a file are hashed by several threads, about as fast as the file is read. Hashes of large files are kept by
path, device, inode, size and times of change: in this process, and for others in `$COMPRESS_CACHE_DIR/hashes`.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from compress.checkpoint.files import write_whole
from compress.kernels.cache_folder import cache_directory
from compress.kernels.cpu.processor import usable_cores
from compress.kernels.private_folders import why_not_believed

PIECE = 2**24  # bytes that a thread reads and hashes at a time
KEPT_FROM = 2**26  # bytes of a file whose hash is worth keeping: a thirtieth of a second
SETTLED_NS = 2 * 10**9  # file systems count time in steps; a file may change twice within one of them
DIGITS = 32  # of a hash, in a name
_known: dict[tuple[Path, "Stamp"], str] = {}


class Stamp(NamedTuple):
    """The identity of a file, and of its content as far as the file system tells."""

    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


def stamp_of(path: Path) -> Stamp:
    """The stamp of a file, behind links. Raises OSError."""
    found = path.stat()
    return Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def content_of(path: Path) -> str:
    """SHA-256 over the SHA-256 of each piece of a file, kept from before or computed. Raises OSError."""
    stamp = stamp_of(path)
    digest = _known.get((path.absolute(), stamp)) or _stored_hash(path, stamp)
    if digest is None:
        begun = time.time_ns()
        digest = _hash(path, stamp.size)
        settled = begun - max(stamp.modified_ns, stamp.changed_ns) > SETTLED_NS
        if stamp.size >= KEPT_FROM and settled and stamp_of(path) == stamp:
            _known[path.absolute(), stamp] = digest
            _store_hash(path, stamp, digest)
    return digest


def contents_of(paths: Iterable[Path]) -> str:
    """SHA-256 over the names and contents of files. Raises OSError."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name} {content_of(path)}".encode())
    return digest.hexdigest()


def _hash(path: Path, size: int) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(usable_cores()) as threads:

        def piece(start: int) -> bytes:
            part = hashlib.sha256()
            at, end = start, start + PIECE
            while at < end and (content := os.pread(file.fileno(), end - at, at)):
                part.update(content)
                at += len(content)
            return part.digest()

        for each in threads.map(piece, range(0, size, PIECE)):
            digest.update(each)
    return digest.hexdigest()


def _place(path: Path) -> Path:
    return cache_directory() / "hashes" / f"{hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:DIGITS]}.json"


def _stored_hash(path: Path, stamp: Stamp) -> str | None:
    """The kept hash of a file with this stamp; None where there is none, or where another user may have written it."""
    with suppress(OSError, ValueError, TypeError, AttributeError):
        place = _place(path)
        found = json.loads(place.read_text(encoding="utf-8"))
        if why_not_believed(place) is None and found.get("stamp") == [*stamp]:
            return str(found["sha256"])
    return None


def _store_hash(path: Path, stamp: Stamp, found: str) -> None:
    with suppress(OSError):  # the next run computes it again
        place = _place(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, json.dumps({"stamp": stamp, "sha256": found}) + "\n")
