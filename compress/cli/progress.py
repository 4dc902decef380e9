"""Progress of long work: a bar with the time left on a terminal, a plain line per step elsewhere, nothing if quiet."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Literal

from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from compress.base.progress import Reporter, Silent
from compress.base.terminal import console, visible
from compress.cli.start_line import STARTED

if TYPE_CHECKING:
    from compress.jobs.forecast.forecast import Outline

MANY = 100  # steps, of which each still has its line
QUIET = 10.0  # seconds, at most
BAR = 16  # columns
VERIFY = "verify"  # a phase without steps
SLOW = 10  # tokens per second, below which a decimal is shown
# What a fresh process takes to verify an output, in the time that came before the first step: it imports the same
# libraries and compressed-tensors, and reads both models (`recipes/studies/cost/time_left.py`).
VERIFYING = 1.4


@cache
def loading() -> float:
    """Seconds from the start of this process to the first call, by when all that is slow has been imported."""
    return time.monotonic() - STARTED


class Pace:
    """Estimates the time left from the mean time of a step since the first began. Steps differ little; work before
    them (reading a model, a first forward) is no step. Where fewer steps are done than before, other work has begun.
    verifies: whether a fresh process verifies the output after the last step."""

    def __init__(self) -> None:
        self.made = time.monotonic() - loading()
        self.begun: tuple[int, float] | None = None
        self.before: float | None = None  # the first step, in seconds
        self.verifies = False
        self.done = 0
        self.left_of: dict[str, tuple[tuple[int, float] | None, int]] = {}  # phases that may go on
        self.tokens = 0.0  # of a step; 0: nobody knows
        self.per_second: float | None = None  # tokens, where steps have been timed

    def left(self, done: int, total: int, what: str) -> float | None:
        """Seconds left after a step that `Reporter.step` hears of; None where no step has been timed."""
        now = time.monotonic()
        if self.begun is None or not what or done < self.done:
            self.begun = done, now
        if self.before is None and what:
            self.before = self.begun[1] - self.made
        self.done = done
        first, since = self.begun
        timed = self.tokens > 0 and done > first and now > since
        self.per_second = self.tokens * (done - first) / (now - since) if timed else None
        return (now - since) / (done - first) * (total - done) + self.after if done > first else None

    def turn(self, before: str, now: str) -> None:
        """Leave a phase for another, which goes on where it was left."""
        self.left_of[before] = self.begun, self.done
        self.begun, self.done = self.left_of.get(now, (None, 0))

    @property
    def after(self) -> float:
        """Seconds that follow the last step."""
        return VERIFYING * (self.before or 0.0) if self.verifies else 0.0

    @property
    def speed(self) -> str:
        """The tokens of a second, in words; empty where nobody knows them."""
        return "" if self.per_second is None else f"{self.per_second:,.{0 if self.per_second >= SLOW else 1}f} tokens/s"


Rest = Literal["nothing", "unknown", "part"]


class PacedReporter:
    """A reporter whose pace is known. title: of the phase at hand; rest: as in `compress.base.progress.tell`."""

    def __init__(self, title: str) -> None:
        self.pace = Pace()
        self.command = self.title = title
        self.rest: Rest = "nothing"
        self.main: tuple[str, Rest] = title, "nothing"

    def phase(self, name: str, rest: Rest = "nothing", words: str = "") -> None:
        """Another phase begins. The time of a verification is over when it was left."""
        self.pace.verifies &= self.title != VERIFY
        name, rest = (name, rest) if name else self.main
        self.main = self.main if rest == "part" else (name, rest)
        self.pace.turn(self.title, name)
        self.title, self.rest = name, rest

    def time_left(self, done: int, total: int, what: str) -> float | None:
        """Seconds left after a step: of all the work, or of the phase where what follows is unknown."""
        left = self.pace.left(done, total, what)
        return None if left is None or self.rest == "part" else left

    def tokens(self, each: float) -> None:
        self.pace.tokens = each

    def verifies(self) -> None:
        self.pace.verifies = True


class Lines(PacedReporter):
    """A plain line per step on standard error, with the time left; of many steps, those that are ten seconds or a
    hundredth of the way behind the last that was said, and the final one."""

    def __init__(self, title: str) -> None:
        super().__init__(title)
        self.said = False
        self.last = (0, 0.0)

    def phase(self, name: str, rest: Rest = "nothing", words: str = "") -> None:
        super().phase(name, rest)
        self.said, self.last = False, (0, 0.0)
        if words:
            print(f"{self.title}: {visible(words)}", file=sys.stderr, flush=True)

    def step(self, done: int, total: int, what: str) -> None:
        left = self.time_left(done, total, what)
        unfinished = done < total or self.pace.after > 0
        of = f" to {self.title}" if self.rest == "unknown" else ""
        remaining = f", {left:.0f} s left{of}" if left is not None and unfinished else ""
        speed = f", {self.pace.speed}" if self.pace.speed else ""
        if self._due(done, total) if what else not self.said:
            line = f"{self.title}: {done}/{total} {visible(what)}{speed}{remaining}"
            print(line.rstrip(), file=sys.stderr, flush=True)
            self.last = (done, time.monotonic())
        self.said = True

    def _due(self, done: int, total: int) -> bool:
        """True if a step is worth a line: each of up to `MANY` steps; of more, one per percent or `QUIET` seconds. Of a
        phase that is a part of the work, one in `QUIET` seconds."""
        before, at = self.last
        most = 100 if total > MANY else total
        often = self.rest != "part" and (done - before) * most >= total
        new = done < before  # other work has begun
        return often or new or done == total or time.monotonic() - at >= QUIET

    def note(self, message: str) -> None:
        print(f"note: {visible(message)}", file=sys.stderr, flush=True)

    def outline(self, told: "Outline") -> None:
        from compress.cli.forecasts import brief_lines

        for line in brief_lines(told):
            print(visible(line), file=sys.stderr, flush=True)


class TimeLeft(ProgressColumn):
    """The time until a task's `end` (None: nobody knows). Rich's own column forgets steps that are 30 seconds old,
    which blocks of a large model always are."""

    def render(self, task: Task) -> Text:
        end = task.fields.get("end")
        if end is None or task.finished:
            return Text("-:--:--" if not task.finished else "0:00:00")
        return Text(str(timedelta(seconds=max(0, round(end - time.monotonic())))))


class Speed(ProgressColumn):
    """A task's `speed` in words."""

    def render(self, task: Task) -> Text:
        return Text(task.fields.get("speed") or "")


