"""Opens files that a person names: regular files only, with limits on nesting and size that protect the reader."""

import errno
import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compress.base.errors import CheckpointError, InputError

MOST_BITS = 1024  # of a whole number; Python refuses to print one of some thousand digits
DEEPEST = 100  # lists and mappings inside each other; a real configuration has about ten
MOST_NODES = 1_000_000  # of a YAML file, whose aliases can stand for more than any memory holds
SNAPSHOTS, BLOBS = "snapshots", "blobs"  # folders of the hub's cache
LOOP = "a loop of symbolic links"
KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


def special(path: Path) -> str | None:
    """The kind of a path that is no regular file, like "a FIFO" (whose reader would wait for a writer). None for a
    regular file and for a path that does not exist."""
    try:
        return KINDS.get(stat.S_IFMT(path.stat().st_mode))
    except OSError as error:
        return LOOP if error.errno == errno.ELOOP else None
    except ValueError:  # a null byte in the name
        return None


def regular(path: Path, what: str) -> Path:
    """`path`. Raises InputError where it exists and is no regular file. what: a word or two for the expected content,
    used in the message."""
    kind = special(path)
    if kind is not None:
        raise InputError(f"{what} {str(path)!r} is {kind}; give a regular file")
    return path


def lies_in(path: Path, folder: Path) -> bool:
    """True for a path that lies in a folder behind all links, or among the blobs to which the hub's cache links from a
    folder of its own (models--owner--name/snapshots/REVISION) and those inside it."""
    root = folder.resolve()
    roots = [root, *(parent.parent / BLOBS for parent in root.parents if parent.name == SNAPSHOTS)][:2]
    try:
        found = path.resolve()
    except (OSError, RuntimeError):  # a loop
        return False
    return any(found.is_relative_to(each) for each in roots)


def parse_json(path: Path) -> Any:
    """The content of a JSON file. Raises CheckpointError, in one line, for anything that is no JSON file."""
    kind = special(path)
    if kind is not None:
        raise CheckpointError(f"{path} is {kind}; it must be a regular file")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        check_nesting(value)
    except RecursionError:
        raise CheckpointError(f"{path} cannot be read: nested deeper than {DEEPEST} levels") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    return value


def json_line(text: str, where: str, must: str = "") -> Any:
    """The value of a line of a JSONL file. Raises InputError, in one line, for a line that is not JSON (ends in `must`)
    and for one that no reader here takes. where: names the line in the message."""
    try:
        value = json.loads(text)
        check_nesting(value)
    except json.JSONDecodeError:
        raise InputError(f"{where} is not JSON{must}") from None
    except RecursionError:
        raise InputError(f"{where} cannot be read: nested deeper than {DEEPEST} levels") from None
    except ValueError as error:
        raise InputError(f"{where} cannot be read: {error}") from None
    return value


def check_nesting(value: Any, most: int | None = None) -> None:
    """Raises ValueError for lists and mappings nested deeper than DEEPEST (or in themselves), for strings that cannot
    be encoded, for whole numbers beyond MOST_BITS, and for more than `most` values, where a value counts as often as
    aliases repeat it."""
    level, count = [value], 0
    waiting: list[Iterator[Any]] = [iter(level)]
    while waiting:
        each = next(waiting[-1], waiting)
        if each is waiting:
            waiting.pop()
            continue
        count += 1
        if most is not None and count > most:
            raise ValueError(f"more than {most} values")
        if isinstance(each, int) and each.bit_length() > MOST_BITS:
            raise ValueError(f"a number of about {each.bit_length() * 3 // 10} digits")
        if isinstance(each, str):
            _check_encodes(each)
        elif isinstance(each, list | tuple | dict):
            if len(waiting) > DEEPEST:
                raise ValueError(f"nested deeper than {DEEPEST} levels")
            waiting.append(iter([*each, *each.values()] if isinstance(each, dict) else each))


def _check_encodes(text: str) -> None:
    """Raises ValueError for a string with half of a surrogate pair, which JSON and YAML can hold and no file does."""
    try:
        _ = text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise ValueError(f"a lone surrogate {half}, half of a character: write all of it, or leave it out") from None
