"""Seconds of a run by activity: forwards, statistics, solving, writing.

Each second counts once, for the innermost of what goes on; what is left is reading weights and everything else.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar

import torch

from compress.checkpoint.write.record import RunRecord

Activity = Literal["forward", "statistics", "solve", "write"]
T = TypeVar("T")


class Spending:
    """Adds seconds by the clock to `spent` of a record. A GPU is waited for where one activity follows another."""

    def __init__(self, record: RunRecord, device: torch.device) -> None:
        self.spent, self.waits = record.spent, device.type == "cuda"
        self.inside: list[Activity] = []
        self.since = 0.0

    @contextmanager
    def on(self, activity: Activity) -> Iterator[None]:
        """Count the time inside the context as this activity, except for contexts of `on` inside it."""
        self._turn()
        self.inside.append(activity)
        try:
            yield
        finally:
            self._turn()
            self.inside.pop()

    def each(self, activity: Activity, values: Iterable[T]) -> Iterator[T]:
        """Values that are made one by one, which is what counts."""
        made = iter(values)
        while True:
            try:
                with self.on(activity):
                    value = next(made)
            except StopIteration:
                return
            yield value

    def _turn(self) -> None:
        if self.waits:
            torch.cuda.synchronize()
        now = time.monotonic()
        if self.inside:
            current = self.inside[-1]
            self.spent[current] = self.spent.get(current, 0.0) + now - self.since
        self.since = now
