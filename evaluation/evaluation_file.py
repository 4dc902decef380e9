"""An evaluation in a file, as `compress evaluate --json` writes it: read back as the value that it was."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from compress.base.errors import CheckpointError, InputError
from compress.base.regular_files import parse_json, regular
from compress.base.schema import built, fits
from compress.evaluation.document import FORMAT, Evaluation

MADE = ("summary", "gates")  # by `json_document` of the rest
LARGEST = 1e30  # what is finite is below it: perplexities (`kl_and_perplexity.MOST`), their errors, and bytes
ENDLESS = (".perplexity.value", ".reference_perplexity.value", ".perplexity_ratio.value")  # where these may be infinite


def read_evaluation(path: str | Path) -> Evaluation:
    """Raises InputError for a file that is not there, CheckpointError, naming the file and the key, for one that holds
    no evaluation or one of another format."""
    file = regular(Path(path), "evaluation")
    if not file.exists():
        raise InputError(f"evaluation {str(path)!r} does not exist; `compress evaluate --json FILE` writes one")
    content = parse_json(file)
    given = content.get("format") if isinstance(content, dict) else None
    if given != FORMAT:
        raise CheckpointError(
            f"{file}: format is {given!r}; it must be {FORMAT}, as `compress evaluate --json` of this version writes it"
        )
    content = {key: value for key, value in content.items() if key not in MADE}
    fits(content, Evaluation, file)
    if (far := next(_impossible(content), None)) is not None:
        raise CheckpointError(f"{file}: {far}, which no evaluation finds; measure anew with `compress evaluate --json`")
    value: Evaluation = built(content, Evaluation)
    return value


def _impossible(value: Any, keys: str = "") -> Iterator[str]:
    """Numbers that are no measurement, in words: those that arithmetic on them would overflow with, infinities, and
    negative errors."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield from _impossible(each, f"{keys}.{key}")
    if not isinstance(value, float | int):
        return
    if value == math.inf and keys.endswith(ENDLESS):
        return
    if abs(value) > LARGEST or (keys.endswith(".error") and value < 0):
        yield f"{keys.removeprefix('.')} is {value:g}"
