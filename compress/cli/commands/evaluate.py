"""`compress evaluate`: how good a model is beside its original, and what it costs."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import compress
from compress.base.errors import InputError
from compress.base.terminal import say
from compress.cli.exit_codes import GATE, exits_cleanly, fail
from compress.cli.option_groups import bos_option, group, reading_options, task_options
from compress.cli.options import begin, given, write_report

if TYPE_CHECKING:
    from compress.evaluation.document import Evaluation
    from compress.evaluation.optional_measurements import Asked
    from compress.evaluation.probes.asked import Probes


KEPT = ("evaluation.json", "evaluation.html", "evaluation.md")


probe_options = group(
    click.option(
        "--answers",
        type=int,
        metavar="N",
        help="Let the original answer N prompts, and measure where MODEL answers otherwise (the report shows both).",
    ),
    click.option(
        "--answer-tokens", type=int, default=128, show_default=True, help="Most tokens of an answer (--answers)."
    ),
    click.option(
        "--prompts",
        metavar="FILE",
        help="Prompts for --answers: one per line, or .jsonl with messages.  [default: pieces of the text]",
    ),
    click.option(
        "--recall",
        type=int,
        metavar="N",
        help="Hide facts in the text and ask for them, in N windows of each of three kinds.",
    ),
    click.option("--tools", is_flag=True, help="Measure on 50 conversations with tool calls."),
)


asked_options = group(
    click.option("--speed", is_flag=True, help="Measure tokens per second (prompt and decoding) of both models."),
    click.option("--memory", is_flag=True, help="Measure peak memory when loading and running, in a fresh process."),
    click.option(
        "--keep/--no-keep",
        default=True,
        show_default=True,
        help=f"Write {', '.join(KEPT)} into MODEL, if compress wrote that directory.",
    ),
    click.option("--details", is_flag=True, help="Print every figure: percentiles, intervals, KL by confidence."),
)


def _asked(options: dict[str, Any]) -> "tuple[Asked, Probes]":
    """(What is measured by running both models, probes) as the options ask for them, which are taken out. Raises
    InputError for prompts that cannot be read: before any work."""
    from compress.evaluation.optional_measurements import Asked
    from compress.evaluation.quality.prompts import read_prompts

    path = options.pop("prompts")
    of_probes = {name: options.pop(name) for name in OF_PROBES}
    asked = Asked(*(options.pop(name) for name in OF_GENERATION))
    return asked, compress.Probes(**of_probes, prompts=() if path is None else read_prompts(path))


def _asks_itself(tools: bool, answers: int | None, prompts: str | None, **_: Any) -> bool:
    """True where a probe needs no text."""
    return tools or (answers is not None and prompts is not None)


def leave_beside(model: str, evaluation: "Evaluation", document: Mapping[str, Any]) -> Path | None:
    """Leave an evaluation in the directory of its run, as JSON (document), as a page and as text; returns the page. A
    directory that no run wrote is left as it is; where a file of somebody else is in the way, or nothing can be
    written, that is said."""
    from compress.checkpoint.write.directory import is_checkpoint
    from compress.checkpoint.write.late_files import put_beside
    from compress.evaluation.report.card import measured_card
    from compress.evaluation.report.compose import compose
    from compress.evaluation.report.markdown import as_markdown
    from compress.evaluation.report.page import as_html
    from compress.evaluation.report.runs import ReportedRun

    path = Path(model)
    if not is_checkpoint(path):
        return None
    report = compose([ReportedRun(path.absolute().name, path, evaluation, path)])
    if failed := [
        f"Gate failed: {gate['reason']} ({gate['expression']})." for gate in document["gates"] if gate["reason"]
    ]:
        report = replace(report, verdict=" ".join((*failed, report.verdict)))
    content = (json.dumps(document, indent=2) + "\n", as_html(report), as_markdown(report))
    try:
        put_beside(path, dict(zip(KEPT, content, strict=True)) | measured_card(path, report.articles[0].verdict))
    except InputError as error:
        say(f"compress: the evaluation is not kept in {path}: {error}", stderr=True)
        return None
    return path / KEPT[1]


OF_TEXT = ("calibration", "length", "stride", "bos", "samples", "noise_floor", "no_cache")
OF_TASKS = ("tasks", "questions")
OF_GENERATION = ("speed", "memory")
OF_PROBES = ("answers", "answer_tokens", "recall", "tools")
SAID = {"texts": "text", "tasks": "task"}
FOR = {"pairs": "encoders", "labelled": "classifiers"}


@click.command(short_help="Measure perplexity, KL divergence to the original, and size.")
@click.argument("model")
@click.option("--reference", metavar="MODEL", help="The original, to compare with.")
@click.option(
    "--text",
    "texts",
    multiple=True,
    metavar="TEXT",
    help="Held-out text, or token ids. Needed unless --task, --tools, --pairs or --labelled is given. Repeatable.",
)
@task_options
@click.option(
    "--pairs", metavar="FILE", help="For an encoder, instead of --text: .jsonl with sentence1, sentence2, score."
)
@click.option(
    "--labelled",
    metavar="FILE",
    help="For a classifier, instead of --text: .safetensors or .npz with `labels` and the model's inputs.",
)
@click.option(
    "--calibration", metavar="TEXT", help="The calibration text: measured too, to show overfitting (gap to --text)."
)
@click.option(
    "--length",
    "--depth",
    type=int,
    help="Tokens per window of text; longer than 512: figures by position, too.  [default: the model's context, at "
    "most 2048]",
)
@click.option(
    "--stride",
    type=int,
    help="Tokens from one window to the next; below --length, windows overlap.  [default: --length]",
)
@bos_option
@click.option(
    "--dtype",
    type=click.Choice(["stored", "float32", "bfloat16", "float16"]),
    help="Compute dtype; stored: that of the checkpoint.  [default: float32; on a GPU: stored]",
)
@click.option("--samples", type=int, help="Evaluate only N windows of each text, evenly spaced.  [default: all]")
@click.option(
    "--noise-floor",
    is_flag=True,
    help="Also measure the noise floor: KL between the original in float32 and in its own 16 bits.",
)
@click.option("--no-cache", is_flag=True, help="Do not cache the predictions of the original.")
@click.option(
    "--fail-if",
    "gates",
    multiple=True,
    metavar="CONDITION",
    help="Exit with 3 if this holds, or was not measured: 'kl_mean > 0.05', 'kl_mean > 10 * noise', "
    "'tasks.piqa.difference < -0.02', 'tasks.*.interval_high < 0' (worse beyond chance). Repeatable.",
)
@reading_options
@probe_options
@asked_options
@exits_cleanly
def evaluate(
    model: str,
    reference: str | None,
    texts: tuple[str, ...],
    tasks: tuple[str, ...],
    pairs: str | None,
    labelled: str | None,
    gates: tuple[str, ...],
    json_file: str | None,
    quiet: bool,
    keep: bool,
    details: bool,
    **options: Any,
) -> None:
    """Measure perplexity, KL divergence to the original, accuracy on tasks, and size.

    Prints a verdict and a table; --details prints every figure. KL is KL(original || MODEL) in nats per token; ± is one
    standard error over windows of the text; sizes are those of the weight files.
    """
    _check(texts, tasks, _asks_itself(**options), {"pairs": pairs, "labelled": labelled})
    begin()
    from compress.checkpoint.read.source import checkpoint_of
    from compress.cli.progress import reporting
    from compress.evaluation.json_document import as_document
    from compress.evaluation.optional_measurements import with_asked
    from compress.evaluation.quality.encoders import evaluate_encoder
    from compress.evaluation.quality.gates import broken_gates, in_words, parse_gate

    conditions = [parse_gate(gate) for gate in gates]
    asked, probes = _asked(options)
    of_text = {name: options.pop(name) for name in (*OF_TEXT, "questions")}
    cache, dtype = not of_text.pop("no_cache"), arithmetic(options.pop("dtype"))
    with reporting("evaluate", quiet) as reporter:
        if (held := checkpoint_of(Path(model))) != Path(model):
            reporter.note(f"measured on {held}, of which {model} is an export")
        words = {"reference": reference, "reporter": reporter, **options}
        if pairs is not None:
            evaluation = evaluate_encoder(model, pairs, **words)
        elif labelled is not None:
            evaluation = compress.evaluate_classifier(model, labelled, reference=reference, **options)
        else:
            evaluation = compress.evaluate(
                model, text=texts or None, tasks=tasks, cache=cache, dtype=dtype, probes=probes, **of_text, **words
            )
            evaluation = with_asked(evaluation, model, asked=asked, **words)
    results = [gate.check(evaluation) for gate in conditions]
    document = as_document(evaluation, results)
    page = leave_beside(model, evaluation, document) if keep else None
    write_report(json_file, document)
    if not quiet and json_file != "-":
        from compress.cli.evaluation_tables import show_evaluation

        show_evaluation(evaluation, model, reference, details)
        for result in results:
            if result.passed and result.value is not None:
                say(f"gate {result.expression!r} passed: {in_words(result.value)}")
        if not details:
            say(f"more figures: --details{f', or {page}' if page is not None else ''}")
    if broken := broken_gates(results):
        fail("; ".join(broken), GATE)


def arithmetic(name: str | None) -> Any:
    """The dtype of that name, as `compress.evaluate` takes it."""
    import torch

    return name if name in (None, "stored") else getattr(torch, name)


def _check(texts: tuple[str, ...], tasks: tuple[str, ...], asks_itself: bool, others: dict[str, str | None]) -> None:
    """Refuse options that have nothing to do with what is measured. asks_itself: probes that need no text. others:
    files for models of other kinds."""
    files = [name for name, file in others.items() if file is not None]
    if len(files) > 1:
        raise InputError("--pairs is for encoders, --labelled for classifiers; give one of them")
    if not texts and not tasks and not files and not asks_itself:
        raise InputError(
            "nothing to measure on; give --text TEXT, --task FILE, --tools, or several of them (an encoder: --pairs "
            "FILE, a classifier: --labelled FILE)"
        )
    of_language = {"texts": "text", **dict.fromkeys(OF_TEXT, "text"), **dict.fromkeys(OF_TASKS, "tasks")}
    of_language |= dict.fromkeys((*OF_GENERATION, *OF_PROBES, "prompts", "dtype"), "models that generate text")
    for name, about in of_language.items():
        if files and given(name):
            told = SAID.get(name, name).replace("_", "-")
            raise InputError(f"--{files[0]} is for {FOR[files[0]]}; --{told} is for {about}: drop one of them")
    if not texts and (unused := [name for name in OF_TEXT if given(name)]):
        raise InputError(f"--{unused[0].replace('_', '-')} is for text; give --text TEXT, or drop it")
