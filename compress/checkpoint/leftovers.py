"""Files that runs leave in the folders of OUT.partial, known by their names: what else lies there is somebody's own."""

import re
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from compress.checkpoint.files import INDEX, OWN_INDEX, RECORD
from compress.checkpoint.scratch import becomes
from compress.train.loop.metrics import METRICS, RATE, UNFINISHED
from compress.train.loop.metrics import TRAINING as CURVES

BLOCKS, MODEL, TRAINING = "blocks", "model", "training"
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
    "LICENSE*",
    "NOTICE*",
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


def is_left(folder: str, path: Path, within: str) -> bool:
    """True for a kind and name (`within` the folder) that a run leaves in a folder of OUT.partial."""
    if path.is_symlink():
        return False
    if path.is_dir():
        return folder == TRAINING and FOLDER_OF_TRAINING.fullmatch(within) is not None
    known = {
        BLOCKS: lambda: OF_BLOCKS.fullmatch(within) is not None,
        MODEL: lambda: of_checkpoint(within),
        TRAINING: lambda: OF_TRAINING.fullmatch(within) is not None,
    }
    return path.is_file() and known[folder]()


def strangers_in(partial: Path) -> Iterator[Path]:
    """Paths in the folders of OUT.partial that no run leaves."""
    for folder in (BLOCKS, MODEL, TRAINING):
        for path in sorted((partial / folder).rglob("*")):
            within = path.relative_to(partial / folder).as_posix()
            if not is_left(folder, path, within) and (path.exists() or path.is_symlink()):  # a live run's may be gone
                yield path


def clear(partial: Path) -> None:
    """Remove what runs leave in the folders of OUT.partial, and the folders, but for what is somebody's own."""
    for folder in (BLOCKS, TRAINING, MODEL):
        place = partial / folder
        for path in sorted(place.rglob("*"), reverse=True):  # what is in a folder comes before it
            if is_left(folder, path, path.relative_to(place).as_posix()):
                _remove(path)
        _remove(place)


def _remove(path: Path) -> None:
    """Remove a file, or a folder that is empty."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
    elif path.exists():
        with suppress(OSError):
            path.rmdir()
