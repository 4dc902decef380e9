"""The first line of a command: printed before torch and transformers are imported, which takes seconds."""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType

import click

SLOW = ("huggingface_hub", "torch", "transformers")  # one of them is imported before anything else that is slow
STARTED = time.monotonic()
LINE = "note: loading torch and transformers, which takes seconds"


class Announcer:
    """A finder of modules that finds none. It prints the line when a slow library is asked for, once."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None: other finders look for the module."""
        if name in SLOW:
            stop(self)
            print(LINE, file=sys.stderr, flush=True)
        return None


def stop(announcer: Announcer) -> None:
    """Take the finder away, if it is still there."""
    if announcer in sys.meta_path:
        sys.meta_path.remove(announcer)


@contextmanager
def announce() -> Iterator[None]:
    """Prints `LINE` where the body is the first to import a slow library, unless the running command is quiet. Of the
    processes of torchrun the first says it."""
    chosen = click.get_current_context().params
    announcer = Announcer()
    if sys.modules.keys().isdisjoint(SLOW) and not chosen.get("quiet") and os.environ.get("RANK", "0") == "0":
        sys.meta_path.insert(0, announcer)
    try:
        yield
    finally:
        stop(announcer)
