"""Files that runs leave in the folders of OUT.partial, known by their names: what else lies there is somebody's own."""

import re
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypedDict

from compress.checkpoint.files import INDEX, OWN_INDEX, RECORD, read_json, write_json
from compress.checkpoint.scratch import becomes
from compress.system.schema import fits
from compress.train.loop.metrics import METRICS, RATE, UNFINISHED
from compress.train.loop.metrics import TRAINING as CURVES

BLOCKS, MODEL, TRAINING = "blocks", "model", "training"
EXPECTED = "expected.json"  # in OUT.partial
# What goes with the weights wherever they go.
LEGAL = ("LICENSE*", "NOTICE*")
# What a person expects to find beside the weights. Everything else of the source (other weight formats) stays there.
COMPANIONS = (
    "tokenizer*",
    "*.model",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template*",
    "*preprocessor_config.json",
    "processor_config.json",
    "*.py",
    *LEGAL,
)
BESIDE = (RECORD, "config.json", INDEX, OWN_INDEX, CURVES, "README.md", *COMPANIONS)
OF_BLOCKS = re.compile(r"((block|edits|part)-\d{5}|rest)(-rank\d+)?\.safetensors|\.tmp\w{6}")  # safetensors' scratch
WEIGHTS = re.compile(r"model(\.\w+)?(-\d{5}-of-\d{5})?\.safetensors")
OF_TRAINING = re.compile(
    rf"\d+/({re.escape(METRICS)}|{re.escape(RATE)}({re.escape(UNFINISHED)})?"
    r"|step-\d+(\.part)?/(\.metadata|__\d+_\d+\.distcp)(\.tmp)?)"
)
FOLDER_OF_TRAINING = re.compile(r"\d+(/step-\d+(\.part)?)?")


def of_checkpoint(name: str) -> bool:
    """True for the name of a file of a checkpoint, or of its scratch file."""
    name = becomes(name) or name
    return WEIGHTS.fullmatch(name) is not None or any(fnmatchcase(name, pattern) for pattern in BESIDE)


class _Expected(TypedDict):
    files: list[str]


def expect(partial: Path, names: Iterable[str]) -> None:
    """Say that files of these names in model/ are ours, before they are written."""
    write_json(partial / EXPECTED, {"files": sorted(names)})


def expected(partial: Path) -> frozenset[str]:
    """Names that `expect` was told. Raises CheckpointError for a file of that name that is somebody else's."""
    path = partial / EXPECTED
    if not path.exists():
        return frozenset()
    found = read_json(path)
    fits(found, _Expected, path)
    return frozenset(found["files"])


def is_left(folder: str, path: Path, within: str, names: Container[str] = ()) -> bool:
    """True for a kind and name (`within` the folder) that a run leaves in a folder of OUT.partial. names: of files that
    this run in particular leaves in model/ (`expected`)."""
    if path.is_symlink():
        return False
    if path.is_dir():
        return folder == TRAINING and FOLDER_OF_TRAINING.fullmatch(within) is not None
    known = {
        BLOCKS: lambda: OF_BLOCKS.fullmatch(within) is not None,
        MODEL: lambda: of_checkpoint(within) or (becomes(within) or within) in names,
        TRAINING: lambda: OF_TRAINING.fullmatch(within) is not None,
    }
    return path.is_file() and known[folder]()


def strangers_in(partial: Path) -> Iterator[Path]:
    """Paths in the folders of OUT.partial that no run leaves."""
    names = expected(partial)
    for folder in (BLOCKS, MODEL, TRAINING):
        for path in sorted((partial / folder).rglob("*")):
            within = path.relative_to(partial / folder).as_posix()
            ours = is_left(folder, path, within, names)
            if not ours and (path.exists() or path.is_symlink()):  # a live run's may be gone
                yield path


def clear(partial: Path) -> None:
    """Remove what runs leave in the folders of OUT.partial, and the folders, but for what is somebody's own; last the
    names by which files are known."""
    names = expected(partial)
    for folder in (BLOCKS, TRAINING, MODEL):
        place = partial / folder
        for path in sorted(place.rglob("*"), reverse=True):  # what is in a folder comes before it
            if is_left(folder, path, path.relative_to(place).as_posix(), names):
                _remove(path)
        _remove(place)
    for path in partial.iterdir():
        if EXPECTED in (path.name, becomes(path.name)):
            path.unlink()


def _remove(path: Path) -> None:
    """Remove a file, or a folder that is empty."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
    elif path.exists():
        with suppress(OSError):
            path.rmdir()
