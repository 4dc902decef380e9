"""Experts of a mixture that ranks share out: each decides about its own, and all together what one process decides."""

import json
from pathlib import Path

import pytest
import torch
from checkpoints import same
from commands import StopAfterOne
from experts_worker import COMMON, METHODS
from mixtures import FAMILIES, made, to_float8
from places import RANKS
from processes import python

import compress

pytestmark = [
    pytest.mark.full,
    pytest.mark.dist,
    pytest.mark.skipif(not hasattr(torch.distributed.fsdp.FSDPModule, "reset_iter_state"), reason="torch < 2.13"),
]
LAYERS = FAMILIES["deepseek-v3"][3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What one process makes of a mixture, then two ranks, then three."""
    folder = tmp_path_factory.mktemp("experts")
    made("deepseek-v3").save_pretrained(folder / "model")
    for name, passes in METHODS.items():
        compress.quantize(folder / "model", passes, output=folder / f"{name}-1", **COMMON)
    made("deepseek-v3").bfloat16().save_pretrained(folder / "float8")
    to_float8(folder / "float8", scale_fmt="ue8m0")
    compress.quantize(folder / "float8", METHODS["gptq"], output=folder / "float8-1", **COMMON)
    how = {"output": folder / "one", "reporter": StopAfterOne(), **COMMON}
    with pytest.raises(KeyboardInterrupt):
        compress.quantize(folder / "model", METHODS["gptq"], **how)
    done = python(RANKS / "experts_worker.py", folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_decide_what_one_process_decides(folder, name, ranks):
    layers = 12 if name == "pruned" else LAYERS
    same(folder / f"{name}-1", folder / f"{name}-{ranks}", layers=layers)
    one, other = (json.loads((folder / f"{name}-{n}" / "compress.json").read_text()) for n in (1, ranks))
    figures = [{each["name"]: each["figures"] for each in record["layers"]} for record in (one, other)]
    assert figures[0].keys() == figures[1].keys()
    for layer, found in figures[1].items():
        assert found["sha256"] == figures[0][layer]["sha256"]
        assert found.get("routed_tokens") == figures[0][layer].get("routed_tokens")
    assert one["ranges"] == other["ranges"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_computes_its_own_experts(folder, ranks):
    found = json.loads((folder / f"found-{ranks}.json").read_text())
    assert found["experts"] == {2: [["0", "1"], ["2", "3"]], 3: [["0", "1"], ["2"], ["3"]]}[ranks]
    assert found["said"] == ["the first expert is damaged"] * ranks


@pytest.mark.parametrize("ranks", [2, 3])
def test_no_rank_makes_a_block_of_float8_dense(folder, ranks):
    same(folder / "float8-1", folder / f"float8-{ranks}", layers=LAYERS)
    found = json.loads((folder / f"found-{ranks}.json").read_text())
    # A block has 12 layers of experts and 8 others, of which each rank keeps a share in the dtype of the files.
    assert found["dense"] == {2: [8, 8], 3: [8, 8, 8]}[ranks]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_with_all_experts_share_out_the_tokens(folder, ranks):
    same(folder / "gptq-1", folder / f"copies-{ranks}", layers=LAYERS)


def test_runs_of_one_process_and_of_two_ranks_resume_on_three(folder):
    for name in ("one", "two"):
        same(folder / "gptq-1", folder / name, layers=LAYERS)
