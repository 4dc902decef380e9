"""The folder of things that can be made again: compiled libraries, tuned configurations, answers of references."""

import os
import stat
import tempfile
from functools import cache
from pathlib import Path

from compress.kernels.notes import note_once

PRIVATE = 0o700
OTHERS = stat.S_IWGRP | stat.S_IWOTH


def cache_directory() -> Path:
    """$COMPRESS_CACHE_DIR, else $XDG_CACHE_HOME/compress, else ~/.cache/compress; for a user without a home directory,
    as in containers, a private folder beside other temporary files."""
    own, shared = os.environ.get("COMPRESS_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(own).expanduser() if own else Path(shared or "~/.cache").expanduser() / "compress"
    except RuntimeError:
        return _temporary()


@cache
def _temporary() -> Path:
    """The folder of this user in the temporary directory, or a new one where that cannot be trusted."""
    folder = Path(tempfile.gettempdir()) / f"compress-{os.geteuid()}"
    try:
        folder.mkdir(mode=PRIVATE, exist_ok=True)
        found = folder.lstat()
        trusted = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & OTHERS
    except OSError:
        trusted = False
    if not trusted:
        folder = Path(tempfile.mkdtemp(prefix="compress-"))
    note_once(f"this user has no home directory: caches are in {folder}; COMPRESS_CACHE_DIR names a lasting place")
    return folder
