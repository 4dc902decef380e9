"""Lets attention functions tell what they are called with, while a block is tried (`trace.py`)."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor


class Attended(NamedTuple):
    """One call of an attention function. at: the calls of modules that had ended before it."""

    at: int
    query: Tensor
    scale: float
    beside: dict[str, Any]


class Watch:
    """Notes of one forward: how many modules have ended, and the calls of attention functions."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.ended = 0
        self.attended: list[Attended] = []


_lock = threading.Lock()
_now: Watch | None = None


@contextmanager
def watching() -> Iterator[Watch]:
    """Note calls of attention functions in this thread."""
    global _now
    with _lock:
        _now = Watch()
        try:
            yield _now
        finally:
            _now = None


def watched() -> bool:
    """True while a block is tried."""
    return _now is not None


def note_attention(query: Tensor, scale: float, beside: dict[str, Any]) -> None:
    """Note a call of an attention function, if this thread watches."""
    if _now is not None and _now.thread == threading.get_ident():
        _now.attended.append(Attended(_now.ended, query, scale, beside))
