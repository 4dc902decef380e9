"""The note that libraries are being loaded, on a terminal where that takes seconds: torch and transformers can."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import click

SLOW = ("huggingface_hub", "torch", "transformers")  # where one is there already, nobody waits
STARTED = time.monotonic()
PATIENCE_S = 3.0
LINE = "note: still loading torch and transformers"


def say_if_importing() -> None:
    """Print the note, if the first thread is importing a module."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            print(LINE, file=sys.stderr, flush=True)
            return
        frame = frame.f_back


@contextmanager
def announce() -> Iterator[None]:
    """Prints `LINE` where the body waits for slow libraries, on a terminal and unless the running command is quiet. Of
    the processes of torchrun the first says it."""
    chosen = click.get_current_context().params
    clock = threading.Timer(PATIENCE_S, say_if_importing)
    clock.daemon = True
    asked = sys.stderr.isatty() and not chosen.get("quiet") and os.environ.get("RANK", "0") == "0"
    if asked and sys.modules.keys().isdisjoint(SLOW):
        clock.start()
    try:
        yield
    finally:
        clock.cancel()
