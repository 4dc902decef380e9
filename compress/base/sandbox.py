"""Runs work of untrusted files, such as a chat template, in a process with limits of time and memory.

The process is a fork of this one, so that it has what the work needs without importing it again, and stays for further
calls. It must not compute with torch, whose threads a fork does not have.
"""

import contextlib
import faulthandler
import gc
import os
import re
import resource
import signal
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from compress.base.errors import CompressError, InputError, first_line

PAGES = Path("/proc/self/statm")
SECONDS = 10  # of one call; usual ones take a thousandth
ROOM = 2**30  # bytes beside those of this process
PARALLELISM = "TOKENIZERS_PARALLELISM"  # of the tokenizers library, whose threads a fork does not have either


class LimitError(InputError):
    """Work that takes more time or memory than it may."""


def check_expressions(what: str, expressions: Sequence[str], names: Sequence[str]) -> None:
    """Raises LimitError for regular expressions that take much time or memory to match with names of layers from the
    beginning: repetitions inside of repetitions double it with every letter. what: the expressions, in words."""

    def match(_: object) -> None:
        for expression in expressions:
            with contextlib.suppress(re.error, OverflowError, RecursionError):  # it is none, as its reader says
                compiled = re.compile(expression)
                for name in names:
                    compiled.match(name)

    limited = Limited(match)
    try:
        if expressions:
            limited(None)
    except LimitError as error:
        raise LimitError(
            f"{what} cannot be matched with names of layers ({error}); write it without repetitions inside of others"
        ) from None
    finally:
        limited.stop()


class Limited:
    """A function of one argument, called in a process of its own, with at most SECONDS a call and ROOM bytes in all."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self.work = work
        self._process: int | None = None
        self._ours: Any = None

    def __call__(self, given: Any) -> Any:
        """The result of the function. Raises InputError for what it raises, and LimitError for too much time or
        memory."""
        if self._process is None:
            self._start()
        try:
            self._ours.send(given)
            if not self._ours.poll(SECONDS):
                raise LimitError(f"it takes more than {SECONDS} seconds")
            problem, result = self._ours.recv()
        except BaseException as error:
            self.stop()
            if isinstance(error, EOFError | OSError):  # it was killed, or gave up
                raise LimitError(f"it takes more than {ROOM >> 20} MiB of memory") from None
            raise
        if problem is not None:
            raise InputError(problem)
        return result

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            process, self._process = self._process, None
            self._ours.close()
            with contextlib.suppress(ProcessLookupError, ChildProcessError):  # gone, where SIGCHLD is ignored
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # as the interpreter ends
            self.stop()

    def _start(self) -> None:
        ours, theirs = Pipe()
        before = os.environ.get(PARALLELISM)
        os.environ[PARALLELISM] = "false"  # the library warns of forks otherwise
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
                process = os.fork()
            if process == 0:
                _serve(self.work, ours, theirs)
        except OSError as error:
            raise CompressError(f"no process can be started: {error.strerror}") from None
        finally:
            os.environ.pop(PARALLELISM, None)
            os.environ |= {} if before is None else {PARALLELISM: before}
        theirs.close()
        self._process, self._ours = process, ours


def _serve(work: Callable[[Any], Any], ours: Connection, theirs: Connection) -> NoReturn:
    """Answer calls until the other end is closed."""
    try:
        ours.close()
        gc.disable()  # nothing of the process that was forked is to be cleaned up here
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where libraries say that they give up
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):
            held = int(PAGES.read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (held + ROOM, held + ROOM))
        while True:
            given = theirs.recv()
            signal.alarm(2 * SECONDS)  # should the other process be gone
            theirs.send(_answer(work, given))
            signal.alarm(0)
    except BaseException:  # noqa: BLE001 - the other end is closed, or there is no memory
        os._exit(1)


def _answer(work: Callable[[Any], Any], given: Any) -> tuple[str | None, Any]:
    """(The problem, the result.)"""
    try:
        return None, work(given)
    except MemoryError:
        raise
    except BaseException as error:  # noqa: BLE001 - a panic of the tokenizers library is no Exception
        return first_line(error), None
