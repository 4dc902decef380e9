"""How a command ends: one line on standard error and an exit code, never a traceback."""

import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from compress.cli.terminal import visible
from compress.errors import CompressError, InputError, first_line

GATE = 3  # an evaluation that fails a gate
STOPPED = 130  # what a shell reports for a command that was interrupted
TRACEBACK = "COMPRESS_TRACEBACK"


def exits_cleanly(command: Callable[..., None]) -> Callable[..., None]:
    """Exit code 2 for bad input, 1 for work that failed, 130 for an interrupt; each with a line that says why."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except InputError as error:
            fail(str(error), 2)
        except CompressError as error:
            fail(said(error), 1)
        except out_of_memory() as error:
            fail(f"out of memory ({first_line(error)}); use a smaller --batch-size or --device cpu", 1)
        except OSError as error:
            fail(f"{error.filename or 'input or output'}: {error.strerror or error}", 1)
        except KeyboardInterrupt as error:
            fail(said(error), STOPPED)
        except click.ClickException:
            raise
        except Exception as error:  # a defect of ours or of a library: one line, the traceback on request
            if os.environ.get(TRACEBACK):
                raise
            fail(f"unexpected {type(error).__name__}: {error} (set {TRACEBACK}=1 to see where)", 1)

    return wrapped


def out_of_memory() -> tuple[type[Exception], ...]:
    """What torch raises where a device is full; nothing where torch has not been imported, so cannot have raised."""
    found = getattr(sys.modules.get("torch"), "OutOfMemoryError", None)
    return () if found is None else (found,)


def said(error: BaseException) -> str:
    """What an exception says, and what was added to it on its way."""
    return "; ".join([str(error) or "stopped", *getattr(error, "__notes__", ())])


def fail(message: str, code: int) -> None:
    """Say why in one line and leave."""
    click.echo(f"compress: {visible(' '.join(message.split()))}", err=True)
    leave(code)


def leave(code: int) -> None:
    """End the process. Under torchrun without the interpreter's own end, in which torch's communication threads
    sometimes abort a rank whose work is done ("terminate called without an active exception")."""
    sys.stdout.flush()
    sys.stderr.flush()
    if "RANK" in os.environ:
        os._exit(code)
    sys.exit(code)
