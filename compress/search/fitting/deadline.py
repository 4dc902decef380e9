"""The time that `fit` may take."""

import time
from typing import Any

from compress.base.errors import CompressError, InputError
from compress.base.progress import Reporter

MARGIN = 1.1  # of a time that was measured: what the next may take


class OutOfTimeError(CompressError):
    """The time is up, and there is a result without what was being done."""


class Deadline:
    """A clock that began when it was made. hours: the most; None for as long as it takes."""

    def __init__(self, hours: float | None) -> None:
        if hours is not None and not 0 < hours < float("inf"):
            raise InputError(f"hours {hours}; allowed: above 0, the most that the work may take, like 0.5")
        self.began = time.monotonic()
        self.limit = None if hours is None else 3600 * hours

    @property
    def seconds(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began

    @property
    def is_over(self) -> bool:
        """True once the time is up."""
        return self.limit is not None and self.seconds > self.limit

    def allows(self, seconds: float) -> bool:
        """True where work of this length, as it was measured, can still be done."""
        return self.limit is None or self.seconds + MARGIN * seconds <= self.limit

    def check(self, seconds: float) -> None:
        """Raise InputError for less time than the least work is told to take."""
        if self.limit is not None and seconds > self.limit:
            raise InputError(
                f"hours {self.limit / 3600:.3g}; measuring the layers and running one recipe take about "
                f"{seconds / 3600:.2g} here: give that or more, or fewer --samples"
            )


class Watched:
    """A reporter that ends the work between two steps, once the time is up."""

    def __init__(self, reporter: Reporter, watch: Deadline) -> None:
        self.reporter, self.watch = reporter, watch

    def step(self, done: int, total: int, what: str) -> None:
        if self.watch.is_over:
            raise OutOfTimeError("the time is up")
        self.reporter.step(done, total, what)

    def note(self, message: str) -> None:
        self.reporter.note(message)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reporter, name)  # tokens, outline: where it shows them
