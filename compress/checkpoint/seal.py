"""Checksums of an output except its tensors, which have their own: the entry `checksums` of compress.json.

    files          {name: [SHA-256]} of every file but config.json, and weight files whose tensors the record names;
                   both contents of a file that a command was replacing when it was stopped ("": it did not exist)
    headers        {name: SHA-256} of the headers of weight files: the rest of each is tensors
    configuration  {key: SHA-256} of the parsed values of config.json, independent of order and spaces
    tensors        SHA-256 of the names and checksums of all tensors
    record         SHA-256 of compress.json without this entry

All code that rewrites compress.json uses this module. Rewriting a record that something else has changed does not give
it a new checksum. Records of earlier versions have no `checksums`; `check` then returns a remark.
"""

import hashlib
import json
from collections.abc import Container, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from compress.base.errors import CheckpointError
from compress.checkpoint.files import RECORD, fingerprint, read_json, write_json

CONFIG = "config.json"
ABSENT = ""
LENGTH = 8  # bytes at the beginning of a weight file that hold the length of its header
# Files for people, which no loader reads. They may be written, edited and deleted by hand.
DOCUMENTS = ("README*", "LICENSE*", "NOTICE*", "Modelfile", "*.md", "*.html", "*.png", "*.svg", "*.pdf", ".*")
# Folders that transformers looks into: chat templates beside the default, and code that generates.
TEMPLATES, CODE = "additional_chat_templates", "custom_generate"
WHOLE = "quantization_config"  # has one entry as a whole, not one for each of its keys


class Checksums(TypedDict):
    """The entry `checksums` of compress.json."""

    files: dict[str, list[str]]
    headers: dict[str, str]
    configuration: dict[str, str]
    tensors: NotRequired[str]
    record: str


def write_record(directory: Path, record: Mapping[str, Any]) -> None:
    """Write compress.json, once all other files of an output exist; `files` of the record names them."""
    record = json.loads(json.dumps(record))  # the values that a reader will get
    checksums = _of_files(directory, record["files"], record.get("tensors", {}))
    if "tensors" in record:
        checksums["tensors"] = fingerprint(record["tensors"])
    write_json(directory / RECORD, _seal({**record, "checksums": checksums}))


def rewrite(directory: Path, changes: Mapping[str, Any], files: Mapping[str, list[str]] | None = None) -> None:
    """Change entries of compress.json, and the checksums of some files."""
    before = read_json(directory / RECORD)
    after = {**before, **changes}
    if "checksums" in before:
        own = before["checksums"]
        after["checksums"] = {**own, "files": {**own["files"], **(files or {})}}
        after = _seal(after) if is_intact(before) else after
    write_json(directory / RECORD, after)


def is_intact(record: Mapping[str, Any]) -> bool:
    """True for a record that nothing but compress has changed, and for one without checksums, which cannot be
    checked."""
    return "checksums" not in record or record["checksums"].get("record") == _own(record)


def checksum_of(content: bytes) -> str:
    """SHA-256 of the content of a file."""
    return hashlib.sha256(content).hexdigest()


def check(directory: Path, record: Mapping[str, Any]) -> list[str]:
    """Check an output against the checksums of its record. Raises CheckpointError, which names a file or a key of
    config.json that differs. Returns remarks on changed documents and on missing checksums."""
    check_itself(directory, record)
    if "checksums" not in record:
        return [f"not checked: the {RECORD} of an earlier version has no checksums of files, configuration and itself"]
    expected: Checksums = record["checksums"]
    _check_configuration(directory, expected["configuration"])
    remarks = list(_check_files(directory, expected))
    if foreign := next(_foreign(directory, record["files"]), None):
        raise CheckpointError(f"{foreign} was not written with the model, which may be read with it; move it away")
    return remarks


def check_itself(directory: Path, record: Mapping[str, Any]) -> None:
    """Raises CheckpointError for a record that something other than compress has changed."""
    path, checksums = directory / RECORD, record.get("checksums")
    if checksums is None:
        return
    if not is_intact(record):
        raise CheckpointError(f"{path} is not what compress wrote; put it back or write the model again")
    if "tensors" in checksums and checksums["tensors"] != fingerprint(record["tensors"]):
        raise CheckpointError(f"{path} lists other tensors than were written; write the model again")


