"""Recipes of `fit` that are run: until one meets the target, and again with training behind it."""

import math
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from compress.base.errors import InputError
from compress.base.progress import Reporter
from compress.evaluation.document import Evaluation
from compress.evaluation.evaluate import evaluate
from compress.passes.train import Train
from compress.search.fitting.choose import FitChoice, below_kl, best, within_budget
from compress.search.fitting.duration import MARGIN, Deadline, OutOfTimeError, Watched
from compress.search.fitting.measure import Measured
from compress.search.fitting.paired_kl import compare, with_interval
from compress.search.fitting.request import FitRequest
from compress.search.trial import TrialSettings, trial

ROUNDS = 4  # recipes that are run for a loss, at most
CLOSE = 0.93  # of a limit: what is as near to it needs no other round
FURTHEST = 8.0  # times by which one round changes the aim, at most
CHECKPOINTS = "checkpoints"
LEAST = 0.1  # minutes of training: in less nothing is learned


@dataclass
class Remarks:
    """Remarks that the proof keeps, said as they come."""

    reporter: Reporter
    notes: list[str] = field(default_factory=list)

    def note(self, words: str) -> None:
        self.notes.append(words)
        self.reporter.note(words)


@dataclass(frozen=True)
class RecipeRun:
    """A recipe that was run."""

    choice: FitChoice
    evaluation: Evaluation
    checkpoint: Path


@dataclass
class RecipeRuns:
    """Recipes that were run, by name. beside: the folder of the proof, and of their checkpoints meanwhile. longest:
    seconds that one took, at most. stopped: the time was up before all were run."""

    request: FitRequest
    measured: Measured
    beside: Path
    watch: Deadline
    remarks: Remarks
    done: dict[str, RecipeRun] = field(default_factory=dict)
    longest: float = 0.0
    stopped: bool = False

    def run(self, choice: FitChoice, name: str | None = None) -> str | None:
        """Run a recipe and evaluate it; its name, or None where the time was up before it was done."""
        name = name or f"fit-{1 + sum(each.startswith('fit-') for each in self.done)}"
        began, reporter, request = time.monotonic(), self.remarks.reporter, self.request
        settings = TrialSettings(request.model, request.data.texts, **request.shared)
        passes = (*self.measured.rotation, *choice.passes)
        # Another command of the same output has other identities, and takes none of these.
        checkpoint = self.beside / CHECKPOINTS / settings.identity(passes)
        watched = Watched(reporter, self.watch) if self.done else reporter
        try:
            evaluation = trial(settings, passes, checkpoint, watched, name=name, resume=True)
        except OutOfTimeError:
            self.stopped = True
            return None
        finally:
            self.longest = max(self.longest, time.monotonic() - began)
        self.done[name] = RecipeRun(choice, evaluation, checkpoint)
        return name

    def against_target(self, name: str) -> tuple[float, float]:
        """(The figure of a recipe that was run, the most that the target allows); of a loss its upper bound."""
        target, evaluation = self.request.target, self.done[name].evaluation
        if target.budget is None:
            return sum(target.measured(evaluation)), target.limit
        if target.budget.bytes is not None:
            assert evaluation.bytes is not None
            return evaluation.bytes, target.budget.bytes
        assert target.budget.bits_per_weight is not None
        return round(evaluation.bits_per_weight or math.inf, 9), target.budget.bits_per_weight  # of sums of floats

    def meets(self, name: str) -> bool:
        """True where a recipe that was run meets the target."""
        value, limit = self.against_target(name)
        return value <= limit


def choose(request: FitRequest, measured: Measured) -> FitChoice:
    """The recipe that meets the target by its predicted KL. Raises InputError where none does."""
    target, table = request.target, (measured.layers, measured.tables)
    if target.budget is None:
        choice = below_kl(*table, first_aim(request))
        why = f"is predicted to be within it (the best has KL {best(*table).predicted_kl:.3g})"
    else:
        choice, why = within_budget(*table, target.budget), "of these layers is as small"
    if choice is None:
        raise InputError(f"target {target}; no recipe {why}: give more")
    return choice


def first_aim(request: FitRequest) -> float:
    """The most KL for a loss."""
    target = request.target
    if target.task_loss is None:
        return target.limit
    loss = evaluate(request.model, text=request.data.rows, **request.shared).perplexity
    assert loss is not None
    return target.limit * math.log(loss)  # a rise of the loss is about the KL


def search(runs: RecipeRuns) -> str:
    """Choose and run recipes; the name of the best: of those within a loss, by measurement, the one of the fewest
    bytes, or the nearest where none is."""
    request, target, measured = runs.request, runs.request.target, runs.measured
    if target.budget is not None:
        name = runs.run(choose(request, measured))
        assert name is not None  # the first is run whatever the time is
        return name
    aim, table = first_aim(request), (measured.layers, measured.tables)
    for _ in range(ROUNDS):
        choice = below_kl(*table, aim) or best(*table)
        if any(choice == run.choice for run in runs.done.values()):
            break
        if runs.done and not runs.watch.allows(runs.longest):
            runs.stopped = True
            break
        name = runs.run(choice)
        if name is None:
            break
        value, margin = target.measured(runs.done[name].evaluation)
        goal = max(target.limit - margin, target.limit / 2)
        most = f"{value:.4g}, at most {value + margin:.4g} with 95 % certainty"
        runs.remarks.reporter.note(f"{name}: {choice.bytes:,} bytes, {most}, and {target} is asked for")
        if CLOSE * goal <= value <= goal:
            break
        factor = goal / max(value, goal / FURTHEST)
        aim = choice.predicted_kl * max(factor, 1 / FURTHEST)
    met = [name for name, run in runs.done.items() if target.is_met(run.evaluation)]
    if met:
        return min(met, key=lambda name: runs.done[name].choice.bytes)
    return min(runs.done, key=lambda name: target.measured(runs.done[name].evaluation)[0])


def recover_loss(runs: RecipeRuns, name: str, minutes: float) -> str:
    """The name of the better recipe: the one of this name, or the same with training on the calibration data behind it.
    By KL on held-out text, of those that meet the target if either does."""
    watch, remarks, request = runs.watch, runs.remarks, runs.request
    if watch.limit is not None:
        left = watch.limit - watch.seconds - MARGIN * runs.longest
        minutes = min(minutes, left / 60 / MARGIN)
    if minutes < LEAST:
        remarks.note("no time was left to recover what was lost")
        return name
    trained = runs.run(replace(runs.done[name].choice, recovery=(Train(minutes=minutes),)), f"{name}-recovered")
    if trained is None:
        remarks.note("the time was up before training was done")
        return name
    checkpoints = runs.done[trained].checkpoint, runs.done[name].checkpoint
    difference = compare(request.model, *checkpoints, request.data.rows, request.asked.trust_remote_code)
    better = difference.value < 0 and runs.meets(trained) >= runs.meets(name)
    end = "it is taken" if better else "the recipe stays without it"
    remarks.note(f"training for {minutes:.3g} min changes the KL by {with_interval(difference)}: {end}")
    return trained if better else name
