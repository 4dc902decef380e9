"""Reporters: objects to which long work reports its progress."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol


class Reporter(Protocol):
    """Receives the progress and the notes of long work."""

    def step(self, done: int, total: int, what: str) -> None:
        """`done` of `total` steps are finished; `what` names the last one. With an empty `what`, the next step begins
        now, and the time of the steps so far must not be used to estimate the time of the others."""
        ...

    def note(self, message: str) -> None:
        """Something the person should know."""
        ...


def tell(reporter: Reporter, method: Literal["tokens", "verifies", "outline", "phase"], *given: Any) -> None:
    """Call a method that a reporter may have beside those of `Reporter`. given: its arguments, or functions that make
    them, which are called only where there is the method.

    tokens(each)     From now on every step takes `each` tokens through the model, or a part of it; 0: nobody knows.
    verifies()       After the last step a fresh process loads the libraries and the output, and checks it.
    outline(told)    The outline of a run (`jobs.forecast`), before it begins.
    phase(name, rest, words)
                     Work of another kind begins, called `name` ("": the last one that was no part). rest: what comes
                     behind it, "nothing" that takes long or "unknown", or "part", where the phase is a small part of
                     the work, whose time tells nothing. words: said as it begins.
    """
    listens = getattr(reporter, method, None)
    if listens is not None:
        listens(*(each() if callable(each) else each for each in given))


class Silent:
    """A reporter that shows nothing."""

    def step(self, done: int, total: int, what: str) -> None:
        return

    def note(self, message: str) -> None:
        return


@dataclass
class Counted:
    """Counts finished steps of `total`, whoever does them, and reports the count."""

    reporter: Reporter
    total: int
    done: int = 0

    def __call__(self, more: int, what: str) -> None:
        """Count `more` finished steps. what: as in `Reporter.step`."""
        self.done += more
        self.reporter.step(self.done, self.total, what)


@contextmanager
def without_bars() -> Iterator[None]:
    """Disables tqdm's progress bars in the body, for libraries that draw them and have no option against it."""
    from tqdm import tqdm

    drawn = tqdm.__init__

    def silent(bar: Any, *args: Any, **kwargs: Any) -> None:
        drawn(bar, *args, **{**kwargs, "disable": True})

    tqdm.__init__ = silent
    try:
        yield
    finally:
        tqdm.__init__ = drawn
