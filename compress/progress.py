"""Progress of long work: a bar with the time left on a terminal, a plain line per step elsewhere, nothing if quiet."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from compress.terminal import console, visible


class Reporter(Protocol):
    """Where work says how far it is."""

    def step(self, done: int, total: int, what: str) -> None:
        """`done` of `total` steps are finished; `what` names the last one."""
        ...

    def note(self, message: str) -> None:
        """Something the person should know."""
        ...


class Silent:
    """Says nothing."""

    def step(self, done: int, total: int, what: str) -> None:
        return

    def note(self, message: str) -> None:
        return


class Lines:
    """A plain line per step on standard error, with the time left from the second step on."""

    def __init__(self, title: str) -> None:
        self.title, self.started = title, time.monotonic()

    def step(self, done: int, total: int, what: str) -> None:
        left = (time.monotonic() - self.started) / max(done, 1) * (total - done)
        remaining = f", {left:.0f} s left" if 0 < done < total else ""
        print(f"{self.title}: {done}/{total} {visible(what)}{remaining}".rstrip(), file=sys.stderr, flush=True)

    def note(self, message: str) -> None:
        print(f"note: {visible(message)}", file=sys.stderr, flush=True)


class Bar:
    """A rich progress bar on standard error."""

    def __init__(self, title: str, progress: Progress) -> None:
        self.progress, self.task, self.title = progress, progress.add_task(title, total=None), title

    def step(self, done: int, total: int, what: str) -> None:
        self.progress.update(self.task, completed=done, total=total, description=f"{self.title} {visible(what)}")

    def note(self, message: str) -> None:
        self.progress.console.print(f"note: {message}", highlight=False, soft_wrap=True)


@contextmanager
def reporting(title: str, quiet: bool) -> Iterator[Reporter]:
    """The reporter that fits where standard error goes."""
    terminal = console(stderr=True)
    if quiet:
        yield Silent()
    elif not terminal.is_terminal:
        yield Lines(title)
    else:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=terminal) as progress:
            yield Bar(title, progress)
