"""Adds files to the finished output of a run: later findings about it.

The record names them like the files of the run itself, so that they are replaced with the directory. A person's own
files are not touched unless `overwrite` is given.
"""

from pathlib import Path

from compress.base.errors import InputError
from compress.checkpoint.files import RECORD, write_whole
from compress.checkpoint.seal import ABSENT, checksum_of, rewrite
from compress.checkpoint.write.directory import is_checkpoint, own_files
from compress.checkpoint.write.manifest import read_record


def check_beside(directory: Path, names: list[str], overwrite: bool = False) -> None:
    """Raises InputError for a directory that no run wrote, and for existing files of these names that are not ours."""
    if not is_checkpoint(directory):
        raise InputError(f"{directory} is not what a run wrote: its {RECORD} is missing or another's")
    own = own_files(directory)
    for name in names:
        path = directory / name
        if path.is_dir():
            raise InputError(f"{path} is a directory; move it away")
        if (path.exists() or path.is_symlink()) and name not in own and not overwrite:
            raise InputError(f"{path} exists and is not ours; move it away or give --overwrite")


def put_beside(directory: Path, content: dict[str, str], overwrite: bool = False) -> None:
    """Write files into the output of a run. Raises InputError as `check_beside` does, and where writing fails.

    The record is written first, with the old and the new checksum of each file, and again at the end, with the new one.
    A process that is stopped in between leaves a record that accepts both contents, or names a missing file: harmless.
    """
    check_beside(directory, list(content), overwrite)
    own = own_files(directory)
    known = read_record(directory).get("checksums", {}).get("files", {})
    sums = {name: checksum_of(text.encode()) for name, text in content.items()}
    try:
        either = {name: [*known.get(name, [ABSENT]), new] for name, new in sums.items()}
        rewrite(directory, {"files": sorted({*own, *content})}, either)
        for name, text in content.items():
            write_whole(directory / name, text)
        rewrite(directory, {}, {name: [new] for name, new in sums.items()})
    except OSError as error:
        raise InputError(f"cannot write to {directory}: {error.strerror}") from None
