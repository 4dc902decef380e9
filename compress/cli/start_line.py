"""The note that libraries are being loaded, on a terminal where that takes seconds: torch and transformers can."""

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType

import click

SLOW = ("huggingface_hub", "torch", "transformers")  # one of them is imported before anything else that is slow
STARTED = time.monotonic()
PATIENCE_S = 3.0
LINE = "note: still loading torch and transformers"


class Announcer:
    """A finder of modules that finds none. When a slow library is asked for, it starts a clock, once; the note is
    printed if the program is still importing when that runs out."""

    def __init__(self) -> None:
        self.clock = threading.Timer(PATIENCE_S, self.say)
        self.clock.daemon = True

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None: other finders look for the module."""
        if name in SLOW:
            sys.meta_path.remove(self)
            self.clock.start()
        return None

    def say(self) -> None:
        """Print the note, if the first thread is importing a module."""
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        while frame is not None:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                print(LINE, file=sys.stderr, flush=True)
                return
            frame = frame.f_back

    def stop(self) -> None:
        """Print nothing from now on."""
        self.clock.cancel()
        if self in sys.meta_path:
            sys.meta_path.remove(self)


@contextmanager
def announce() -> Iterator[None]:
    """Prints `LINE` where the body waits for slow libraries, on a terminal and unless the running command is quiet. Of
    the processes of torchrun the first says it."""
    chosen = click.get_current_context().params
    announcer = Announcer()
    asked = sys.stderr.isatty() and not chosen.get("quiet") and os.environ.get("RANK", "0") == "0"
    if asked and sys.modules.keys().isdisjoint(SLOW):
        sys.meta_path.insert(0, announcer)
    try:
        yield
    finally:
        announcer.stop()
