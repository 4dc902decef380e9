"""A model card: README.md with the front matter that the hub reads, from the same data as the report."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from compress.checkpoint.read.source import find_source
from compress.checkpoint.seal import is_as_written
from compress.checkpoint.write.manifest import read_record
from compress.evaluation.document import Evaluation, TextResult
from compress.evaluation.report import wording
from compress.evaluation.report.compose import article as article_of
from compress.evaluation.report.content import Article
from compress.evaluation.report.markdown import body, plain
from compress.evaluation.report.runs import ReportedRun
from compress.evaluation.report.verdict import held_out
from compress.weights.own_config import is_own

CARD = "README.md"
MADE_OF = "Made of "  # begins a line of an export's card, which its verdict follows
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w.-]{1,96}")
METRICS = {"perplexity": "perplexity", "kl_mean": "kl_divergence", "same_top": "same_top_token"}
PIPELINES = {"ForCausalLM": "text-generation", "ForSequenceClassification": "text-classification"}
OPTIONS = ("scheme", "pattern")
LIBRARIES = {"gguf": "gguf", "onnx": "onnx"}  # of exports, by the end of their main file


def card_of_run(run: ReportedRun, name: str | None = None, place: str = "PATH", base_model: str | None = None) -> str:
    """The card of a run with a directory. name: by default that of the run; place, base_model: as in `as_card`."""
    about, own = article_of(run), is_own(find_source(str(run.directory)).quantization)
    return as_card(about if name is None else replace(about, name=name), run.evaluation, own, place, base_model)


def card_of_export(
    record: Mapping[str, Any],
    name: str,
    base_model: str | None = None,
    made: Sequence[str] = (),
    commands: Sequence[str] = (),
) -> str:
    """A short card: which file other programs open, how it was made, how it is run, and what it lacks. record: of the
    export. made: sentences on the run before it. commands: lines for a shell."""
    kind = record["identity"]["export"]
    main = next((file for file in record["files"] if file.rpartition(".")[2] in LIBRARIES), None)
    front: dict[str, Any] = {"library_name": LIBRARIES.get((main or "").rpartition(".")[2], "transformers")}
    if base_model is not None:
        front |= {"base_model": base_model, "base_model_relation": "quantized"}
    front["tags"] = ["compress", kind]
    lines = ["---", yaml.safe_dump(front, sort_keys=False).rstrip("\n"), "---", "", f"# {plain(name)}", ""]
    lines += [f"{f'`{main}`' if main else 'This checkpoint'} was exported by compress {record['compress']}.", ""]
    lines += [*map(plain, made), ""] if made else []
    lines += ["## Use", "", "```", *commands, "```", ""] if commands else []
    lines += [f"- {plain(note)}" for note in record["notes"]]
    return "\n".join(lines).rstrip("\n") + "\n"


def measured_card(directory: Path, verdict: str) -> dict[str, str]:
    """{README.md: text} of an export whose card nobody has edited, with a verdict in the place of its last, or of the
    sentence that there is none; else nothing."""
    card = directory / CARD
    if not is_as_written(directory, read_record(directory), CARD):
        return {}
    lines = card.read_text(encoding="utf-8").split("\n")
    made = [at for at, line in enumerate(lines) if line.startswith(MADE_OF)]
    for at in made:
        lines[at + 1] = plain(verdict)
    return {CARD: "\n".join(lines)} if made else {}


def as_card(
    article: Article, evaluation: Evaluation, own_words: bool, place: str = "PATH", base_model: str | None = None
) -> str:
    """The whole file. own_words: True for a checkpoint that only `compress.load` can read, not transformers. place:
    where the snippet loads it from. base_model: the original's name on the hub, where the reference has none."""
    front = yaml.safe_dump(
        front_matter(article.name, evaluation, own_words, base_model), sort_keys=False, allow_unicode=True
    )
    lines = ["---", front.rstrip("\n"), "---", "", f"# {plain(article.name)}", "", plain(article.verdict), ""]
    if evaluation.reference is not None:
        original = plain(wording.name(evaluation.reference.name))
        lines += [f"Compressed from {original}: {plain(article.recipe) or 'see below'}.", ""]
    lines += ["## Use", "", "```python", *_snippet(own_words, place), "```", ""]
    return "\n".join([*lines, *body(article, 2)]).rstrip("\n") + "\n"


def front_matter(name: str, evaluation: Evaluation, own_words: bool, base_model: str | None = None) -> dict[str, Any]:
    """The metadata that the hub reads. The base model is included where its name is a name of the hub."""
    front: dict[str, Any] = {"library_name": "compress" if own_words else "transformers"}
    base = base_model or ("" if evaluation.reference is None else evaluation.reference.name)
    if HUB_ID.fullmatch(base):
        front |= {"base_model": base, "base_model_relation": "quantized"}
    kind = next((task for end, task in PIPELINES.items() if evaluation.model.architecture.endswith(end)), None)
    if kind is not None:
        front["pipeline_tag"] = kind
    front["tags"] = ["compress", *_tags(evaluation.recipe)]
    text = held_out(evaluation)
    if text is not None:
        front["model-index"] = [{"name": name, "results": _results(evaluation, text, kind)}]
    return front


def _tags(recipe: Mapping[str, Any] | None) -> list[str]:
    """The methods and the schemes of a recipe."""
    tags: list[str] = []
    for step in (recipe or {}).get("passes") or ():
        for method, options in step.items() if isinstance(step, dict) else ():
            if method in ("only", "but"):
                continue
            told = [options.get(key) for key in OPTIONS] if isinstance(options, dict) else []
            tags += [wording.name(each) for each in (method, *told) if isinstance(each, str) and each]
    return list(dict.fromkeys(tags))


def _results(evaluation: Evaluation, text: TextResult, kind: str | None) -> list[dict[str, Any]]:
    """Figures in the form of a model index: on the text, and of every task."""
    metrics = [
        {"type": kind_of, "value": float(f"{figure.value:.6g}")}
        for key, kind_of in METRICS.items()
        if (figure := text.figures.get(key)) is not None and math.isfinite(figure.value)
    ]
    task = {"type": kind or "other"}
    results = [{"task": task, "dataset": {"name": wording.name(text.name), "type": "text"}, "metrics": metrics}]
    for each in evaluation.tasks:
        accuracy = [{"type": "accuracy", "value": float(f"{each.accuracy.value:.6g}")}]
        results.append(
            {"task": task, "dataset": {"name": wording.name(each.name), "type": each.kind}, "metrics": accuracy}
        )
    return results


def _snippet(own_words: bool, place: str) -> list[str]:
    own = ["import compress", "", f'model = compress.load("{place}")  # runs as it is stored, on our kernels']
    if own_words:
        return own
    theirs = [
        "from transformers import AutoModelForCausalLM",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{place}")  # with compressed-tensors installed',
    ]
    return [*own, "", "# or", *theirs]
