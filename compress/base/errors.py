"""The exception tree. A message is one line: what was given, what is allowed, what to do."""

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

from compress.kernels.errors import CompressError as CompressError
from compress.kernels.errors import InputError as InputError


class NoSuchModelError(InputError):
    """A name of a model that is no folder here, and that the hub did not give."""


class CheckpointError(InputError):
    """A checkpoint that is damaged, or that does not hold what its own files say."""


class WriteError(CompressError):
    """A file could not be written, for example to a full disk. Files written before it stay."""


class RankLostError(CompressError):
    """Another process of a sharded run has ended, so that this one cannot finish its work."""


def install(extra: str) -> str:
    """The command that installs an extra of this package, which is on no index."""
    return f"in the checkout of compress run: pip install -e '.[{extra}]'"


class Terminated(KeyboardInterrupt):
    """SIGTERM, or SIGHUP of a terminal that was closed: they end the work as an interrupt does."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        super().__init__(number)
        self.number = number

    def __str__(self) -> str:
        closed = ", as of a terminal that was closed" if self.number == signal.SIGHUP else ""
        return f"stopped by {signal.Signals(self.number).name}{closed}"


def why_not_written(error: OSError) -> str:
    """The reason of the operating system, in its words; where numpy has kept it to itself, the likely one."""
    unsaid = error.strerror is None and re.fullmatch(r"\d+ requested and \d+ written", str(error))
    return "the disk is full, or takes no larger file" if unsaid else error.strerror or first_line(error)


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, with the next one where it ends in a colon; its type where the message
    is empty."""
    first, *rest = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    return f"{first} {rest[0]}" if first.endswith(":") and rest else first


def one_of(what: str, given: str, allowed: Iterable[str], meant: str | None = None) -> str:
    """`given` when it is allowed. Otherwise raises InputError, which names the allowed values and the likeliest one.

    meant: the likeliest value, quoted, from a caller that knows it better than a comparison of letters; "" for none.
    """
    names = list(allowed)
    if given in names:
        return given
    meant = likeliest(given, names) if meant is None else meant
    hint = f"; did you mean {meant}?" if meant else ";"
    raise InputError(f"unknown {what} {given!r}{hint} allowed: {', '.join(names)}")


def check_least(options: object, least: int, *names: str, unit: str = "") -> None:
    """Raises InputError for the first of these options that is less than it may be."""
    for name in names:
        if not (value := getattr(options, name)) >= least:
            raise InputError(f"{name} {value}; allowed: {least} or more{unit}")


def check_idle(options: object, of: Mapping[str, Sequence[str]]) -> None:
    """Raises InputError for an option that is not its default where all options that give it an effect are 0. of: the
    names of these, by the option's."""
    for name, others in of.items():
        value, default = getattr(options, name), getattr(type(options), name)
        if value != default and not any(getattr(options, other) for other in others):
            raise InputError(f"{name}={value} is of {' or '.join(others)}, which is 0; give both or neither")


def likeliest(given: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant, quoted: `given` in other capitals or with other dashes, or the closest name.
    None where no name is close."""
    known = {_plain(name): name for name in names}
    close = [_plain(given)] if _plain(given) in known else get_close_matches(_plain(given), known, n=1, cutoff=0.5)
    return repr(known[close[0]]) if close else None


def _plain(name: str) -> str:
    return str(name).lower().replace("_", "-")
