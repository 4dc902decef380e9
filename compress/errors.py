"""The exception tree. A message is one line: what was given, what is allowed, what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


class CompressError(Exception):
    """Work that began could not be finished. The command line exits with 1."""


class InputError(CompressError, ValueError):
    """Bad input, found before work starts. The command line exits with 2."""


class CheckpointError(InputError):
    """A checkpoint that cannot be read as what it says it is."""


class WriteError(CompressError):
    """A file could not be written, on a disk that is full, say. What was written before it stays."""


class RankLostError(CompressError):
    """Another process of a sharded run has ended; what this one was doing cannot be finished."""


def first_line(error: BaseException) -> str:
    """What an exception of a library says, in a line; its type where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def one_of(what: str, given: str, allowed: Iterable[str]) -> str:
    """`given` when it is allowed; otherwise an InputError that names the allowed values and the closest one."""
    names = sorted(allowed)
    if given in names:
        return given
    close = get_close_matches(given, names, n=1, cutoff=0.5)
    hint = f"; did you mean {close[0]!r}?" if close else ";"
    raise InputError(f"unknown {what} {given!r}{hint} allowed: {', '.join(names)}")
