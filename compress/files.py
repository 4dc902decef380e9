"""Files that are whole or not there, whatever becomes of the process that writes them."""

import os
import secrets
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write or replace a file in one step: a reader finds the old content or the new one, never half of either.

    The scratch file is created exclusively, under a name that nobody can foresee: nothing that lies beside `path`, a
    planted link least of all, is written to. A link called `path` is replaced by the file. Raises OSError.
    """
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with open(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
