"""The work of `fit`: measures layers, runs recipes until one meets the target, and puts the proof together."""

import math
import shutil
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from compress.base.errors import CompressError, InputError
from compress.base.progress import Reporter, Silent
from compress.checkpoint.files import write_json, write_whole
from compress.checkpoint.ownership import noted
from compress.checkpoint.sensitivity import Sensitivity
from compress.evaluation.document import Evaluation, Figure
from compress.evaluation.evaluate import evaluate
from compress.evaluation.evaluation_file import read_evaluation
from compress.evaluation.report.runs import EVALUATION
from compress.passes.protocol.recipe import describe
from compress.search.budget import write_recipe
from compress.search.fitting.choice import (
    FitChoice,
    TableOption,
    below_kl,
    best,
    predicted_front,
    uniform_beside,
    within_budget,
)
from compress.search.fitting.deadline import Deadline, Watched
from compress.search.fitting.duration import FitCost, cost_of_fit, in_words
from compress.search.fitting.embedding_schemes import table_options
from compress.search.fitting.measurements import as_measured, measured, with_or_without_rotation
from compress.search.fitting.paired_kl import compared
from compress.search.fitting.proof import FitProof, FrontPoint, RunPoint, markdown_of
from compress.search.fitting.recipe_space import Offered
from compress.search.fitting.request import FitAsked
from compress.search.fitting.target import FitTarget
from compress.search.sweep import sweep
from compress.search.trial import MODEL

ROUNDS = 4  # recipes that are run for a loss, at most
CLOSE = 0.93  # of a limit: what is as near to it needs no other round
FURTHEST = 8.0  # times by which one round changes the aim, at most
RECIPE, PROOF, PAGE = "recipe.yaml", "fit.json", "fit.md"


