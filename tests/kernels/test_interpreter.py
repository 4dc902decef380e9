"""Runs `interpreter_cases.py` under Triton's interpreter, in a process of its own: Triton decides at import."""

import os
import subprocess
import sys

import pytest
from places import SUPPORT

pytest.importorskip("triton")

CASES = SUPPORT / "interpreter_cases.py"


def test_kernels_under_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, cwd=CASES.parents[1]
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
