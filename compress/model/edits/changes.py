"""Records of the changes that an edit made to a model, so that it can be undone: attributes and their values, in order.

A parameter's or buffer's `.data`, a layer's `out_features`, a list of blocks, a number of the configuration: each is an
attribute of some object. The previous value is kept, not recomputed, so that undoing restores every bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

DATA = "data"  # of a parameter or buffer: the object stays the same, its values and its shape may change


@dataclass(frozen=True)
class Change:
    """One attribute before and after."""

    owner: Any
    name: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Applied:
    """The changes that an edit made, in order."""

    changes: tuple[Change, ...]


def change(owner: Any, name: str, after: Any) -> Change:
    """Set an attribute to `after`. Returns the change."""
    before = getattr(owner, name)
    setattr(owner, name, after)
    return Change(owner, name, before, after)


def undo(applied: Applied) -> None:
    """Restore the previous values, bit for bit. Several edits must be undone in reverse order."""
    for each in reversed(applied.changes):
        if each.name == DATA:
            assert each.owner.data_ptr() == each.after.data_ptr(), "the parameter was replaced after the edit"
        setattr(each.owner, each.name, each.before)


@contextmanager
def for_now() -> Iterator[list[Change]]:
    """Yields a list for the changes that the body makes, and undoes them afterwards."""
    done: list[Change] = []
    try:
        yield done
    finally:
        undo(Applied(tuple(done)))


@contextmanager
def changing() -> Iterator[list[Change]]:
    """Yields a list for the changes that the body makes, and undoes them when the body raises."""
    done: list[Change] = []
    try:
        yield done
    except BaseException:
        undo(Applied(tuple(done)))
        raise
