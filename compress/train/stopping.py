"""Stopping between two steps, on all ranks together, when a person or a scheduler asks for it."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from compress.comm import Comm

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopping:
    """Within: the first SIGINT or SIGTERM is kept for the end of the step; the second acts at once, as it always does.

    Outside of the main thread, where Python takes no signals, nothing changes.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm, self.wanted, self.before = comm, False, dict[int, Any]()

    def __enter__(self) -> "Stopping":
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._keep) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._give_back()

    def _keep(self, number: int, frame: FrameType | None) -> None:
        self.wanted = True
        self._give_back()

    def _give_back(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before = {}

    def asked(self) -> bool:
        """Whether any rank was asked to stop; the same answer on all."""
        return any(self.comm.gather_objects(self.wanted))
