"""Fixtures of all tests of steps."""

import pytest

from compress.kernels.cpu import steps


@pytest.fixture(autouse=True)
def _needs_loops():
    if steps.why_not():
        pytest.skip("; ".join(steps.why_not()))
