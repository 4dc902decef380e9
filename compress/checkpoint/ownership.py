"""Recognises files that this tool wrote by their content, so that it never replaces other files unasked."""

from collections.abc import Iterable
from pathlib import Path

from compress.base.errors import CheckpointError, InputError
from compress.base.regular_files import parse_json, special
from compress.checkpoint.files import RECORD

GENERATOR = '<meta name="generator" content="compress'  # in the head of a page
MARK = "written by compress"  # in a comment of any other text: a picture, Markdown, a recipe
MARKED_BYTES = 4096  # at both ends of a file
# Keys of the JSON files that commands write. A file with only two keys must have exactly these.
KEYS = (
    {"compress", "identity", "layers", "left_alone"},  # the record of a run
    {"format", "model", "texts", "provenance"},  # evaluate
    {"format", "model", "text", "rows"},  # sweep
    {"model", "speed"},  # the original's, of a sweep
    {"identity", "recipe", "asked"},  # of a recipe of a sweep
    {"verdict", "runs"},  # report
    {"model", "target", "met", "searched"},  # fit
    {"recipe", "embedding", "predicted_kl"},  # fit --recipe-only
    {"output", "samples", "tokens", "top_k", "mass"},  # cache-logits
    {"output", "layers", "bytes", "lost"},  # export
    {"model", "exports"},  # export --list
    {"layers", "size"},  # inspect
    {"layers", "size", "remarks"},
    {"device", "libraries", "layers"},
    {"model", "ranges"},
    {"model", "trainings"},
    {"layers", "transformers"},  # verify
    {"layers", "transformers", "dtype"},
    {"layers", "reader"},
    {"format", "what", "complete", "settings", "results"},  # bench
)


def marked_text(text: str) -> str:
    """Markdown or a picture, with a comment that marks it as written by this tool."""
    return f"{text}<!-- {MARK} -->\n"


def is_ours(path: Path) -> bool:
    """True for an empty file, and for one with content that a command of this tool writes."""
    with path.open("rb") as file:
        head = file.read(MARKED_BYTES)
        file.seek(max(0, path.stat().st_size - MARKED_BYTES))
        text = (head + file.read()).decode(errors="replace")
    if not text.strip() or MARK in text or GENERATOR in text:
        return True
    if not text.lstrip().startswith("{"):
        return False
    try:
        found = parse_json(path)
    except CheckpointError:
        return False
    return isinstance(found, dict) and any(
        keys <= found.keys() and (len(keys) > 2 or keys == {*found}) for keys in KEYS
    )


def check_replaceable(path: Path, advice: str) -> None:
    """Raises InputError for a regular file that is not ours, and for the record of a run. advice: the end of the
    message.
    """
    if not path.exists() or special(path) is not None:
        return
    if path.name == RECORD:
        raise InputError(f"{path} is where a run keeps its record; give another file")
    try:
        ours = is_ours(path)
    except OSError as error:
        raise InputError(f"{path} exists and cannot be read ({error.strerror}); give another file") from None
    if not ours:
        raise InputError(f"{path} exists and is not what compress writes there; {advice}")


def check_places(paths: Iterable[Path]) -> None:
    """Raises InputError unless a command can write a file at each path: where a directory or the like is there, and as
    `check_replaceable` does."""
    advice = "move it, or give another output"
    for path in paths:
        if (kind := special(path)) is not None:
            raise InputError(f"{path} is {kind}, where a file is written; {advice}")
        check_replaceable(path, advice)
