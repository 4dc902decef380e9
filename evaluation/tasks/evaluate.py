"""Tasks: the share of questions that a model answers rightly, beside its original on the same ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.base.errors import InputError
from compress.checkpoint.read.tokenizer_check import tokenizing
from compress.data.tokens import check_vocabulary
from compress.evaluation.document import Figure, TaskResult
from compress.evaluation.tasks.likelihood import ContinuationPair, count_appended, encode, likelihoods, window_of
from compress.evaluation.tasks.lm_eval import Harness, ask, read_harness
from compress.evaluation.tasks.questions import Task, read_task
from compress.evaluation.tasks.results import Answers, adjust_p_values, answers_of, result_of
from compress.model.calls import evaluating

HARNESS = "lm-eval:"
QUICK = ("lambada_openai", "piqa", "arc_easy", "hellaswag")
SETS = {"quick": QUICK, "standard": (*QUICK, "arc_challenge", "winogrande", "gsm8k", "ifeval")}  # of tasks of lm-eval
Asked = tuple[TaskResult, Answers]


def read_tasks(tasks: Sequence[str | Path], questions: int | None = None) -> list[Task | Harness]:
    """Read and check tasks before any model is loaded.

    tasks: files of questions (`compress.evaluation.tasks.questions`), lm-eval:NAME for a task of lm-eval, or
    lm-eval:quick and lm-eval:standard for the tasks of `SETS`. questions: at most so many of each, the first ones.
    Raises InputError for tasks that cannot be asked.
    """
    if questions is not None and not tasks:
        raise InputError("questions are for tasks, and there is none; give a task, or leave questions out")
    if isinstance(tasks, str | Path):
        raise InputError(f"tasks: {str(tasks)!r} is one; give a list of them, [{str(tasks)!r}]")
    if questions is not None and (isinstance(questions, bool) or not isinstance(questions, int) or questions < 1):
        raise InputError(f"questions {questions!r}; allowed: 1 or more")
    of_sets = {HARNESS + name: [HARNESS + each for each in names] for name, names in SETS.items()}
    named = [name for each in map(str, tasks) for name in of_sets.get(each, [each])]
    twice = next((each for each in named if named.count(each) > 1), None)
    if twice is not None:
        raise InputError(f"task {twice!r} is given twice; name each once")
    read = [
        read_harness(each.removeprefix(HARNESS), questions) if each.startswith(HARNESS) else read_task(each, questions)
        for each in named
    ]
    short = [each.name for each in read]  # files of one name, in several folders, are called by their paths
    return [
        replace(each, name=name) if isinstance(each, Task) and short.count(each.name) > 1 else each
        for each, name in zip(read, named, strict=True)
    ]


@dataclass(frozen=True)
class TokenizedTasks:
    """Tasks as tokens: pairs of a context and a choice for those from files, None for those of lm-eval."""

    tasks: Sequence[Task | Harness]
    tokenizer: Any
    pairs: Sequence[list[ContinuationPair] | None]

    @property
    def total(self) -> int:
        """The number of steps to ask one model everything."""
        return sum(map(self.steps, range(len(self.tasks))))

    def steps(self, i: int) -> int:
        """The number of steps of task i."""
        task = self.tasks[i]
        return task.total if isinstance(task, Harness) else len(self.pairs[i] or [])


def prepare_tasks(tasks: Sequence[Task | Harness], tokenizer: Any, configs: Sequence[Any]) -> TokenizedTasks:
    """Tasks for models of these configurations, which are shown the same tokens: the smallest window counts.

    Raises InputError for answers longer than that window, and for tokens that are not in the vocabulary.
    """
    window = min((found for each in configs if (found := window_of(each)) is not None), default=None)
    vocabulary = min(each.vocab_size for each in configs)
    pairs = [encode_task(task, tokenizer, window, vocabulary) if isinstance(task, Task) else None for task in tasks]
    return TokenizedTasks(tasks, tokenizer, pairs)


@torch.no_grad()
def ask_tasks(prepared: TokenizedTasks, model: nn.Module, step: Callable[[int, str], None]) -> list[Asked]:
    """The results of all tasks, with a model's answers. step(n, name): n more of `total` steps are done, of that task.

    Raises CompressError for a model that gives no numbers.
    """
    return [each for i in range(len(prepared.tasks)) for each in ask_task(prepared, i, model, step)]


@torch.no_grad()
def ask_task(prepared: TokenizedTasks, i: int, model: nn.Module, step: Callable[[int, str], None]) -> list[Asked]:
    """The results of task i alone; a task of lm-eval may have several."""
    task, pairs = prepared.tasks[i], prepared.pairs[i]
    with evaluating(model):
        if isinstance(task, Task):
            assert pairs is not None
            return [_ask(task, pairs, model, step)]
        with tokenizing(prepared.tokenizer, task.name, task.words()):
            found = ask(task, model, prepared.tokenizer)
        step(task.total, task.name)
    return found


def compare_tasks(ours: Sequence[Asked], theirs: Sequence[Asked] | None = None) -> list[TaskResult]:
    """The figures of a model, paired with those of the reference where there is one."""
    others = [None] * len(ours) if theirs is None else [answers for _, answers in theirs]
    return adjust_p_values([result_of(asked, found, other) for (asked, found), other in zip(ours, others, strict=True)])


def _ask(task: Task, pairs: Sequence[ContinuationPair], model: nn.Module, step: Callable[[int, str], None]) -> Asked:
    """The result of a file of questions, with a model's answers."""
    asked = TaskResult(
        name=task.name,
        kind=task.kind.name,
        sha256=task.fingerprint(),
        questions=len(task.questions),
        accuracy=Figure(0.0),
        protocol=task.kind.protocol,
        available=task.available,
        truncated=count_truncated(task, pairs),
    )
    return asked, answers_of(task, likelihoods(model, pairs, lambda more: step(more, task.name)))


def encode_task(task: Task, tokenizer: Any, window: int | None, vocabulary: int) -> list[ContinuationPair]:
    """The tokens of context and choice, for every choice of every question."""
    texts = [f"{question.context} {choice}" for question in task.questions for choice in question.choices]
    with tokenizing(tokenizer, task.name, texts):
        behind = count_appended(tokenizer, task.questions[0].context)
        pairs = [
            encode(tokenizer, question.context, f" {choice}", window, question.where, behind)
            for question in task.questions
            for choice in question.choices
        ]
    ids = torch.tensor([token for pair in pairs for token in pair.context + pair.continuation])
    check_vocabulary(ids, task.name, vocabulary)
    return pairs


def count_truncated(task: Task, pairs: Sequence[ContinuationPair]) -> int:
    """The number of questions that lost a part of their context."""
    lost = iter(pair.lost > 0 for pair in pairs)
    return sum(sum(next(lost) for _ in question.choices) > 0 for question in task.questions)
