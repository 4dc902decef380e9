"""Stopping between two steps, on all ranks together, when a person or a scheduler asks for it."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from compress.base.collectives import Comm
from compress.base.errors import Terminated

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopping:
    """Defers the first of `SIGNALS` to the end of the step; the second acts at once, as usual. One that is ignored
    stays so.

    Outside of the main thread, where Python delivers no signals, nothing changes.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm, self.before = comm, dict[int, Any]()
        self.number: int | None = None

    def __enter__(self) -> "Stopping":
        if threading.current_thread() is threading.main_thread():
            heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self.before = {number: signal.signal(number, self._keep) for number in heard}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._give_back()

    def _keep(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        self._give_back()

    def _give_back(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before = {}

    def asked(self) -> KeyboardInterrupt | None:
        """The exception to raise where any rank was asked to stop, the same on all ranks; None otherwise."""
        numbers = {number for number in self.comm.gather_objects(self.number) if number is not None}
        if not numbers:
            return None
        ends = numbers - {signal.SIGINT}
        return Terminated(max(ends)) if ends else KeyboardInterrupt()
