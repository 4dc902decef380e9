"""Reporters: objects to which long work reports its progress."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol


class Reporter(Protocol):
    """Receives the progress and the notes of long work."""

    def step(self, done: int, total: int, what: str) -> None:
        """`done` of `total` steps are finished; `what` names the last one. With an empty `what`, the next step begins
        now, and the time of the steps so far must not be used to estimate the time of the others."""
        ...

    def note(self, message: str) -> None:
        """Something the person should know."""
        ...


class Paced(Protocol):
    """A reporter that also shows a speed."""

    def tokens(self, each: float) -> None:
        """From now on every step takes `each` tokens through the model, or a part of it; 0: nobody knows how many."""
        ...


def tell_tokens(reporter: Reporter, each: float) -> None:
    """Tell a reporter how many tokens a step takes through the model, where it shows a speed (`Paced`)."""
    tell = getattr(reporter, "tokens", None)
    if tell is not None:
        tell(each)


class Followed(Protocol):
    """A reporter whose time left counts what follows the last step."""

    def verifies(self) -> None:
        """After the last step a fresh process loads the libraries and the output, and checks it."""
        ...


def tell_verification(reporter: Reporter) -> None:
    """Tell a reporter that verification follows the last step, where it shows the time left (`Followed`)."""
    tell = getattr(reporter, "verifies", None)
    if tell is not None:
        tell()


class Announcing(Protocol):
    """A reporter that also shows what a run is about to do."""

    def outline(self, told: Any) -> None:
        """The outline of a run (`jobs.forecast`), before it begins."""
        ...


def tell_outline(reporter: Reporter, make: Callable[[], Any]) -> None:
    """Tell a reporter the outline of a run, where it shows one (`Announcing`)."""
    tell = getattr(reporter, "outline", None)
    if tell is not None:
        tell(make())


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
