"""Figures of tasks from models' answers to each question."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import bdtr

from compress.evaluation.document import TaskResult
from compress.evaluation.quality.exact_intervals import difference_of, share_of
from compress.evaluation.quality.kl_and_perplexity import Values, exponential, mean_of_independent
from compress.evaluation.tasks.likelihood import Likelihood
from compress.evaluation.tasks.questions import CLOZE, Task


@dataclass(frozen=True)
class Answers:
    """Answers to the questions of a task: the score of each, 1 where right and 0 where not; the same by log-probability
    per character; and -log p of the word asked for. None where the task has no such value."""

    score_N: Values
    norm_N: Values | None = None
    surprisal_N: Values | None = None

    @property
    def binary(self) -> bool:
        """True where every question is either right or wrong."""
        return bool(np.isin(self.score_N, (0, 1)).all())

    @property
    def outcomes(self) -> str:
        """A character for each question: 1 for a right answer, empty where questions are not right or wrong."""
        return "".join("1" if score else "0" for score in self.score_N) if self.binary else ""


def answers_of(task: Task, likelihoods: Sequence[Likelihood]) -> Answers:
    """Answers by the log-probabilities of all continuations, question after question. Among equal ones the first is
    chosen."""
    if task.kind.scored == CLOZE:
        right = np.array([each.greedy for each in likelihoods], float)
        return Answers(right, surprisal_N=np.array([-each.log_prob for each in likelihoods]))
    plain, by_length, first = [], [], 0
    for question in task.questions:
        log_probs = np.array([each.log_prob for each in likelihoods[first : first + len(question.choices)]])
        first += len(log_probs)
        characters = np.array([len(choice) for choice in question.choices])  # without the blank before: lm-eval's
        plain.append(log_probs.argmax() == question.answer)
        by_length.append((log_probs / characters).argmax() == question.answer)
    return Answers(np.array(plain, float), np.array(by_length, float))


def result_of(task: TaskResult, ours: Answers, theirs: Answers | None) -> TaskResult:
    """`task`, the description of a task, with its figures; with paired ones where there is a reference."""
    task = replace(
        task,
        accuracy=share_of(ours.score_N),
        accuracy_norm=None if ours.norm_N is None else share_of(ours.norm_N),
        perplexity=None if ours.surprisal_N is None else exponential(mean_of_independent(ours.surprisal_N)),
        outcomes=ours.outcomes,
    )
    return task if theirs is None else replace(task, **_compared(ours, theirs))


def _compared(ours: Answers, theirs: Answers) -> dict[str, Any]:
    """The fields of a `TaskResult` that compare two models."""
    differences_N, difference = ours.score_N - theirs.score_N, difference_of(ours.score_N, theirs.score_N)
    fields: dict[str, Any] = {
        "reference_accuracy": share_of(theirs.score_N),
        "difference": difference,
        "interval": difference.interval or (None if difference.error is None else interval(differences_N)),
        "reference_outcomes": theirs.outcomes,
    }
    if ours.binary and theirs.binary:
        gained, lost = int((differences_N > 0).sum()), int((differences_N < 0).sum())
        fields |= {"gained": gained, "lost": lost, "p_value": mcnemar(gained, lost)}
    if ours.norm_N is not None and theirs.norm_N is not None:
        fields["reference_accuracy_norm"] = share_of(theirs.norm_N)
        fields["difference_norm"] = difference_of(ours.norm_N, theirs.norm_N)
    if ours.surprisal_N is not None and theirs.surprisal_N is not None:
        fields["reference_perplexity"] = exponential(mean_of_independent(theirs.surprisal_N))
        fields["log_perplexity_ratio"] = mean_of_independent(ours.surprisal_N - theirs.surprisal_N)
    return fields


def adjust_p_values(results: Sequence[TaskResult]) -> list[TaskResult]:
    """The results with p-values adjusted by Holm's method, where there are any."""
    tested = [i for i, each in enumerate(results) if each.p_value is not None]
    made = list(results)
    for i, p in zip(tested, holm([results[i].p_value or 0.0 for i in tested]), strict=True):
        made[i] = replace(made[i], p_adjusted=p)
    return made


RESAMPLES = 10_000
TAILS = (0.025, 0.975)
DRAWN = 2**22  # counts at a time: 32 MiB


def mcnemar(gained: int, lost: int) -> float:
    """The exact two-sided p-value; 1 where nothing was gained or lost."""
    return min(1.0, 2 * float(bdtr(min(gained, lost), gained + lost, 0.5)))


def interval(differences_N: Values, resamples: int = RESAMPLES, seed: int = 0) -> tuple[float, float]:
    """95 % of the mean difference, by a bootstrap over the questions.

    How often each value is drawn is drawn at once, from the multinomial distribution that it has: the same as drawing
    question by question, and as cheap as there are few values.
    """
    values_U, counts_U = np.unique(differences_N, return_counts=True)
    n, generator = len(differences_N), np.random.default_rng(seed)
    step = max(1, DRAWN // len(values_U))
    sizes = [min(step, resamples - first) for first in range(0, resamples, step)]
    means = np.concatenate([generator.multinomial(n, counts_U / n, size) @ values_U / n for size in sizes])
    low, high = np.quantile(means, TAILS)
    return float(low), float(high)


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values of several tests, adjusted so that none of them is below a level by chance more often than that."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted
