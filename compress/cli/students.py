"""Who learns from a teacher: another model, or a part of itself."""

from typing import TYPE_CHECKING

from compress.errors import InputError

if TYPE_CHECKING:
    from compress.passes.base import Pass


def students_of(
    teacher: str, student: str | None, layers: int | None, structure: str | None, trusted: bool
) -> tuple[str, tuple["Pass", ...]]:
    """The model to begin with, and the pass that makes it smaller, if one does. Raises InputError for what is no one
    student, and for more blocks than the teacher has."""
    from compress.cli.prune import structure_pass

    said = [
        name
        for name, value in (("--student", student), ("--student-layers", layers), ("--structure", structure))
        if value
    ]
    if len(said) != 1:
        raise InputError(
            f"{' and '.join(said) or 'no student'}: give one of --student MODEL, --student-layers N, --structure PARTS"
        )
    if student is not None:
        return student, ()
    if structure is not None:
        return teacher, (structure_pass(structure, (), {}),)
    assert layers is not None
    blocks = _blocks(teacher, trusted)
    if not 0 < layers < blocks:
        raise InputError(f"--student-layers {layers}; {teacher} has {blocks}: allowed are 1 to {blocks - 1}")
    return teacher, (structure_pass(f"layers:{blocks - layers}", (), {}),)


def _blocks(model: str, trusted: bool) -> int:
    """How many blocks a model has, by its configuration."""
    from compress.checkpoint.pretrained import read_config
    from compress.checkpoint.source import find_source

    config = read_config(find_source(model, trusted))
    count = getattr(config, "num_hidden_layers", None)
    if not isinstance(count, int):
        raise InputError(f"{model} does not say how many blocks it has (num_hidden_layers); give --structure layers:N")
    return count
