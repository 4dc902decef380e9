"""Detects that a rank of a sharded run has ended in the middle: the other ranks name it and end, too.

The next collective of the others fails with a message of the communication library; or torchrun, which has seen the
rank end, stops them by SIGTERM first. Every rank knows the machine and process id of every other, so that ranks on the
same machine can check which process is gone. Between machines, every rank that is left says so in the group's store,
which is on the machine of the rendezvous: a rank that says nothing there is taken for lost.
"""

import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

import torch.distributed as dist

from compress.base.collectives import Comm
from compress.base.errors import RankLostError, Terminated, first_line

PATIENCE_S = 2.0  # time for a process that has closed its connections to end
ANSWER_S = 10.0  # time for the ranks of other machines to find the group broken, and say that they are left
PAUSE_S = 0.02
GONE = ("Z", "X")  # of /proc/PID/stat: ended, and nobody has asked how


class Process(NamedTuple):
    """A rank's process: its machine, its id there, and the number of its torchrun."""

    host: str
    pid: int
    node: int


def terminate(number: int, frame: FrameType | None) -> NoReturn:
    """A handler of SIGTERM: the first one ends the work as an interrupt would."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated(number)


@contextmanager
def watching(comm: Comm) -> Iterator[None]:
    """Raises RankLostError in the body when another rank ends, with that rank's number, and its machine where there
    are several.

    Entering is a collective where there are several ranks.
    """
    if not comm.active:
        yield
        return
    own = Process(socket.gethostname(), os.getpid(), int(os.environ.get("GROUP_RANK", "0")))
    processes: list[Process] = comm.gather_objects(own)
    try:
        yield
    except (Terminated, RuntimeError) as error:
        if not isinstance(error, Terminated) and not _of_the_group(error):
            raise
        if signal.getsignal(signal.SIGTERM) is terminate:  # what is to be said now is not to be cut off
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        lost = _lost(processes)
        silent = _silent(processes, comm.rank)
        if not lost and not silent and isinstance(error, Terminated):
            raise
        ended = _named(lost or silent, processes) if lost or silent else "another rank"
        why = "killed, or by an error of its own" if lost else f"it does not answer ({first_line(error)})"
        raise RankLostError(f"{ended} has ended in the middle: {why}") from None


def _of_the_group(error: RuntimeError) -> bool:
    """True for an error of communication, not of the computation. Gloo's errors have no type of their own."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


def _lost(processes: Sequence[Process]) -> list[int]:
    """The ranks of this machine whose processes are gone. Waits up to PATIENCE_S for the first; empty for none."""
    here, until = socket.gethostname(), time.monotonic() + PATIENCE_S
    while True:
        lost = [rank for rank, (host, pid, _) in enumerate(processes) if host == here and not _runs(pid)]
        if lost or time.monotonic() > until:
            return lost
        time.sleep(PAUSE_S)


def _silent(processes: Sequence[Process], rank: int) -> list[int]:
    """The ranks of other machines that do not say in the store that they are left, in ANSWER_S. Says it of this one."""
    others = [i for i, each in enumerate(processes) if each.host != processes[rank].host]
    until = time.monotonic() + ANSWER_S
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"compress/left/{rank}", "")
        while (silent := [i for i in others if not store.check([f"compress/left/{i}"])]) and time.monotonic() < until:
            time.sleep(PAUSE_S)
        return silent
    except RuntimeError:  # the store is gone, and its machine with it
        return [i for i in others if processes[i].host == processes[0].host]


def _named(ranks: Sequence[int], processes: Sequence[Process]) -> str:
    """Ranks in words, with their machines where there are several."""
    words = f"rank {', '.join(map(str, ranks))} of {len(processes)}"
    if len({each.node for each in processes}) == 1 == len({each.host for each in processes}):
        return words
    places = dict.fromkeys(f"node {processes[i].node} ({processes[i].host})" for i in ranks)
    return f"{words}, on {' and '.join(places)},"


def _runs(pid: int) -> bool:
    """True for a process that runs; also where this cannot be found out."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in GONE
    except ProcessLookupError:
        return False
    except OSError:  # another user's, or a system without /proc
        return True
