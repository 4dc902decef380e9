"""Compiled libraries in a folder, with the results of compiling them.

NAME.so      the library
NAME.json    {"sha256"} of a library that was compiled, or {"failed", "date"}; a library without it is not there
NAME.lock    held by the process that compiles it, and touched by it while its compiler gets on
build-*      a compiler's own folder, gone when it is done
"""

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import date
from pathlib import Path

from compress.kernels.notes import note_once
from compress.kernels.private_folders import why_not_ours

POLL_SECONDS = 0.1
# A lock that was not touched for so long belongs to a process that stands still.
STILL_SECONDS = 60.0
STALE_SECONDS = 86400.0  # of a folder that a killed process has left


def is_whole(library: Path) -> bool:
    """True if a library is there as it was compiled, and nobody else could have changed it."""
    return library.exists() and _is_ours(library) and _told(library, "sha256") == sha256_of(library)


def failure(library: Path) -> str | None:
    """The reason why this library could not be compiled, and since when; None if nobody failed."""
    reason, since = _told(library, "failed"), _told(library, "date")
    return None if reason is None else f"{reason} (on {since}; COMPRESS_CPU_KERNELS=retry compiles again)"


def keep(made: Path, library: Path) -> None:
    """Put a library that a compiler made in its place, with its checksum."""
    made.chmod(0o700)
    _tell(library, {"sha256": sha256_of(made)})
    made.replace(library)


def keep_failure(library: Path, reason: str) -> None:
    """Remember that this library cannot be compiled, or not loaded."""
    _tell(library, {"failed": reason, "date": date.today().isoformat()})


@contextmanager
def locked(lock: Path, waiting: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Hold the lock of a library; yields a function that shows other processes that work goes on. waiting: called where
    another process holds the lock. A process that ends in any way releases it; one that makes no progress is not waited
    for: two processes that compile the same library do no harm, each puts a whole one in its place."""
    with lock.open("a", encoding="utf-8") as file:
        seen, since, said = -1.0, time.monotonic(), False
        while not _try_lock(file.fileno()):
            if not said:
                waiting()
                said = True
            touched, now = os.fstat(file.fileno()).st_mtime, time.monotonic()
            if touched != seen:
                seen, since = touched, now
            if now - since > STILL_SECONDS:
                break
            time.sleep(POLL_SECONDS)
        os.utime(file.fileno())
        yield lambda: os.utime(file.fileno())


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks
    return True


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A folder to compile in; those that killed processes have left go."""
    for left in folder.glob("build-*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(left) if left.is_dir() else left.unlink()
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-", ignore_cleanup_errors=True) as made:
        yield Path(made)


def _is_ours(path: Path) -> bool:
    reason = why_not_ours(path)
    if reason is not None:
        note_once(f"{reason}: it is left alone, and the kernels are compiled anew")
    return reason is None


def _told(library: Path, key: str) -> str | None:
    path = library.with_suffix(".json")
    try:
        told = json.loads(path.read_text(encoding="utf-8")) if _is_ours(path) else None
    except (OSError, ValueError):
        return None
    found = told.get(key) if isinstance(told, dict) else None
    return found if isinstance(found, str) else None


def _tell(library: Path, told: dict[str, str]) -> None:
    with tempfile.NamedTemporaryFile("w", dir=library.parent, prefix="build-", encoding="utf-8", delete=False) as file:
        json.dump(told, file)
    Path(file.name).replace(library.with_suffix(".json"))


def sha256_of(path: Path) -> str:
    """The checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
