"""A cache of the reference's answers to tasks: a file for each task, beside its states on texts
(`compress.evaluation.quality.reference_states`).

    KEY.answers.json   {"format", "asked": [what was asked, as a TaskResult], "answers": [scores of questions]}

KEY is a hash of what answers depend on: the weights and the configuration, the dtype and the kind of device, the
questions as tokens (of lm-eval's tasks: their definition, their rows, and these as tokens), the versions of the
libraries. Damaged files are computed anew, with a note.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from compress.base.errors import CheckpointError
from compress.base.regular_files import parse_json
from compress.base.schema import built, fits
from compress.checkpoint.files import fingerprint, write_json
from compress.checkpoint.read.source import Source
from compress.evaluation.document import TaskResult
from compress.evaluation.quality import reference_states
from compress.evaluation.quality.kl_and_perplexity import Values
from compress.evaluation.quality.reference_states import Note
from compress.evaluation.tasks.likelihood import ContinuationPair
from compress.evaluation.tasks.lm_eval import Harness
from compress.evaluation.tasks.questions import Task
from compress.evaluation.tasks.results import Answers

FORMAT = 1
Answered = list[tuple[TaskResult, Answers]]


@dataclass(frozen=True)
class _Scores:
    """JSON of `Answers`."""

    score: list[float]
    norm: list[float] | None
    surprisal: list[float] | None


@dataclass(frozen=True)
class _File:
    """The content of KEY.answers.json."""

    format: int
    asked: list[TaskResult]
    answers: list[_Scores]


def place_of(
    source: Source, parameter: Tensor, task: Task | Harness, pairs: Sequence[ContinuationPair] | None, tokenizer: Any
) -> Path | None:
    """The path KEY.answers.json of this model's answers to a task; None where it is not known what they depend on.
    parameter: one of the model as it is asked. pairs: the questions as tokens, of files."""
    asked = task.fingerprint()
    if asked is None:
        return None
    if isinstance(task, Harness):
        tokens: Any = tokenizer(task.words(), return_attention_mask=False)["input_ids"]
    else:
        tokens = [(pair.context, pair.continuation) for pair in pairs or []]
    about = reference_states.model_key(source, parameter, *(["lm-eval"] if isinstance(task, Harness) else []))
    key = {**about, "task": asked, "tokens": hashlib.sha256(json.dumps(tokens).encode()).hexdigest(), "format": FORMAT}
    return reference_states.folder() / f"{fingerprint(key)}.answers.json"


def read_answers(place: Path, note: Note) -> Answered | None:
    """The cached answers; None where there are none, or with a note where they are damaged."""
    if not place.exists():
        return None
    try:
        if (why := reference_states.not_believed(place)) is not None:
            note(f"what was kept of the reference's answers is made anew: {why}")
            return None
        found = parse_json(place)
        fits(found, _File, place)
        file: _File = built(found, _File)
        if file.format != FORMAT or len(file.asked) != len(file.answers):
            raise CheckpointError(f"{place} is not as this version writes it")
        answered = [(asked, _answers(scores)) for asked, scores in zip(file.asked, file.answers, strict=True)]
        if any(len(answers.score_N) != asked.questions for asked, answers in answered):
            raise CheckpointError(f"{place} has not an answer for each question")
    except (CheckpointError, OSError) as error:
        note(f"what was kept of the reference's answers is damaged and made anew ({error})")
        return None
    return answered


def keep_answers(place: Path, asked: Answered, note: Note) -> None:
    """Cache a reference's answers; a disk error is noted."""
    scores = [_Scores(as_list(a.score_N), as_list(a.norm_N), as_list(a.surprisal_N)) for _, a in asked]
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        write_json(place, asdict(_File(FORMAT, [found for found, _ in asked], scores)))
    except OSError as error:
        note(f"what the reference answers is not kept in {place.parent}: {error.strerror}")


def as_list(values_N: Values | None) -> Any:
    return None if values_N is None else values_N.tolist()


def _answers(scores: _Scores) -> Answers:
    listed = (scores.score, scores.norm, scores.surprisal)
    score_N, norm_N, surprisal_N = (None if each is None else np.array(each, float) for each in listed)
    assert score_N is not None
    return Answers(score_N, norm_N, surprisal_N)
