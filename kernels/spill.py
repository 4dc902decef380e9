"""Spills large tensors on the CPU to disk, for runs whose working memory is larger than the machine's."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from compress.kernels.cpu import build
from compress.kernels.errors import CompressError, InputError

LEAST_BYTES = 4 << 20  # of a tensor that is spilled
SAID_BY_ALLOCATOR = "cannot spill"
IN_MEMORY = -1  # the folder's file system


@dataclass(frozen=True)
class Spill:
    """Tensors in files. folder: where the files are, which have no names."""

    folder: Path
    library: ctypes.CDLL

    @property
    def peak_bytes(self) -> int:
        """The most bytes that spilled tensors had at one time."""
        return int(self.library.spill_peak())


_current: list[Spill] = []  # the allocator is the whole process'


@contextmanager
def spilling(folder: str | Path | None) -> Iterator[None]:
    """Allocates every CPU tensor of at least `LEAST_BYTES`, made inside the context, in a file in the folder.

    The pages are shared mappings of files: the system writes them out and reads them again as it needs room, and a
    limit on the memory of the process does not count them. Tensors that outlive the context stay where they are. None
    as the folder does nothing. Raises InputError for a folder that no files can be made in, or whose files lie in
    memory, and where the allocator cannot be compiled; CompressError when the disk is full.
    """
    if folder is None:
        yield
        return
    path, library = Path(folder).absolute(), _library()
    _start(library, path)
    _current.append(Spill(path, library))
    try:
        yield
    except torch.OutOfMemoryError as error:
        said = str(error).splitlines()[0]
        if SAID_BY_ALLOCATOR not in said:
            raise
        raise CompressError(f"{said}; make room there, or give --spill a folder with more") from None
    finally:
        library.spill_stop()
        _current.clear()


def current() -> Spill | None:
    """The spill of the context that this is called in; None outside of any."""
    return _current[-1] if _current else None


def _library() -> ctypes.CDLL:
    reasons = build.why_not("spill")
    if reasons:
        raise InputError(f"--spill needs the compiled allocator: {'; '.join(reasons)}; leave --spill out")
    library = build.library("spill")
    library.spill_start.argtypes = (ctypes.c_char_p, ctypes.c_int64)
    library.spill_peak.restype = ctypes.c_int64
    return library


def _start(library: ctypes.CDLL, folder: Path) -> None:
    code = library.spill_start(os.fsencode(folder), LEAST_BYTES)
    if code == IN_MEMORY:
        raise InputError(f"--spill {folder} lies in memory (tmpfs), which would save none; give a folder on a disk")
    if code:
        raise InputError(f"--spill {folder}: {os.strerror(code)}; give an existing folder that files can be made in")
