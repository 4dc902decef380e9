"""Ends of commands: one line on standard error and an exit code, never a traceback."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, wraps
from types import FrameType
from typing import Any, NoReturn

import click

from compress.base.errors import CompressError, InputError, Terminated, first_line, why_not_written
from compress.base.terminal import say
from compress.cli.start_line import announce

GATE = 3  # an evaluation that fails a gate
# Exit codes, as of a shell, for commands that were interrupted, ended by another signal (its number is added), or
# whose reader went away (as `| head` does).
STOPPED, BY_SIGNAL, UNREAD = 130, 128, 141
ENDING = (signal.SIGTERM, signal.SIGHUP)
AGAIN_S = 0.05  # until a lost signal is sent again
TRACEBACK = "COMPRESS_TRACEBACK"
SAID_OF_CPU = "DefaultCPUAllocator: can't allocate memory"  # by torch, in a RuntimeError
LESS_MEMORY = "give a smaller --batch-size, --spill FOLDER to a run that writes a model, or --device cpu for a full GPU"


def exits_cleanly(command: Callable[..., None]) -> Callable[..., None]:
    """Exit code 2 for bad input, 1 for work that failed, 130 for an interrupt, 143 for SIGTERM, 129 for SIGHUP; each
    with a line that says why. 141, without one, where nobody reads what is printed any more."""

    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            with announce():
                command(*args, **kwargs)
            sys.stdout.flush()
        except BrokenPipeError:
            leave_unread()
        except InputError as error:
            fail(str(error), 2)
        except CompressError as error:
            fail(message_of(error), 1)
        except OSError as error:
            fail(f"{error.filename or 'input or output'}: {why_not_written(error)}", 1)
        except KeyboardInterrupt as error:
            fail(message_of(error), BY_SIGNAL + error.number if isinstance(error, Terminated) else STOPPED)
        except click.ClickException:
            raise
        except Exception as error:  # a defect of ours or of a library: one line, the traceback on request
            if os.environ.get(TRACEBACK):
                raise
            if is_out_of_memory(error):
                fail(f"out of memory ({first_line(error)}): {LESS_MEMORY}", 1)
            fail(f"unexpected {type(error).__name__}: {error} (set {TRACEBACK}=1 to see where)", 1)
        except BaseException as error:
            if isinstance(error, SystemExit | GeneratorExit) or os.environ.get(TRACEBACK):
                raise
            fail(f"a library failed: {type(error).__name__}: {first_line(error)} (set {TRACEBACK}=1 to see where)", 1)

    return wrapped


def is_out_of_memory(error: Exception) -> bool:
    """True for what Python and torch raise where memory is short."""
    of_device = getattr(sys.modules.get("torch"), "OutOfMemoryError", ())  # only an imported torch can have raised it
    return isinstance(error, (MemoryError, of_device)) or SAID_OF_CPU in str(error)


def leave_unread() -> NoReturn:
    """Leave without a word: the reader of standard output has gone."""
    print_nowhere()
    leave(UNREAD)


def print_nowhere() -> None:
    """Let what is left to print go nowhere: the interpreter writes it when it ends, and would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def terminate(number: int, frame: FrameType | None) -> NoReturn:
    """A handler of SIGTERM and SIGHUP: the first ends the work as an interrupt would, the second the process at
    once."""
    signal.signal(number, signal.SIG_DFL)
    raise Terminated(number)


@contextmanager
def terminating() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into a line and an exit code, where nobody else handles them (as nohup does). No such
    signal and no interrupt is lost."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [number for number in ENDING if signal.getsignal(number) is signal.SIG_DFL]
    usual, sys.unraisablehook = sys.unraisablehook, partial(_send_again, sys.unraisablehook)
    for number in ours:
        signal.signal(number, terminate)
    try:
        yield
    finally:
        sys.unraisablehook = usual
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _send_again(usual: Callable[[Any], object], lost: Any) -> None:
    """A hook for exceptions that Python cannot raise, as in `__del__`: it only prints them. An interrupt among them is
    sent again a little later, when other code runs."""
    if not isinstance(lost.exc_value, KeyboardInterrupt):
        usual(lost)
        return
    number = getattr(lost.exc_value, "number", signal.SIGINT)
    if number in ENDING and signal.getsignal(number) is signal.SIG_DFL:
        signal.signal(number, terminate)
    timer = threading.Timer(AGAIN_S, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()


def message_of(error: BaseException) -> str:
    """An exception's message, and the notes that were added to it on its way."""
    return "; ".join([str(error) or "stopped", *getattr(error, "__notes__", ())])


def fail(message: str, code: int) -> None:
    """Say why in one line and leave."""
    with suppress(OSError):  # the terminal is closed
        say(f"compress: {' '.join(message.split())}", stderr=True)
    leave(code)


def leave(code: int) -> NoReturn:
    """End the process. Under torchrun without the interpreter's own end, in which torch's communication threads
    sometimes abort a rank whose work is done ("terminate called without an active exception")."""
    try:
        sys.stdout.flush()
    except OSError:
        print_nowhere()
    with suppress(OSError):
        sys.stderr.flush()
    if "RANK" in os.environ:
        os._exit(code)
    sys.exit(code)
