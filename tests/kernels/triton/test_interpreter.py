"""Runs `interpreter_cases.py` and its neighbours under the interpreter, in one process: Triton decides at import."""

import os
import subprocess
import sys

import pytest
from places import SUPPORT

pytest.importorskip("triton")

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

NAMES = (
    "cases",
    "sums",
    "grouped",
    "experts",
    "invariance",
    "int8_words",
    "fp8_blocks",
    "levels",
    "trellis",
    "columns",
    "steps",
)
# Triton 3.6 hands numpy arrays of one element to range().
OF_TRITON = "ignore:Conversion of an array with ndim > 0 to a scalar is deprecated:DeprecationWarning"


@pytest.mark.parametrize("names", [NAMES, ("decoding",)], ids=["kernels", "models"])
def test_kernels_under_the_interpreter(names):
    # Without our conftest, whose imports take as long as half of the cases.
    cases = [str(SUPPORT / "interpreter" / f"interpreter_{name}.py") for name in names]
    words = ["-q", "-p", "no:cacheprovider", "--noconftest", "-W", OF_TRITON, *cases]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        env=environment,
        capture_output=True,
        text=True,
        cwd=SUPPORT.parent,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
