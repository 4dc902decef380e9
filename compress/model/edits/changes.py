"""What an edit of a model did, so that it can be undone: attributes that got other values, in order.

A parameter's or buffer's `.data`, a layer's `out_features`, a list of blocks, a number of the configuration: all are
attributes of something. What was there before is kept, not computed back, so that undoing restores every bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

DATA = "data"  # of a parameter or buffer, which stays the same object with other values, maybe of another shape


@dataclass(frozen=True)
class Change:
    """One attribute before and after."""

    owner: Any
    name: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Applied:
    """What an edit changed, in order."""

    changes: tuple[Change, ...]


def change(owner: Any, name: str, after: Any) -> Change:
    """Give an attribute another value."""
    before = getattr(owner, name)
    setattr(owner, name, after)
    return Change(owner, name, before, after)


def undo(applied: Applied) -> None:
    """Put back, bit for bit, what was there before. Edits are undone in reverse order."""
    for each in reversed(applied.changes):
        if each.name == DATA:
            assert each.owner.data_ptr() == each.after.data_ptr(), "the parameter was replaced after the edit"
        setattr(each.owner, each.name, each.before)


@contextmanager
def changing() -> Iterator[list[Change]]:
    """A list to note changes in; they are undone where the edit fails in the middle."""
    done: list[Change] = []
    try:
        yield done
    except BaseException:
        undo(Applied(tuple(done)))
        raise
