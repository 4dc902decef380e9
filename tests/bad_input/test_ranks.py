"""What several ranks cannot do is refused on each of them, before any work."""

import json

import pytest
import torch
from mixtures import made
from places import RANKS
from processes import python

MESSAGES = {
    "more than there are": "fsdp '2x2' on 2 ranks; give REPLICASxSHARDS with that product, or nothing: 1x2",
    "none": "fsdp '0x2' on 2 ranks; give REPLICASxSHARDS with that product, or nothing: 1x2",
    "no shape": "fsdp 'demo' on 2 ranks; give REPLICASxSHARDS with that product, or nothing: 1x2",
    "no chain": "ranks cannot share out the experts of a model whose blocks are no chain: give --one-block",
}


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.skipif(not hasattr(torch.distributed.fsdp.FSDPModule, "reset_iter_state"), reason="torch < 2.13")
def test_meshes_and_models_that_ranks_cannot_have(tmp_path):
    made("deepseek-v3").save_pretrained(tmp_path / "model")
    done = python(RANKS / "refused_worker.py", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((tmp_path / "said.json").read_text()) == [MESSAGES] * 2
    assert not (tmp_path / "out").exists()
