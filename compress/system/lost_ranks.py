"""What the other ranks of a sharded run make of one that ends in the middle: they say which it was, and end, too.

The next collective of the others fails, in words of the communication library; or torchrun, which has seen the rank
end, stops them by SIGTERM first. Ranks know each other's processes, so that those on one machine can look who is gone.
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

from compress.errors import RankLostError, Terminated, first_line
from compress.system.comm import Comm

PATIENCE_S = 2.0  # for a process whose connections are closed already to be gone, too
PAUSE_S = 0.02
GONE = ("Z", "X")  # of /proc/PID/stat: ended, and nobody has asked how


def terminate(number: int, frame: FrameType | None) -> NoReturn:
    """A handler of SIGTERM: the first one ends the work as an interrupt would."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated("stopped by SIGTERM")


@contextmanager
def watching(comm: Comm) -> Iterator[None]:
    """Within: a rank that ends is a RankLostError on the others, which names it where it was on this machine.

    A collective where there are several ranks.
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
    """Whether communication failed, rather than what is computed. Gloo's errors have no type of their own."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


def _lost(processes: Sequence[tuple[str, int]]) -> list[int]:
    """The ranks of this machine whose processes are gone, soon after one of them has closed its connections."""
    here, until = socket.gethostname(), time.monotonic() + PATIENCE_S
    while True:
        lost = [rank for rank, (host, pid) in enumerate(processes) if host == here and not _runs(pid)]
        if lost or time.monotonic() > until:
            return lost
        time.sleep(PAUSE_S)


def _runs(pid: int) -> bool:
    """Whether a process is there."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in GONE
    except ProcessLookupError:
        return False
    except OSError:  # another user's, or a system without /proc
        return True
