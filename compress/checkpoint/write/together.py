"""Work on files that every rank does a part of: a failure on one is an error on all."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError

from compress.errors import CheckpointError, CompressError, WriteError
from compress.system.comm import Comm

T = TypeVar("T")


class Together:
    """Calls `work` on this rank, as every other rank does. partial: the directory that is written to."""

    def __init__(self, comm: Comm, partial: Path) -> None:
        self.comm, self.partial = comm, partial

    def __call__(self, what: str, work: Callable[[], T]) -> T:
        """Write `what`; a failure, here or on another rank, is an error on every rank."""
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
        """The same, of work that the first rank does for all."""
        self(what, lambda: work() if self.comm.rank == 0 else None)


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Within: what cannot be read is an error that names it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{what} cannot be read ({error}); drop that run with --overwrite") from None
