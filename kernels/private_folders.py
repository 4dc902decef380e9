"""Folders that nobody else can put anything into, for compiled code: who can write a library that we load, runs as us.
Who can write cached figures decides what we report.

Trusted are the user who runs this process, and root.
"""

import grp
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from compress.kernels.cache_folder import cache_directory

PRIVATE = 0o700
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OTHERS_ENTER = stat.S_IXGRP | stat.S_IXOTH
ROOT = 0
# The owner that Linux shows for users outside of a container's map, of / for instance.
UNMAPPED = 65534


def candidates(name: str) -> Iterator[Path]:
    """Places for a private folder, best first: in the cache directory, and in one of this user's beside other temporary
    files, which outlives the process."""
    yield cache_directory() / name
    yield Path(tempfile.gettempdir()) / f"compress-{os.geteuid()}" / name


def make_private(folder: Path) -> None:
    """Create a folder, and the one that it lies in, for this user alone. Existing ones stay unchanged."""
    for each in (folder.parent, folder):
        each.mkdir(mode=PRIVATE, parents=True, exist_ok=True)


def why_not_private(folder: Path) -> str | None:
    """The reason why other users could change the content of a folder; None when they cannot."""
    real = folder.resolve()
    if reason := why_not_ours(real):
        return reason
    for parent in reversed(real.parents):  # from / on
        found = parent.stat()
        if found.st_uid not in (ROOT, os.geteuid(), UNMAPPED):
            return f"{parent}, in which it lies, belongs to {_user(found.st_uid)}"
        if _others_write(found) and not found.st_mode & stat.S_ISVTX:
            return f"{parent}, in which it lies, can be written by other users"
        if found.st_uid == os.geteuid() and not found.st_mode & OTHERS_ENTER:
            return None  # nobody else gets any further
    return None


def why_not_ours(path: Path) -> str | None:
    """The reason why other users may have written a file or folder itself; None when they cannot have."""
    found = path.stat()
    if found.st_uid not in (ROOT, os.geteuid()):
        return f"{path} belongs to {_user(found.st_uid)}"
    if found.st_mode & OTHERS_WRITE:
        return f"{path} can be written by other users (chmod go-w {path})"
    return None


def why_not_believed(path: Path) -> str | None:
    """The reason why other users may have written figures of the cache; None when they cannot have. A group of one's
    own may write them: nothing of them is run."""
    found = path.stat()
    if found.st_uid not in (ROOT, os.geteuid()):
        return f"{path} belongs to {_user(found.st_uid)}"
    return f"{path} can be written by other users (chmod go-w {path})" if _others_write(found) else None


def _others_write(found: os.stat_result) -> bool:
    """True if other users can write a folder on the way. A group of one's own, which many systems give every user,
    holds no others."""
    if found.st_mode & stat.S_IWOTH:
        return True
    return bool(found.st_mode & stat.S_IWGRP) and not _own_group(found.st_gid)


def _own_group(gid: int) -> bool:
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return user.pw_gid == gid and group.gr_name == user.pw_name and not {*group.gr_mem} - {user.pw_name}


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
