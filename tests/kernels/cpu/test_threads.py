"""Threads of our own, where a compiler has no OpenMP: the same results, from several callers, and after a fork."""

import ctypes
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from compress.kernels.cpu import build, processor, trellis

STEPS, STATES, BITS = 40, 2**9, 2
DRAW = torch.Generator().manual_seed(0)
X, D, LEVEL = (torch.rand(size, generator=DRAW) for size in (STEPS * 60, STEPS * 60, STATES))


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    if build.machine_reasons():
        pytest.skip("; ".join(build.machine_reasons()))
    flags = tuple(flag for flag in build.flags_for(processor.target()) if flag != "-fopenmp")
    found, reasons = build.load_from_a_place("trellis", flags)
    if found is None:
        pytest.skip("; ".join(reasons))
    return found


@pytest.fixture(autouse=True)
def threads(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    monkeypatch.setattr(build, "library", lambda name: library)
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def paths() -> torch.Tensor:
    return trellis.best_paths(X, D, LEVEL, STEPS, BITS)


def alone() -> torch.Tensor:
    torch.set_num_threads(1)
    found = paths()
    torch.set_num_threads(3)
    return found


def test_several_threads_and_several_callers() -> None:
    expected = alone()
    for _ in range(20):
        assert torch.equal(paths(), expected)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(lambda _: paths(), range(20)):
            assert torch.equal(found, expected)


def test_a_forked_process_works_without_the_threads_of_its_parent() -> None:
    expected = paths()
    fork = multiprocessing.get_context("fork")
    told = fork.Queue()
    child = fork.Process(target=lambda: told.put(paths().tolist()), daemon=True)
    child.start()
    assert told.get(timeout=60) == expected.tolist()
    child.join()