def _check_configuration(directory: Path, expected: Mapping[str, str]) -> None:
    path = directory / CONFIG
    found = _of_configuration(path)
    for key in sorted({*expected, *found}):
        if expected.get(key) != found.get(key):
            how = "is missing" if key not in found else "was added" if key not in expected else "was changed"
            raise CheckpointError(f"{key} of {path} {how} since the model was written; put it back")


def _check_files(directory: Path, expected: Checksums) -> Iterator[str]:
    """Remarks on changed documents. Raises CheckpointError for another file that has changed."""
    for name, known in expected["files"].items():
        path = directory / name
        found = _of_file(path) if path.is_file() else ABSENT
        if found in known:
            continue
        how = "is missing" if found == ABSENT else "is not what was written"
        if not is_document(name):
            raise CheckpointError(f"{path} {how}; put it back")
        yield f"{name} {how}, which nothing reads"
    for name, header in expected["headers"].items():
        if not (directory / name).is_file() or _header(directory / name) != header:
            raise CheckpointError(f"the header of {directory / name} is not what was written; put it back")


def is_as_written(directory: Path, record: Mapping[str, Any], name: str) -> bool:
    """True for a file of an output that a command wrote and nobody has changed since."""
    known = record.get("checksums", {}).get("files", {}).get(name, ())
    return (directory / name).is_file() and _of_file(directory / name) in known


def _foreign(directory: Path, names: Iterable[str]) -> Iterator[Path]:
    """Files that a loader could read and that no command of ours has written: beside the weights, in a folder of ours,
    and in one that transformers looks into."""
    own = {RECORD, *names}
    folders = {parent.as_posix() for name in own for parent in Path(name).parents[:-1]}
    inside = [path for folder in folders for path in (directory / folder).iterdir()]
    for path in sorted([*directory.iterdir(), *inside]):
        read = path.name in (TEMPLATES, CODE) or not path.is_dir()
        if path.relative_to(directory).as_posix() not in own | folders and read and not is_document(path.name):
            yield path


def is_document(name: str) -> bool:
    """True for the name of a file for people, which no loader reads."""
    return any(fnmatchcase(name, pattern) for pattern in DOCUMENTS)


def _of_files(directory: Path, names: Iterable[str], tensors: Container[str]) -> dict[str, Any]:
    """The checksums of files, headers and the configuration. tensors: those that have checksums of their own."""
    names = [name for name in names if name != CONFIG]
    weights = [n for n in names if n.endswith(".safetensors") and all(t in tensors for t in _tensors(directory / n))]
    others = [name for name in names if name not in weights]
    return {
        "files": {name: [_of_file(directory / name)] for name in others},
        "headers": {name: _header(directory / name) for name in weights},
        "configuration": _of_configuration(directory / CONFIG),
    }


def _of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _tensors(path: Path) -> Iterator[str]:
    """Names of the tensors of a weight file."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(LENGTH), "little")))
    return (name for name in header if name != "__metadata__")


def _header(path: Path) -> str:
    """SHA-256 of the length and the header of a weight file."""
    with path.open("rb") as file:
        length = file.read(LENGTH)
        return checksum_of(length + file.read(int.from_bytes(length, "little")))


def _of_configuration(path: Path) -> dict[str, str]:
    """{key: SHA-256} of the values of a configuration; keys of nested values are joined by points."""
    return {key: fingerprint({"": value}) for key, value in _leaves(read_json(path))} if path.exists() else {}


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value and prefix + key != WHOLE:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _seal(record: Mapping[str, Any]) -> dict[str, Any]:
    return {**record, "checksums": {**record["checksums"], "record": _own(record)}}


def _own(record: Mapping[str, Any]) -> str:
    """SHA-256 of a record without the checksum of itself."""
    rest = {key: value for key, value in record["checksums"].items() if key != "record"}
    return fingerprint({**record, "checksums": rest})