@dataclass
class Fitting:
    """The work of `fit`. runs: evaluations of recipes that were run; choices: those recipes, by name."""

    asked: FitAsked
    offered: Offered
    beside: Path
    watch: Deadline
    reporter: Reporter
    runs: dict[str, Evaluation] = field(default_factory=dict)
    choices: dict[str, FitChoice] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    stopped: bool = False
    tables: list[TableOption] = field(default_factory=list)
    found: Sensitivity | None = None
    seconds_of_run: float = 0.0

    @property
    def table(self) -> Sensitivity:
        assert self.found is not None
        return self.found

    def note(self, words: str) -> None:
        """Keep a remark and say it."""
        self.notes.append(words)
        self.reporter.note(words)

    def tell_time(self, recipe_only: bool = False) -> None:
        """Say how long it will take, and leave rotations or trellis codes out, or both, where there is no time for
        them. Raises InputError where one recipe takes longer than may be taken."""
        runs = 0 if recipe_only else 2 if self.asked.target.budget is not None else 3
        cost, whole = self._cost(), self.offered
        if cost is not None and not self.watch.allows(cost.least):
            why = f"measuring and one recipe would take {in_words(cost.least)}"
            alone = whole.without_rotation(why)
            for less in (alone, whole.without_trellises(why), alone.without_trellises(why)):
                self.offered = less
                cost = self._cost()
                if cost is None or self.watch.allows(cost.least):
                    break
        if cost is None:
            self.note("how long this takes is not known before, away from a CPU")
            return
        self.watch.check(cost.least)
        self.note(cost.said(runs))

    def _cost(self) -> FitCost | None:
        schemes = self.offered.schemes
        return cost_of_fit(self.asked, as_measured(schemes), schemes, 2 * len(self.offered.rotation))

    def choose_rotation(self) -> None:
        """Keep the rotation where it helps, and say what it does."""
        if self.offered.rotation:
            known = len(self.offered.notes)
            self.offered = with_or_without_rotation(self.asked, self.offered, self.reporter)
            for note in self.offered.notes[known:]:
                self.note(note)

    def measure(self) -> None:
        """Measure every layer under every scheme, and the embedding."""
        asked, tables = self.asked, self.offered.tables
        self.found = measured(asked, self.offered, self.reporter)
        self.tables = table_options(asked.model, asked.texts.rows, tables, self.reporter, **asked.shared)

    def choose(self) -> FitChoice:
        """The recipe that meets the target by its predicted KL. Raises InputError where none does."""
        target = self.asked.target
        if target.budget is None:
            choice = below_kl(self.table, self.tables, self._aim())
            why = f"is predicted to be within it (the best has KL {best(self.table, self.tables).predicted_kl:.3g})"
        else:
            choice, why = within_budget(self.table, self.tables, target.budget), "of these layers is as small"
        if choice is None:
            raise InputError(f"target {target}; no recipe {why}: give more")
        return choice

    def search(self) -> str:
        """Choose and run recipes; the name of the best."""
        target = self.asked.target
        return self._below(target) if target.budget is None else self.run(self.choose())

    def _aim(self) -> float:
        """The most KL for a loss."""
        target = self.asked.target
        if target.task_loss is None:
            return target.limit
        loss = evaluate(self.asked.model, text=self.asked.texts.rows, **self.asked.shared).perplexity
        assert loss is not None
        return target.limit * math.log(loss)  # a rise of the loss is about the KL

    def _below(self, target: FitTarget) -> str:
        """The recipe of the fewest bytes that is measured to be within a loss; the nearest, where none is."""
        aim = self._aim()
        for _ in range(ROUNDS):
            choice = below_kl(self.table, self.tables, aim) or best(self.table, self.tables)
            if choice in self.choices.values():
                break
            if self.runs and not self.watch.allows(self.seconds_of_run):
                self.stopped = True
                break
            name = self.run(choice)
            if name not in self.runs:
                break
            value, margin = target.measured(self.runs[name])
            goal = max(target.limit - margin, target.limit / 2)
            most = f"{value:.4g}, at most {value + margin:.4g} with 95 % certainty"
            self.reporter.note(f"{name}: {choice.bytes:,} bytes, {most}, and {target} is asked for")
            if CLOSE * goal <= value <= goal:
                break
            factor = goal / max(value, goal / FURTHEST)
            aim = choice.predicted_kl * max(factor, 1 / FURTHEST)
        met = [name for name, found in self.runs.items() if target.is_met(found)]
        if met:
            return min(met, key=lambda name: self.choices[name].bytes)
        return min(self.runs, key=lambda name: target.measured(self.runs[name])[0])

    def run(self, choice: FitChoice, name: str | None = None) -> str:
        """Run a recipe and evaluate it, unless the time is up before it is done; its name."""
        name = name or f"fit-{1 + sum(each.startswith('fit-') for each in self.runs)}"
        began = time.monotonic()
        watched = Watched(self.reporter, self.watch) if self.runs else self.reporter
        (row,) = self._sweep({name: choice}, watched).rows
        self.seconds_of_run = max(self.seconds_of_run, time.monotonic() - began)
        if row.problem is None:
            self.runs[name] = read_evaluation(self.beside / name / EVALUATION)
            self.choices[name] = choice
        elif self.runs and self.watch.is_over:
            self.stopped = True
        else:
            raise CompressError(f"{name}: {row.problem}")
        return name

    def _sweep(self, choices: dict[str, FitChoice], reporter: Reporter) -> Any:
        texts = self.asked.texts
        return sweep(
            self.asked.model,
            {name: (*self.offered.rotation, *choice.passes) for name, choice in choices.items()},
            text=texts.rows,
            calibration=texts.calibration,
            output=self.beside,
            batch_size=self.asked.batch_size,
            reporter=reporter,
            **texts.how,
            **self.asked.shared,
        )

    def proof(self, name: str) -> FitProof:
        """Compare a recipe with the uniform one, and put the proof together."""
        chosen, asked = self.choices[name], self.asked
        other, difference = uniform_beside(self.table, chosen), None
        if other is None:
            self.note("the choice gives all layers the same bits, so that there is no uniform model beside it")
        elif not self.watch.allows(self.seconds_of_run):
            self.note(f"no time was left to run {other[0]} beside it")
        else:
            self.run(other[1], other[0])
            if other[0] in self.runs:
                one, two = (self.beside / each / MODEL for each in (name, other[0]))
                difference = compared(asked.model, one, two, asked.texts.rows, asked.shared["trust_remote_code"])
        self._sweep(self.choices, Silent())  # one report on all
        original = self.runs[name].reference_size
        assert original is not None
        return FitProof(
            asked.name,
            str(asked.target),
            self.meets(name),
            self.stopped,
            asked.texts.source,
            len(asked.texts.rows),
            original.bytes,
            [_front_point(each) for each in predicted_front(self.table, self.tables)],
            [_run_point(each, found) for each, found in self.runs.items()],
            name,
            None if difference is None or other is None else other[0],
            difference,
            self.watch.seconds,
            self.notes,
        )

    def meets(self, name: str) -> bool:
        """True where a recipe that was run meets the target."""
        budget, found = self.asked.target.budget, self.runs[name]
        if budget is None:
            return self.asked.target.is_met(found)
        assert found.bytes is not None
        if budget.bytes is not None:
            return found.bytes <= budget.bytes
        assert budget.bits_per_weight is not None
        return (found.bits_per_weight or math.inf) <= budget.bits_per_weight * (1 + 1e-9)

    def leave(self, chosen: str, proof: FitProof) -> None:
        """Write recipe and proof, and remove the other checkpoints."""
        write_choice(self, self.choices[chosen], self.beside / RECIPE)
        write_json(self.beside / PROOF, asdict(proof))
        write_whole(self.beside / PAGE, noted(markdown_of(proof)))
        for name in self.runs:
            with suppress(FileNotFoundError):
                shutil.rmtree(self.beside / name / MODEL)


def write_choice(work: Fitting, choice: FitChoice, path: Path) -> None:
    """Write a recipe with all its parts."""
    before, behind = (
        describe(passes)["passes"] for passes in (work.offered.rotation, (*choice.recovery, *choice.table.passes))
    )
    steps = [*before, *choice.allocation.recipe["passes"], *behind]
    about = f"{work.asked.name}: {work.asked.target}, {choice.bytes:,} bytes"
    write_recipe(path, replace(choice.allocation, recipe={"passes": steps}), about)


def _front_point(choice: FitChoice) -> FrontPoint:
    return FrontPoint(choice.bytes, choice.allocation.bits_per_weight, choice.table.name, choice.predicted_kl)


def _run_point(name: str, found: Evaluation) -> RunPoint:
    (text,) = found.texts
    kept: dict[str, Figure] = {n: text.figures[n] for n in ("kl_mean", "perplexity_ratio", "same_top")}
    assert found.bytes is not None
    return RunPoint(name, found.bytes, found.bits_per_weight or 0.0, kept)
