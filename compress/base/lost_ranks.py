"""Detects that a rank of a sharded run has ended in the middle: the other ranks name it and end, too.

The next collective of the others fails with a message of the communication library; or torchrun, which has seen the
rank end, stops them by SIGTERM first. Every rank knows the host and process id of every other, so that ranks on the
same machine can check which process is gone.
"""

import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch.distributed as dist

from compress.base.collectives import Comm
from compress.base.errors import RankLostError, Terminated, first_line

PATIENCE_S = 2.0  # time for a process that has closed its connections to end
PAUSE_S = 0.02
GONE = ("Z", "X")  # of /proc/PID/stat: ended, and nobody has asked how


def terminate(number: int, frame: FrameType | None) -> NoReturn:
    """A handler of SIGTERM: the first one ends the work as an interrupt would."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated(number)


@contextmanager
def watching(comm: Comm) -> Iterator[None]:
    """Raises RankLostError in the body when another rank ends. The error names ranks that ran on this machine.

    Entering is a collective where there are several ranks.
    """
    if not comm.active:
        yield
        return
    processes = comm.gather_objects((socket.gethostname(), os.getpid()))
    try:
        yield
    except (Terminated, RuntimeError) as error:
        if not isinstance(error, Terminated) and not _of_the_group(error):
            raise
        if signal.getsignal(signal.SIGTERM) is terminate:  # what is to be said now is not to be cut off
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        lost = _lost(processes)
        if not lost and isinstance(error, Terminated):
            raise
        ended = f"rank {', '.join(map(str, lost))} of {comm.world}" if lost else "another rank, on another machine,"
        why = "" if lost else f" ({first_line(error)})"
        raise RankLostError(f"{ended} has ended in the middle: killed, or by an error of its own{why}") from None


def _of_the_group(error: RuntimeError) -> bool:
    """True for an error of communication, not of the computation. Gloo's errors have no type of their own."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


def _lost(processes: Sequence[tuple[str, int]]) -> list[int]:
    """The ranks of this machine whose processes are gone. Waits up to PATIENCE_S for the first; empty for none."""
    here, until = socket.gethostname(), time.monotonic() + PATIENCE_S
    while True:
        lost = [rank for rank, (host, pid) in enumerate(processes) if host == here and not _runs(pid)]
        if lost or time.monotonic() > until:
            return lost
        time.sleep(PAUSE_S)


def _runs(pid: int) -> bool:
    """True for a process that runs; also where this cannot be found out."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in GONE
    except ProcessLookupError:
        return False
    except OSError:  # another user's, or a system without /proc
        return True
