"""File work that the ranks share: a failure on one rank is an error on all."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError

from compress.base.collectives import Comm
from compress.base.errors import CheckpointError, CompressError, WriteError

T = TypeVar("T")


class Together:
    """Runs work on every rank and raises on all when one fails. partial: the directory written to, for messages."""

    def __init__(self, comm: Comm, partial: Path) -> None:
        self.comm, self.partial = comm, partial

    def __call__(self, what: str, work: Callable[[], T]) -> T:
        """Run `work` on this rank, as every other rank does. Raises on every rank when it fails on any: WriteError for
        writing `what`, CompressError for others."""
        result: list[T] = []
        problem: str | WriteError | None = None
        try:
            result.append(work())
        except CompressError as error:
            problem = str(error)
        except (OSError, SafetensorError) as error:
            problem = WriteError(f"cannot write {what} in {self.partial}: {error}")
        self.comm.fail_together(problem)
        return result[0]

    def first(self, what: str, work: Callable[[], object]) -> None:
        """Run `work` on the first rank only; a failure is an error on every rank."""
        self(what, lambda: work() if self.comm.rank == 0 else None)


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Turns errors of reading `what` in the body into a CheckpointError that names it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{what} cannot be read ({error}); drop that run with --overwrite") from None
