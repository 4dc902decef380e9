"""A model that its owner has sharded over a mesh of two dimensions: the codes of one process."""

import pytest
import torch
from checkpoints import same
from hsdp_worker import COMMON, EXACT
from models import build
from places import RANKS
from processes import python

import compress

pytestmark = [
    pytest.mark.full,
    pytest.mark.dist,
    pytest.mark.skipif(not hasattr(torch.distributed.fsdp.FSDPModule, "reset_iter_state"), reason="torch < 2.13"),
]


def test_two_replicas_of_two_shards_decide_what_one_process_decides_and_it_goes_on_for_them(tmp_path):
    compress.quantize(build("llama"), EXACT, output=tmp_path / "one", **COMMON)
    done = python(RANKS / "hsdp_worker.py", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    same(tmp_path / "one", tmp_path / "four")
    compress.quantize(build("llama"), EXACT, output=tmp_path / "stopped", resume=True, **COMMON)
    same(tmp_path / "one", tmp_path / "stopped")
