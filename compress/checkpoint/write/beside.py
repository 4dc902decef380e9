"""Files that are put into the output of a run when it is there already: what was found out about it since.

The record names them like those of the run itself, so that they go with the directory when it is replaced. What a
person has put there is never touched unless that is asked for.
"""

from pathlib import Path

from compress.checkpoint.files import RECORD, write_whole
from compress.checkpoint.seal import ABSENT, checksum_of, rewrite
from compress.checkpoint.write.directory import is_checkpoint, own_files
from compress.checkpoint.write.manifest import read_record
from compress.errors import InputError


def check_beside(directory: Path, names: list[str], overwrite: bool = False) -> None:
    """Raises InputError for a directory that no run wrote, and for files of these names that are somebody's own."""
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
    """Write files into the output of a run. Raises InputError as `check_beside` does, and where nothing can be written.

    The record is written first, and once more at the end: were this stopped in between, it would name a file that is
    not there, or hold one for right as it was or as it will be, which harms nothing.
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
