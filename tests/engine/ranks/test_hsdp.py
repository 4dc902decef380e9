"""A mesh of two dimensions, made by the owner of a model or asked for by its shape: the codes of one process."""

from pathlib import Path

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What one process makes of a model, and four ranks."""
    folder = tmp_path_factory.mktemp("hsdp")
    build("llama").save_pretrained(folder / "model")
    compress.quantize(folder / "model", EXACT, output=folder / "one", **COMMON)
    done = python(RANKS / "hsdp_worker.py", folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("name", ["four", "asked", "copies"])
def test_four_ranks_decide_what_one_process_decides(folder, name):
    same(folder / "one", folder / name)


@pytest.mark.parametrize("name", ["stopped", "left"])
def test_one_process_goes_on_for_four_ranks(folder, name):
    model = build("llama") if name == "stopped" else folder / "model"
    compress.quantize(model, EXACT, output=folder / name, resume=True, **COMMON)
    same(folder / "one", folder / name)
