"""A rank, and a machine, that ends in the middle of a run under torchrun."""

import pytest
import torch
from checkpoints import same
from commands import command
from models import build
from places import RANKS
from processes import python, torchruns

import compress

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(not hasattr(torch.distributed.fsdp.FSDPModule, "reset_iter_state"), reason="torch < 2.13"),
]


def test_a_rank_that_is_killed_is_named_and_the_run_resumes(tmp_path):
    """By the command line, whose processes torchrun stops as soon as it sees one end."""
    build("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "recipe.yaml").write_text("passes: [{'dying:Dying': {group_size: 16}}]")
    words = ["quantize", tmp_path / "model", "--recipe", tmp_path / "recipe.yaml", "--plugin", "dying"]
    words += ["--output", tmp_path / "out", "--device", "cpu"]
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = python(*start, "-m", "compress", *words, "--fsdp")
    said = [line for line in done.stderr.splitlines() if line.startswith("compress: ")]
    assert done.returncode == 1
    assert said == [
        "compress: rank 1 of 2 has ended in the middle: killed, or by an error of its own; "
        f"1 finished block is kept in {tmp_path / 'out.partial'}: run again with --resume"
    ], done.stderr
    assert "GLHF" not in done.stderr
    outcome = command(*words, "--resume")
    assert outcome.code == 0, outcome.err
    compress.quantize(tmp_path / "model", compress.RTN(group_size=16), output=tmp_path / "whole", verify=False)
    same(tmp_path / "out", tmp_path / "whole")


def test_a_machine_that_is_lost_is_named_and_the_run_resumes_on_the_other(tmp_path):
    """Two torchruns, of which one is killed with its process."""
    build("llama").save_pretrained(tmp_path / "model")
    (tmp_path / "recipe.yaml").write_text("passes: [{'dying:DyingNode': {group_size: 16}}]")
    words = ["-m", "compress", "quantize", tmp_path / "model", "--recipe", tmp_path / "recipe.yaml", "--plugin"]
    words += ["dying", "--output", tmp_path / "out", "--device", "cpu", "--fsdp"]
    ended = torchruns("--nproc-per-node=1", *words)
    said = [line for _, err in ended for line in err.splitlines() if line.startswith("compress: ")]
    assert len(said) == 1, ended
    assert said[0].startswith("compress: rank 1 of 2, on node 1 (")
    assert said[0].endswith(f" 1 finished block is kept in {tmp_path / 'out.partial'}: run again with --resume")
    again = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", *words, "--resume")
    assert again.returncode == 0, again.stderr
    compress.quantize(tmp_path / "model", compress.RTN(group_size=16), output=tmp_path / "whole", verify=False)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_ranks_of_other_machines_are_named_by_those_that_are_left(tmp_path):
    done = python(RANKS / "machines_worker.py", tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in (0, 2):
        assert (
            (tmp_path / f"said-{rank}").read_text().startswith("rank 1 of 3, on node 1 (machine-1), has ended in the")
        )
