"""Runs `interpreter_cases.py` and `interpreter_sums.py` under Triton's interpreter, each in a process of its own:
Triton decides at import."""

import os
import subprocess
import sys

import pytest
from places import SUPPORT

pytest.importorskip("triton")

CASES = [SUPPORT / "interpreter_cases.py", SUPPORT / "interpreter_sums.py"]


@pytest.mark.parametrize("cases", CASES, ids=lambda path: path.stem)
def test_kernels_under_the_interpreter(cases):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, cwd=cases.parents[1]
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
