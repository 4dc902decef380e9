"""Losses under FSDP2 on two gloo ranks: the gradients of one process."""

import os
import subprocess
import sys

import pytest
import torch
from losses_worker import TOKENS, WORLD, gradients, made
from places import RANKS, SUPPORT


@pytest.mark.full
@pytest.mark.dist
def test_two_ranks_have_the_gradients_of_one_process(tmp_path) -> None:
    """With a rank that has nothing but padding, a head that is resharded after its forward, negatives of all ranks."""
    paths = os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    words = [sys.executable, str(RANKS / "losses_worker.py"), str(tmp_path)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    found, refused = torch.load(tmp_path / "found.pt")
    torch.testing.assert_close(found, gradients(made(), slice(0, WORLD * TOKENS), 1))
    assert refused.startswith("the head's weight is sharded; call the loss inside the forward of the FSDP unit")
