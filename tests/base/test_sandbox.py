"""Work in a process with limits: its results, what it raises, and what goes beyond the limits."""

import os
import time

import pytest

from compress.base import sandbox
from compress.base.errors import InputError
from compress.base.sandbox import Limited, LimitError


def test_calls_are_answered_by_one_process_and_errors_come_back() -> None:
    work = Limited(lambda n: (os.getpid(), 10 // n))
    (first, found), (second, _) = work(5), work(2)
    assert found == 2
    assert first == second != os.getpid()
    with pytest.raises(InputError, match="integer division or modulo by zero"):
        work(0)
    assert work(1) == (first, 10)
    work.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    assert work(1)[0] != first


@pytest.mark.first
@pytest.mark.parametrize("unseen", ["interpreter", "library"])
def test_what_takes_too_long_or_too_much_is_ended(unseen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation that no signal interrupts, a loop, and memory that a library gives up over."""
    monkeypatch.setattr(sandbox, "SECONDS", 1)
    begun = time.monotonic()
    slow = Limited((lambda _: 9**9_999_999 % 3) if unseen == "library" else (lambda _: sum(iter(int, 1))))
    with pytest.raises(LimitError, match="more than 1 seconds"):
        slow(None)
    assert time.monotonic() - begun < 10
    monkeypatch.setattr(sandbox, "ROOM", 2**27)
    large = Limited((lambda n: "x" * n) if unseen == "interpreter" else (lambda n: os._exit(134)))
    with pytest.raises(LimitError, match="more than 128 MiB of memory"):
        large(2**30)


def test_the_environment_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(sandbox.PARALLELISM, "true")
    work = Limited(lambda _: os.environ[sandbox.PARALLELISM])
    assert work(None) == "false"
    assert os.environ[sandbox.PARALLELISM] == "true"
