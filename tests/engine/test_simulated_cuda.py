"""Runs `simulated_cases.py` on a simulated CUDA device (`support/simulated`), in a process of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from places import SUPPORT

FOLDER = SUPPORT / "simulated"

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA of its own"),
    pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="needs Linux and g++"),
]


def library(folder: Path) -> Path:
    """What torch asks of CUDA, compiled."""
    torch_folder = Path(torch.__file__).parent
    libraries = torch_folder / "lib"
    words = ["-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}", f"-L{libraries}"]
    linked = [f"-Wl,-rpath,{libraries}", "-ltorch_cpu", "-lc10"]
    out = folder / "simulated_cuda.so"
    subprocess.run(["g++", *words, str(FOLDER / "simulated_cuda.cpp"), *linked, "-o", str(out)], check=True)
    return out


@pytest.mark.parametrize("cases", ["not full", pytest.param("full", marks=pytest.mark.full)])
def test_runs_on_a_simulated_device(cases, tmp_path):
    environment = os.environ | {"LD_PRELOAD": str(library(tmp_path)), "PYTHONPATH": str(FOLDER)}
    words = ["-q", "-p", "simulated_cuda", "-p", "no:cacheprovider", "-m", cases, str(FOLDER / "simulated_cases.py")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], env=environment, capture_output=True, text=True, cwd=SUPPORT.parent
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
