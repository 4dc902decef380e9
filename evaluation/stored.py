"""An evaluation in a file, as `compress evaluate --json` writes it: read back as the value that it was."""

from pathlib import Path

from compress.errors import CheckpointError, InputError
from compress.evaluation.document import FORMAT, Evaluation
from compress.reading import parse_json, regular
from compress.schema import built, fits


def read_evaluation(path: str | Path) -> Evaluation:
    """Raises InputError for a file that is not there, CheckpointError, naming the file and the key, for one that holds
    no evaluation or one of another format."""
    file = regular(Path(path), "evaluation")
    if not file.exists():
        raise InputError(f"evaluation {str(path)!r} does not exist; `compress evaluate --json FILE` writes one")
    found = parse_json(file)
    given = found.get("format") if isinstance(found, dict) else None
    if given != FORMAT:
        raise CheckpointError(
            f"{file}: format is {given!r}; it must be {FORMAT}, as `compress evaluate --json` of this version writes it"
        )
    fits(found, Evaluation, file)
    value: Evaluation = built(found, Evaluation)
    return value
