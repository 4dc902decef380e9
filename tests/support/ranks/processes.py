"""Python in a process of its own."""

import os
import subprocess
import sys

from places import RANKS, SUPPORT


def python(*words: object) -> subprocess.CompletedProcess[str]:
    """`python WORDS` with the modules of this folder; its import of transformers takes longer than most tests."""
    paths = [str(SUPPORT), str(SUPPORT / "images"), str(RANKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, *map(str, words)], env=environment, capture_output=True, text=True, check=False, timeout=250
    )
