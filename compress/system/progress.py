"""Where long work says how far it is."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol


class Reporter(Protocol):
    """Where work says how far it is."""

    def step(self, done: int, total: int, what: str) -> None:
        """`done` of `total` steps are finished; `what` names the last one. Without a name: the next step begins now,
        and the steps so far say nothing about the time that the others take."""
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


@dataclass
class Counted:
    """Steps that are done, by whoever does them, of all there are."""

    reporter: Reporter
    total: int
    done: int = 0

    def __call__(self, more: int, what: str) -> None:
        """So many more are done. what: as in `Reporter.step`."""
        self.done += more
        self.reporter.step(self.done, self.total, what)


@contextmanager
def without_bars() -> Iterator[None]:
    """Within: the bars of libraries that draw them unasked, and cannot be told not to, stay away."""
    from tqdm import tqdm

    drawn = tqdm.__init__

    def silent(bar: Any, *args: Any, **kwargs: Any) -> None:
        drawn(bar, *args, **{**kwargs, "disable": True})

    tqdm.__init__ = silent
    try:
        yield
    finally:
        tqdm.__init__ = drawn
