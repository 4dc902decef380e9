"""A pytest plugin that records the Triton kernels that each test launches, and how the test ends.

    python -m pytest -m gpu -p compress.recipes.studies.gpu.launches --launches correct.jsonl tests/kernels/triton

The first line of the file tells the origin (device, date, commit, versions) and the hashes of all kernels' sources.
Every test adds a line when it ends: {"test", "about", "kernels", "outcome", "message", "seconds",
"peak_bytes"}.

`@pytest.mark.kernels(...)` says which kernels a test is about. Tests of kernels that have not run right on this card
since they changed come first: a few cases of each. Then come tests of whole passes and of loading, then the other cases
of the first, then everything else. `--each N` keeps N cases of each test function.
"""

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from compress.evaluation.provenance import origin
from compress.recipes.studies.gpu.ledger import KernelSources, read_ledger, stale

OURS = "compress.kernels.triton."
# Cases of each test of a kernel that run before tests of whole passes.
FEW = 4
MESSAGE = 300  # characters
launched: set[str] = set()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--launches", metavar="FILE", help="record the kernels that each test launches")
    parser.addoption("--each", type=int, metavar="N", help="run N cases of each test function")


def pytest_configure(config: pytest.Config) -> None:
    for kind in (triton.runtime.JITFunction, InterpretedFunction):
        _watch(kind)
    if config.getoption("--launches") and not hasattr(config, "workerinput"):
        Path(config.getoption("--launches")).unlink(missing_ok=True)
        _write(config, {**_origin(), "sources": KernelSources().hashes()})


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    runs = read_ledger().get(_origin()["device"], {})
    behind = stale(runs, KernelSources().hashes())
    ranks: dict[str, int] = {}
    places: dict[pytest.Item, tuple[int, int]] = {}
    # In an order that is neither that of the parameters nor another one in another process.
    for item in sorted(items, key=lambda item: crc32(item.nodeid.encode())):
        function = item.nodeid.partition("[")[0]
        rank = ranks[function] = ranks.get(function, -1) + 1
        about = _about(item)
        tier = 1 if not about else 3 if not about & behind else 0 if rank < FEW else 2
        places[item] = (tier, rank)
    items.sort(key=lambda item: places[item])
    if (each := config.getoption("--each")) is not None:
        left_out = [item for item in items if places[item][1] >= each]
        items[:] = [item for item in items if places[item][1] < each]
        config.hook.pytest_deselected(items=left_out)


def pytest_runtest_setup(item: pytest.Item) -> None:
    launched.clear()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    done = yield
    report: pytest.TestReport = done.get_result()
    if report.when == "call" or report.outcome != "passed":
        message = "" if call.excinfo is None else str(call.excinfo.value)[:MESSAGE]
        line = {"test": item.nodeid, "about": sorted(_about(item)), "kernels": sorted(launched)}
        line |= {"outcome": report.outcome, "message": message}
        peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
        _write(item.config, line | {"seconds": round(report.duration, 3), "peak_bytes": peak})


def _about(item: pytest.Item) -> set[str]:
    return {name for mark in item.iter_markers("kernels") for name in mark.args}


def _watch(kind: Any) -> None:
    """Let every launch of a kernel of ours add its name to `launched`."""
    run = kind.run

    def watched(self: Any, *arguments: Any, **options: Any) -> Any:
        module = self.fn.__module__
        if module.startswith(OURS):
            launched.add(f"{module.rpartition('.')[2]}.{self.fn.__name__}")
        return run(self, *arguments, **options)

    kind.run = watched


def _origin() -> dict[str, Any]:
    return origin(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _write(config: pytest.Config, line: dict[str, Any]) -> None:
    """Append one line at once, whatever other processes append."""
    if (file := config.getoption("--launches")) is None:
        return
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, json.dumps(line).encode() + b"\n")
    finally:
        os.close(descriptor)
