"""Files that runs leave in the folders of OUT.partial, known by their names. All other files there are a person's
own."""

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypedDict

from compress.base.schema import fits
from compress.checkpoint.files import INDEX, OWN_INDEX, RECORD, read_json, write_json
from compress.checkpoint.scratch import becomes
from compress.checkpoint.seal import CODE, TEMPLATES
from compress.train.loop.metrics import METRICS, RATE, UNFINISHED
from compress.train.loop.metrics import TRAINING as CURVES

BLOCKS, MODEL, TRAINING = "blocks", "model", "training"
EXPECTED = "expected.json"  # in OUT.partial
# Files that accompany the weights in every output.
LEGAL = ("LICENSE*", "NOTICE*")
# Files beside the weights that transformers reads: constants of its utils and of its tokenizers, vocab_files_names of
# each tokenizer, and code.
COMPANIONS = (
    "tokenizer*",
    "*.model",
    "*.tiktoken",
    "*vocab*",
    "tekken.json",
    "merges.txt",
    "bpe.codes",
    "byte_maps.json",
    "dict.txt",
    "emoji.json",
    "normalizer.json",
    "*.spm",
    "*.tokenizer",
    "word_shape.json",
    "word_pronunciation.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    f"{CODE}/*",
    "chat_template*",
    f"{TEMPLATES}/*",
    "*preprocessor_config.json",
    "processor_config.json",
    "audio_tokenizer_config.json",
    "*.py",
    *LEGAL,
)
BESIDE = (RECORD, "config.json", INDEX, OWN_INDEX, CURVES, "README.md", *COMPANIONS)
OF_BLOCKS = re.compile(
    r"((block|edits|part|rest)-\d{5}|rest|reference)(-rank\d+)?\.safetensors|\.tmp\w{6}"
)  # safetensors' scratch
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


def holds(folder: str, names: Iterable[str]) -> bool:
    """True for a folder in which some of these files lie."""
    return any(name.startswith(f"{folder}/") for name in names)


class _Expected(TypedDict):
    files: list[str]


def expect(partial: Path, names: Iterable[str]) -> None:
    """Record, before they are written, that files of these names in model/ are ours."""
    write_json(partial / EXPECTED, {"files": sorted(names)})


def expected_names(partial: Path) -> frozenset[str]:
    """The names that `expect` has recorded. Raises CheckpointError where the record is not one of ours."""
    path = partial / EXPECTED
    if not path.exists():
        return frozenset()
    found = read_json(path)
    fits(found, _Expected, path)
    return frozenset(found["files"])


def is_left(folder: str, path: Path, within: str, names: Collection[str] = ()) -> bool:
    """True for a path that runs leave in a folder of OUT.partial, by its kind and its name `within` the folder. names:
    of further files that this run leaves in model/ (`expected_names`)."""
    if path.is_symlink():
        return False
    if path.is_dir():
        if folder == MODEL:
            return holds(within, (*COMPANIONS, *names))
        return folder == TRAINING and FOLDER_OF_TRAINING.fullmatch(within) is not None
    known = {
        BLOCKS: lambda: OF_BLOCKS.fullmatch(within) is not None,
        MODEL: lambda: of_checkpoint(within) or (becomes(within) or within) in names,
        TRAINING: lambda: OF_TRAINING.fullmatch(within) is not None,
    }
    return path.is_file() and known[folder]()


def strangers_in(partial: Path) -> Iterator[Path]:
    """Paths in the folders of OUT.partial that no run leaves."""
    names = expected_names(partial)
    for folder in (BLOCKS, MODEL, TRAINING):
        for path in sorted((partial / folder).rglob("*")):
            within = path.relative_to(partial / folder).as_posix()
            ours = is_left(folder, path, within, names)
            if not ours and (path.exists() or path.is_symlink()):  # a live run may have removed its file
                yield path


def clear(partial: Path) -> None:
    """Remove the files and folders that runs leave in OUT.partial, and last the record of expected names. A person's
    own files stay."""
    names = expected_names(partial)
    for folder in (BLOCKS, TRAINING, MODEL):
        place = partial / folder
        for path in sorted(place.rglob("*"), reverse=True):  # the content of a folder comes before the folder
            if is_left(folder, path, path.relative_to(place).as_posix(), names):
                remove(path)
        remove(place)
    for path in partial.iterdir():
        if EXPECTED in (path.name, becomes(path.name)):
            path.unlink()


def remove(path: Path) -> None:
    """Remove a file or an empty folder."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
    elif path.exists():
        with suppress(OSError):
            path.rmdir()
