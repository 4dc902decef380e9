"""`evaluate`: quality and size of a model, beside its original."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from compress.base.device import find_device
from compress.base.errors import InputError
from compress.base.progress import Counted, Reporter, Silent, tell
from compress.checkpoint.read.source import find_source
from compress.evaluation.document import (
    Evaluation,
    Figure,
    Generation,
    Role,
    SensitivityResult,
    SizeResult,
    TaskResult,
    TextResult,
)
from compress.evaluation.probes.answers import Prompts
from compress.evaluation.probes.asked import Probes
from compress.evaluation.provenance import circumstances, missing_of, name_model, run_of, size_of
from compress.evaluation.quality.generations import beside
from compress.evaluation.quality.language import (
    Model,
    common_vocabulary,
    config_of,
    first_tokenizer,
    load_predictor,
    open_model,
)
from compress.evaluation.quality.noise import own_dtype
from compress.evaluation.quality.overflow import watch_overflow
from compress.evaluation.quality.predictor import measure, predictor
from compress.evaluation.quality.reference_states import Note
from compress.evaluation.quality.texts import Text, gap, load_text
from compress.evaluation.reference_model import Original
from compress.evaluation.tasks.evaluate import TokenizedTasks, ask_tasks, compare_tasks, prepare_tasks, read_tasks
from compress.model.calls import evaluating

Given = str | Tensor
NO_PROBES = Probes()
NO_TEXT = "no text was given"


def _texts(
    held_out: Given | Sequence[Given],
    calibration: Given | None,
    tokenizer: Callable[[], Any],
    ours: Model,
    theirs: Model | None,
    note: Note,
    probes: Probes = NO_PROBES,
    **windows: Any,
) -> tuple[list[Text], Prompts | None]:
    """(All texts in windows, those that are held out first; prompts that the original has to answer). Raises InputError
    for texts that no model could be measured on."""
    several = [held_out] if isinstance(held_out, str | Tensor) else list(held_out)
    if not several and (unused := [name for name, given in windows.items() if given is not None]):
        raise InputError(f"{unused[0]} is for text, and there is none; give one, or leave it out")
    config = config_of(ours)
    given: list[tuple[Given, Role]] = [(text, "held-out") for text in several]
    given += [] if calibration is None else [(calibration, "calibration")]
    texts = [load_text(text, role, tokenizer, config, **windows) for text, role in given]
    texts += probes.texts(texts[0] if several else None, tokenizer, config)
    if theirs is not None and (shared := common_vocabulary(ours, theirs)) is not None:
        texts = [text.among(shared) for text in texts]
        note(f"one model has more tokens than the other: compared over the {shared} that both have")
    for remark in (remark for text in texts for remark in text.notes):
        note(remark)
    return texts, probes.unwritten(texts[0] if several else None, tokenizer, config)


def _tasks(
    tasks: Sequence[str | Path], questions: int | None, tokenizer: Callable[[], Any], *models: Model | None
) -> TokenizedTasks | None:
    """Tasks as tokens for the models; None where there are none."""
    asked = read_tasks(tasks, questions)
    configs = [config_of(each) for each in models if each is not None]
    return prepare_tasks(asked, tokenizer(), configs) if asked else None


def _arithmetic(dtype: torch.dtype | Literal["stored"] | None, device: torch.device) -> torch.dtype | None:
    """The dtype of the arithmetic; None for the one that each model is stored in."""
    if dtype is None:
        return torch.float32 if device.type == "cpu" else None
    return None if isinstance(dtype, str) else dtype


def evaluate(
    model: nn.Module | str | Path,
    *,
    reference: nn.Module | str | Path | None = None,
    text: Given | Sequence[Given] | None = None,
    calibration: Given | None = None,
    length: int | None = None,
    stride: int | None = None,
    bos: str | None = None,
    samples: int | None = None,
    noise_floor: bool = False,
    cache: bool = True,
    tasks: Sequence[str | Path] = (),
    questions: int | None = None,
    probes: Probes = NO_PROBES,
    tokenizer: Any = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | Literal["stored"] | None = None,
    trust_remote_code: bool = False,
    reporter: Reporter | None = None,
) -> Evaluation:
    """Measure a language model, compressed or not, on held-out text or token ids [samples, length], and on tasks.

    model, reference: directories, hub ids, 'demo' or models in memory. text: as `quantize` takes calibration, one or
    several ('demo'; none beside tasks). calibration: the model's calibration data, to measure on as well
    (`Evaluation.gap`). length: tokens per window of text (the model's context, at most 2048). stride: tokens between
    the beginnings of windows, 1 to length; fewer than length: overlapping windows, of which only new tokens are
    predicted. bos: as in `quantize`. samples: at most so many windows of each text. noise_floor: measure the reference
    against itself, too, in the 16 bits that it is stored in. cache: store the outputs of a reference that is given by
    name, or read them where they are stored, with the stored measurements of `fit`
    (`Evaluation.sensitivity`). tasks: .jsonl files of questions, in the forms of `compress.evaluation.tasks.questions`,
    or lm-eval:NAME. questions: at most so many of each, the first ones. probes: answers of the
    reference, facts to recall, tool calls. tokenizer: of models in memory, where text or
    tasks are words. dtype: of the arithmetic (float32 on a CPU, the checkpoint's own on a GPU and for "stored"); models
    in memory are taken as they are. trust_remote_code: run Python code that comes with models given by name.

    Raises InputError for models that predict no next token, and for text and tasks that cannot be used.
    """
    target = find_device(device)
    work = _arithmetic(dtype, target)
    ours = open_model(model, trust_remote_code)
    theirs = None if reference is None else open_model(reference, trust_remote_code)
    text = text if text is not None else [] if tasks or probes.need_no_text else "demo"
    probes.check(theirs is not None, len(text) > 0)
    if noise_floor and (theirs is None or not len(text)):
        raise InputError("the noise floor is the reference's against itself on a text; give a reference and a text")
    reporter = reporter or Silent()

    def words() -> Any:
        return first_tokenizer(ours, theirs) if tokenizer is None else tokenizer

    prepared = _tasks(tasks, questions, words, ours, theirs)
    windows = {"length": length, "samples": samples, "stride": stride, "bos": bos}
    texts, unwritten = _texts(text, calibration, words, ours, theirs, reporter.note, probes, **windows)
    if not texts and prepared is None and unwritten is None:
        raise InputError("text is an empty list; give one text or more")
    how: dict[str, Any] = {"dtype": work, "device": target}
    more: dict[str, Any] = {"cache": cache, "tasks": prepared, "note": reporter.note}
    original = None if theirs is None else Original(theirs, texts, unwritten, **more, **how)
    return _evaluate(ours, original, texts, prepared, words, noise_floor=noise_floor, reporter=reporter, **how)


def check_asked(
    model: str | Path,
    *,
    text: Given | Sequence[Given] | None = None,
    length: int | None = None,
    bos: str | None = None,
    samples: int | None = None,
    tasks: Sequence[str | Path] = (),
    questions: int | None = None,
    trust_remote_code: bool = False,
) -> list[str | None]:
    """Refuse text and tasks that could not be asked of a checkpoint, without loading its weights; raises the errors of
    `evaluate`. Returns fingerprints of the tasks: None for one whose questions are not fully known."""
    source = find_source(str(model), trust_remote_code)
    words = partial(first_tokenizer, source)
    windows: dict[str, Any] = {"length": length, "samples": samples, "stride": None, "bos": bos}
    _texts([] if text is None else text, None, words, source, None, Silent().note, **windows)
    prepared = _tasks(tasks, questions, words, source)
    return [] if prepared is None else [task.fingerprint() for task in prepared.tasks]


def _evaluate(
    ours: Model,
    original: Original | None,
    texts: Sequence[Text],
    prepared: TokenizedTasks | None,
    tokenizer: Callable[[], Any],
    *,
    noise_floor: bool,
    dtype: torch.dtype | None,
    device: torch.device,
    reporter: Reporter,
) -> Evaluation:
    """A model on texts and tasks that are read and checked; an original has further texts, if it has answered."""
    texts = texts if original is None else original.texts
    size, (recipe, run) = size_of(ours), run_of(ours)
    vocabulary = config_of(ours).vocab_size
    counted = Counted(reporter, sum(len(each.windows.spans) for each in texts) * (2 if noise_floor else 1))
    step = partial(counted, what="windows")
    floors = original.floors(vocabulary, step) if original is not None and noise_floor else None
    network = load_predictor(ours, dtype, device)
    if texts:
        tokens = sum(span.end - span.begin for each in texts for span in each.windows.spans)
        tell(reporter, "tokens", tokens / sum(len(each.windows.spans) for each in texts))
        counted(0, "windows" if counted.done else "")
    with watch_overflow(network, own_dtype(ours)) as overflow:
        results = _measure(network, texts, vocabulary, original, floors if isinstance(floors, list) else None, step)
    seen = {"model": overflow} | ({} if original is None else {"reference": original.overflow})
    overflows = {f"{who} in float16": each.said for who, each in seen.items() if each.said is not None}
    for what, why in overflows.items():
        reporter.note(f"{what}: {why}")
    tell(reporter, "tokens", 0)
    sensitive = None if original is None else original.sensitivity
    missing = _missing(original, size, floors, texts) | overflows
    return Evaluation(
        model=name_model(ours, network, size),
        texts=results,
        tasks=_answers(prepared, network, original, reporter),
        reference=None if original is None else original.name,
        recipe=recipe,
        sensitivity=sensitive if isinstance(sensitive, SensitivityResult) else None,
        size=size,
        reference_size=None if original is None else original.size,
        run=run,
        gap=gap(results),
        generations=_own_answers(network, original, tokenizer, missing),
        missing=missing,
        provenance=circumstances(device),
    )


def _answers(
    prepared: TokenizedTasks | None, network: nn.Module, original: Original | None, reporter: Reporter
) -> list[TaskResult]:
    """Results of the tasks: the model's answers, compared with its original's."""
    if prepared is None:
        return []
    step = Counted(reporter, prepared.total + (0 if original is None else original.questions))
    step(0, "")
    ours = ask_tasks(prepared, network, step)
    return compare_tasks(ours, None if original is None else original.answers(step))


def _own_answers(
    network: nn.Module, original: Original | None, tokenizer: Callable[[], Any], missing: dict[str, str]
) -> list[Generation]:
    """Some of the original's answers with the model's own beside them; where the model gives none, the reason is added
    to `missing`."""
    if original is None or original.prompts is None:
        return []
    try:
        return beside(network, tokenizer(), original.prompts.prompts, original.written)
    except InputError as error:
        missing["own answers"] = str(error)
        return []


def _missing(
    original: Original | None, size: SizeResult | None, floors: object, texts: Sequence[Text]
) -> dict[str, str]:
    """{measurement: reason why it is missing}. floors: the reason where a requested noise floor could not be
    measured."""
    missing = missing_of(original is not None, size) | ({} if texts else {"texts": NO_TEXT})
    if original is not None and isinstance(original.sensitivity, str):
        missing["sensitivity"] = original.sensitivity
    return {**missing, "noise": floors} if isinstance(floors, str) else missing


def _measure(
    network: nn.Module,
    texts: Sequence[Text],
    vocabulary: int,
    original: Original | None,
    floors: Sequence[dict[str, Figure]] | None,
    step: Callable[[int], None],
) -> list[TextResult]:
    """The figures of a model on every text, each with its noise floor."""
    results, narrow = [], next(network.parameters()).dtype == torch.float16
    with evaluating(network):
        for i, text in enumerate(texts):
            asked = predictor(network, text.windows)
            with nullcontext() if original is None else original.on(i) as says:
                found = measure(asked, text.windows, vocabulary, says, step, narrow, text.parts)
            results.append(text.result(found, None if floors is None else floors[i]))
    return results