class ProgressBar(PacedReporter):
    """A rich progress bar on standard error."""

    def __init__(self, title: str, progress: Progress) -> None:
        super().__init__(title)
        self.progress, self.task = progress, progress.add_task(title, total=None)
        self.at = (0, 0)

    def step(self, done: int, total: int, what: str) -> None:
        left = self.time_left(done, total, what)
        end = None if left is None else time.monotonic() + left
        self.progress.update(self.task, completed=done, total=total, end=end, speed=self.pace.speed)
        if what:
            self.progress.update(self.task, description=f"{self.title} {visible(what)}")
        elif done < self.at[0] or total != self.at[1]:  # other work begins
            self.progress.update(self.task, description=self.title)
        self.at = done, total

    def outline(self, told: "Outline") -> None:
        from compress.cli.forecasts import brief_lines

        for line in brief_lines(told):
            self.progress.console.print(visible(line), highlight=False)

    def note(self, message: str) -> None:
        self.progress.console.print(f"note: {message}", highlight=False)

    def phase(self, name: str, rest: Rest = "nothing", words: str = "") -> None:
        super().phase(name, rest)
        begun = self._row.start_time
        end = time.monotonic() + self.pace.after if name == VERIFY and self.pace.after else None
        self.progress.reset(self.task, description=self.title, end=end, speed="")
        self._row.total, self._row.start_time = None, begun

    def finish(self) -> None:
        """Leave on the screen the steps and their time, or nothing where none were counted."""
        done, total = self.at
        if total == 0:
            self.progress.update(self.task, visible=False)
        elif self._row.total is None:
            self.progress.update(self.task, description=self.command, completed=done, total=total)

    @property
    def _row(self) -> Task:
        return self.progress.tasks[self.progress.task_ids.index(self.task)]


def columns() -> list[ProgressColumn]:
    """Columns of a progress bar: the work and its step, the part done, the time taken, the time left, the speed. The
    row of a block takes no more than the usual 80 columns."""
    step = TextColumn("{task.description}", markup=False)
    return [step, BarColumn(BAR), MofNCompleteColumn(), TimeElapsedColumn(), TimeLeft(), Speed()]


@contextmanager
def reporting(title: str, quiet: bool) -> Iterator[Reporter]:
    """The reporter that fits where standard error goes."""
    terminal = console(stderr=True)
    if quiet:
        yield Silent()
    elif not terminal.is_terminal:
        yield Lines(title)
    else:
        with Progress(*columns(), console=terminal) as progress:
            bar = ProgressBar(title, progress)
            yield bar
            bar.finish()
