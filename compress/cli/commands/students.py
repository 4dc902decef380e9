"""Students of a teacher: another model, or a part of the teacher itself."""

from typing import TYPE_CHECKING

from compress.errors import InputError

if TYPE_CHECKING:
    from compress.passes.protocol.base import Pass


def students_of(
    teacher: str,
    student: str | None,
    layers: int | None,
    hidden: int | None,
    structure: str | None,
    trusted: bool,
    calibrated: bool,
) -> tuple[str, tuple["Pass", ...]]:
    """The model to begin with, and the pass that makes it smaller, if one does. calibrated: whether there is data to
    choose by. Raises InputError for what is no one student, and for more blocks or channels than the teacher has."""
    from compress.cli.commands.prune import structure_pass

    part = "--student-layers" if layers is not None else "--student-hidden" if hidden is not None else None
    ways = ((part, part), ("--student", student), ("--structure", structure))
    said = [name for name, value in ways if name is not None and value is not None]
    if len(said) != 1:
        raise InputError(
            f"{' and '.join(said) or 'no student'}: give one of --student MODEL, --student-layers N and "
            "--student-hidden N, --structure PARTS"
        )
    if student is not None:
        return student, ()
    if structure is not None:
        return teacher, (structure_pass(structure, (), {}),)
    words = []
    for option, given, field, of in (
        ("--student-layers", layers, "num_hidden_layers", "blocks"),
        ("--student-hidden", hidden, "hidden_size", "channels"),
    ):
        if given is None:
            continue
        there = _count(teacher, trusted, field)
        if not 0 < given < there:
            raise InputError(f"{option} {given}; {teacher} has {there} {of}: allowed are 1 to {there - 1}")
        words.append(f"layers:{there - given}" if option == "--student-layers" else f"hidden:{(there - given) / there}")
    # Blocks are chosen by what they do to data, channels can be chosen by weights.
    by_weights = () if calibrated or layers is not None else ("importance=magnitude",)
    return teacher, (structure_pass(",".join(words), by_weights, {}),)


def _count(model: str, trusted: bool, field: str) -> int:
    """The number of blocks or channels of a model, by its configuration."""
    from compress.checkpoint.read.pretrained import read_config
    from compress.checkpoint.read.source import find_source

    config = read_config(find_source(model, trusted))
    count = getattr(config.get_text_config() if field == "hidden_size" else config, field, None)
    if not isinstance(count, int):
        raise InputError(f"{model} does not say how large it is ({field}); give --structure")
    return count
