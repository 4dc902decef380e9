"""Tasks of lm-eval (EleutherAI's lm-evaluation-harness, the extra `eval`) on models that `compress.load` gives.

    from lm_eval import simple_evaluate
    from compress.evaluation.tasks.lm_eval import wrapped
    simple_evaluate(model=wrapped(compress.load("out"), tokenizer), tasks=["piqa"])

Compressed layers run as they do everywhere, the softmax in float32. `ask` returns lm-eval's score of every question, so
that two models are compared in pairs, as on questions from files.
"""

import hashlib
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from compress.base.errors import CompressError, InputError, first_line, install
from compress.base.progress import without_bars
from compress.evaluation.document import Figure, TaskResult
from compress.evaluation.tasks.results import Answers

KIND = "lm-eval"
BATCH = 8  # texts at a time: lm-eval makes the logits of all their tokens
SEED = 1234  # of the examples before a question: lm-eval's own
ENDINGS = (".yaml", ".yml")
NUMBERS = (bool, int, float, np.number)


@dataclass(frozen=True)
class Harness:
    """Tasks of lm-eval under one name, with their questions loaded; the first `questions` of each are asked."""

    name: str
    loaded: Mapping[str, Any]
    questions: int | None

    @property
    def total(self) -> int:
        """The number of questions for one model."""
        counts = [len(task.eval_docs) for task in self.loaded["tasks"].values()]
        return sum(count if self.questions is None else min(count, self.questions) for count in counts)

    def words(self) -> list[str]:
        """Words that identify each question asked."""
        rows = (row for task in self.loaded["tasks"].values() for row in islice(task.eval_docs, self.questions))
        return [json.dumps(row, sort_keys=True, default=repr) for row in rows]

    def fingerprint(self) -> str | None:
        """sha256 of the questions and their protocol; None for few-shot tasks, whose examples are not known here."""
        tasks = self.loaded["tasks"]
        if any(task.get_config("num_fewshot") for task in tasks.values()):
            return None
        how = {name: task.dump_config() for name, task in tasks.items()}
        asked = json.dumps([how, self.words()], sort_keys=True, default=repr)
        return hashlib.sha256(asked.encode()).hexdigest()


def read_harness(name: str, questions: int | None = None) -> Harness:
    """Tasks by their name or group in lm-eval, or by the path of a .yaml file of lm-eval's form.

    Raises InputError where lm-eval is not installed, knows no such task, or cannot get its questions.
    """
    if find_spec("lm_eval") is None:
        raise InputError(f"lm-eval:{name} needs the eval extra; {install('eval')}")
    from lm_eval.tasks import TaskManager

    own = name.endswith(ENDINGS)
    if own and not Path(name).is_file():
        raise InputError(f"lm-eval:{name}: there is no such file; give a task's name, or a .yaml file that defines one")
    with _quiet():
        manager = TaskManager(include_defaults=not own)
        if not own and name not in manager.task_index:
            raise InputError(f"lm-eval knows no task {name!r}; `lm-eval ls tasks` names all")
        try:
            loaded = manager.load([name])
        except Exception as error:  # noqa: BLE001 - tasks are code of many authors, and load data from everywhere
            raise InputError(f"lm-eval:{name} cannot be loaded ({first_line(error)})") from None
    for task in loaded["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=SEED)
    return Harness(name, loaded, questions)


def wrapped(model: nn.Module, tokenizer: Any, batch_size: int = BATCH) -> Any:
    """An lm-eval model (`HFLM`) around a model in memory. batch_size: texts at a time, 1 or more."""
    from lm_eval.models.huggingface import HFLM

    with _quiet():
        return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, softmax_dtype="float32")


def ask(harness: Harness, model: nn.Module, tokenizer: Any) -> list[tuple[TaskResult, Answers]]:
    """The results of every task, one for each way that it reads answers, with the model's answers.

    Raises CompressError where lm-eval fails, InputError for a task without a figure for each question.
    """
    from lm_eval import __version__, evaluate

    try:
        with _quiet():
            evaluated: Any = evaluate(
                lm=wrapped(model, tokenizer),
                task_dict=harness.loaded,
                limit=harness.questions,
                bootstrap_iters=0,
                log_samples=True,
            )
    except Exception as error:
        raise CompressError(f"lm-eval:{harness.name} failed: {first_line(error)}") from error
    results = []
    for name, samples in evaluated["samples"].items():
        filters = list(dict.fromkeys(each["filter"] for each in samples))
        for way in filters:
            samples_of_way = sorted(
                (each for each in samples if each["filter"] == way), key=lambda each: each["doc_id"]
            )
            said = [one[0] for each in samples_of_way for one in each["filtered_resps"] if isinstance(one, tuple)]
            if not all(math.isfinite(number) for number in said if isinstance(number, float)):
                raise CompressError("logits of the model are not finite numbers on these questions; it is damaged")
            metric, answers = _answers(name, samples_of_way, evaluated["higher_is_better"][name])
            asked = TaskResult(
                name=name if len(filters) == 1 else f"{name} ({way})",
                kind=KIND,
                sha256=_fingerprint(samples_of_way),
                questions=len(samples_of_way),
                accuracy=Figure(0.0),
                metric=metric,
                protocol=f"lm-eval {__version__}, {evaluated['n-shot'][name]} examples before a question",
                available=evaluated["n-samples"][name]["original"],
                truncated=None,
            )
            results.append((asked, answers))
    return results


def _answers(name: str, samples: Sequence[Mapping[str, Any]], higher: Mapping[str, bool]) -> tuple[str, Answers]:
    """The name and the values of the first metric that is better when higher and has a number for every question."""
    names = samples[0]["metrics"]
    plain = [each for each in names if all(isinstance(sample[each], NUMBERS) for sample in samples)]
    metric = next((each for each in plain if higher.get(each)), None)
    if metric is None:
        raise InputError(
            f"lm-eval:{name} has no figure for each question of which more is better (it has {', '.join(names)}); "
            "leave it out, or run it with lm_eval and compress.evaluation.tasks.lm_eval.wrapped"
        )
    values = {each: np.array([float(sample[each]) for sample in samples]) for each in plain}
    # lm-eval's perplexity is exp of minus the mean of what it keeps of a question.
    surprisal = -values["perplexity"] if "perplexity" in values else None
    word = {"acc": "accuracy"}.get(metric, metric)
    return word, Answers(values[metric], values.get("acc_norm") if metric == "acc" else None, surprisal)


def _fingerprint(samples: Sequence[Mapping[str, Any]]) -> str:
    asked = [f"{each['doc_hash']} {each['prompt_hash']} {each['target_hash']}" for each in samples]
    return hashlib.sha256("\n".join(asked).encode()).hexdigest()


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress lm-eval's progress bars and log messages below errors."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with without_bars():
            yield
    finally:
        logger.setLevel(before)
