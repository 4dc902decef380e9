"""Scratch files: `.NAME.<16 hexadecimal digits>` beside NAME. A finished scratch file replaces NAME in one step.

A killed process leaves its scratch file. The next scratch file for NAME recognises it by its name and removes it,
unless a live process holds its lock.
"""

import fcntl
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

DIGITS = 16
NAMED = re.compile(rf"\.(.+)\.[0-9a-f]{{{DIGITS}}}")
FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def becomes(name: str) -> str | None:
    """The name that a scratch file is to replace, in the same folder; None for the name of another file."""
    folder, slash, last = name.rpartition("/")
    found = NAMED.fullmatch(last)
    return None if found is None else folder + slash + found[1]


class Scratch:
    """A new file that becomes `path`, or is dropped. It is created exclusively, under a random name, so that no
    existing file is written to, and no planted link followed. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _drop_left(path)
        while True:
            self.place = path.with_name(f".{path.name}.{secrets.token_hex(DIGITS // 2)}")
            self.file: BinaryIO = open(os.open(self.place, FLAGS, 0o666), "wb")  # noqa: SIM115 - closed by its two ends
            with suppress(OSError):  # a file system without locks
                fcntl.flock(self.file, fcntl.LOCK_EX)
            if self.place.exists():  # another process may have removed it as a leftover before it was locked
                return
            self.file.close()

    def become(self, path: Path | None = None) -> None:
        """Bring the file to the disk and give it its final name, or that of `path` in the same folder. A link of that
        name is replaced by the file."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.place.replace(path or self.path)
        self.file.close()

    def drop(self) -> None:
        """Remove the file, unless it has its final name already."""
        self.place.unlink(missing_ok=True)
        with suppress(OSError):  # closing flushes, which fails on a full disk
            self.file.close()


def _drop_left(path: Path) -> None:
    """Remove the scratch files for `path` that killed processes have left."""
    with suppress(OSError):
        for left in path.parent.iterdir():
            if becomes(left.name) == path.name and left.is_file() and not left.is_symlink():
                with suppress(OSError):
                    _drop_unheld(left)


def _drop_unheld(left: Path) -> None:
    descriptor = os.open(left, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        left.unlink()
    finally:
        os.close(descriptor)
