"""`compress qat` and `compress distill`: passes, then training of what they left."""

from typing import TYPE_CHECKING, Any

import click

from compress.base.errors import InputError
from compress.cli.commands.quantize import added_passes, chosen_options
from compress.cli.exit_codes import exits_cleanly
from compress.cli.option_groups import OF_A_METHOD, added_options, group, method_options, setting_option
from compress.cli.run_command import check_processes, run, run_options, split_settings

if TYPE_CHECKING:
    from compress.passes.protocol.base import Pass


OF_TRAINING = ("steps", "rows", "learning_rate", "task")
training_options = group(
    click.option("--steps", type=int, help="Steps of the optimizer.  [default: 200]"),
    click.option("--rows", type=int, help="Batch size: samples per step, over all processes.  [default: 16]"),
    click.option(
        "--learning-rate",
        type=float,
        help="Peak learning rate of weights.  [default: found by a range test of 31 steps]",
    ),
    click.option(
        "--task", type=float, help="Weight of the next-token loss; the distillation loss has weight 1.  [default: 0]"
    ),
    click.option(
        "--train",
        "training_settings",
        multiple=True,
        metavar="NAME=VALUE",
        help="Any option of training, like --train schedule=linear: see `compress methods train`. Repeatable.",
    ),
)


def training_pass(options: dict[str, Any], settings: tuple[str, ...], **fixed: Any) -> "Pass":
    """The pass that trains, of the options of a command; takes them out of `options`."""
    from compress.passes.protocol.recipe import make_pass

    chosen = {key: value for key in OF_TRAINING if (value := options.pop(key)) is not None}
    said = split_settings(settings, {**chosen, **fixed})
    if {"steps", "minutes"} <= said.keys():
        raise InputError("steps and minutes are two ways to say how long training takes; give one of them")
    return make_pass("train", said)


@click.command(short_help="Quantization-aware training (QAT).")
@click.argument("model")
@click.option(
    "--method",
    default="gptq",
    show_default=True,
    help="The method that quantizes before training: see `compress methods`.",
)
@method_options
@click.option(
    "--teacher",
    help="Teacher: original, none, a model, or cached logits (FILE.safetensors).  [default: original]",
)
@added_options
@training_options
@setting_option
@run_options
@exits_cleanly
def qat(
    model: str,
    method: str,
    teacher: str | None,
    kv_cache: str | None,
    embeddings: str | None,
    training_settings: tuple[str, ...],
    settings: tuple[str, ...],
    fsdp: bool | str,
    **options: Any,
) -> None:
    """Quantization-aware training: quantize MODEL, train it with quantized weights, and write the result.

    \b
    compress qat demo --scheme w2a16 --calibration demo --output out
    compress qat MODEL --scheme w4a8 --calibration TEXT --output out
    torchrun --nproc-per-node 8 -m compress qat MODEL --fsdp ...
    """
    check_processes(fsdp, options["device"])
    taught: dict[str, Any] = {} if teacher is None else {"teacher": teacher}
    if teacher == "none":
        taught |= {"logits": 0.0}
        options["task"] = 1.0 if options["task"] is None else options["task"]
    training = training_pass(options, training_settings, **taught)
    from compress.passes.protocol.recipe import make_pass

    chosen = chosen_options({key: options.pop(key) for key in OF_A_METHOD}, settings)
    passes = (make_pass(method, chosen), training, *added_passes(embeddings, kv_cache, scales=chosen.get("scales")))
    run("train", model, passes, f"method {method!r}", fsdp=fsdp, **options)


@click.command(short_help="Train a smaller model to predict what a teacher predicts.")
@click.argument("teacher")
@click.option("--student", metavar="MODEL", help="The student, another model.  [default: a part of the teacher]")
@click.option("--student-layers", type=int, metavar="N", help="Keep N blocks of the teacher: the most important ones.")
@click.option(
    "--student-hidden",
    type=int,
    metavar="N",
    help="Hidden size of the student; may be combined with --student-layers.",
)
@click.option("--structure", metavar="PARTS", help="Parts of the teacher to remove: see `compress prune --structure`.")
@training_options
@run_options
@exits_cleanly
def distill(
    teacher: str,
    student: str | None,
    student_layers: int | None,
    student_hidden: int | None,
    structure: str | None,
    training_settings: tuple[str, ...],
    fsdp: bool | str,
    **options: Any,
) -> None:
    """Train a student to predict what TEACHER predicts, and write it.

    \b
    compress distill demo --student-layers 2 --calibration demo --output out
    compress distill TEACHER --student-hidden 384 --calibration TEXT --output out
    compress distill TEACHER --student MODEL --training TEXT --output out
    compress distill TEACHER --structure channels --calibration TEXT --output out
    compress distill ENCODER --structure layers:3 --train logits=0 \\
        --train features=1 --calibration TEXT --output out
    compress distill TEACHER --student MODEL --train teacher=said.safetensors \\
        --training TEXT --output out
    """
    check_processes(fsdp, options["device"])
    trusted = options["trust_remote_code"]
    calibrated = options["calibration"] is not None
    model, passes = students_of(teacher, student, student_layers, student_hidden, structure, trusted, calibrated)
    said = any(setting.startswith("teacher=") for setting in training_settings)
    fixed = {} if student is None or said else {"teacher": teacher}
    training = training_pass(options, training_settings, **fixed)
    run("distill", model, (*passes, training), "distill", fsdp=fsdp, **options)


def students_of(
    teacher: str,
    student: str | None,
    layers: int | None,
    hidden: int | None,
    structure: str | None,
    trusted: bool,
    calibrated: bool,
) -> tuple[str, tuple["Pass", ...]]:
    """The student, another model or a part of the teacher: the model to begin with, and the pass that makes it smaller,
    if one does. calibrated: whether there is data to choose by. Raises InputError for what is no one student, and for
    more blocks or channels than the teacher has."""
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
    for option, count, field, of in (
        ("--student-layers", layers, "num_hidden_layers", "blocks"),
        ("--student-hidden", hidden, "hidden_size", "channels"),
    ):
        if count is None:
            continue
        there = _count(teacher, trusted, field)
        if not 0 < count < there:
            raise InputError(f"{option} {count}; {teacher} has {there} {of}: allowed are 1 to {there - 1}")
        words.append(f"layers:{there - count}" if option == "--student-layers" else f"hidden:{(there - count) / there}")
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
