"""Training under FSDP2 on gloo ranks: the losses and weights of one process, and runs that go on with other ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from models import GATED, strong
from places import RANKS, SUPPORT
from training_worker import CHOSEN, DATA, FIRST, OPTIONS, PASSES, TABLES, own_loop

import compress
from compress.checkpoint.read.compressed_layers import read_tensors
from compress.checkpoint.read.source import find_source
from compress.weights.matrix import Weight

pytestmark = [
    pytest.mark.full,
    pytest.mark.dist,
    pytest.mark.skipif(not hasattr(torch.distributed.fsdp.FSDPModule, "reset_iter_state"), reason="torch < 2.13"),
]

# Norms and softmax of the model compute in float32 whatever it is: the last place of that shows.
SAME = 1e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model, what one process makes of it, and what ranks make of it."""
    folder = tmp_path_factory.mktemp("ranks")
    for name, dtype in (("model", torch.float64), ("narrow", torch.bfloat16)):
        strong(dtype=dtype).save_pretrained(folder / name)
    tied = transformers.LlamaConfig(**{**GATED, "tie_word_embeddings": True, "initializer_range": 0.1})
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(tied).double().save_pretrained(folder / "tied")
    result = compress.quantize(folder / "model", PASSES, output=folder / "out-1", **DATA)
    (folder / "losses-1.json").write_text(json.dumps(result.record.training))
    own_loop(folder / "model", folder / "own-never")
    paths = [str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, str(RANKS / "training_worker.py"), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def histories(folder: Path, name: str) -> list[dict]:
    return json.loads((folder / f"losses-{name}.json").read_text())


def weights(output: Path) -> dict[str, torch.Tensor]:
    found = read_tensors(find_source(str(output)))
    return {name: value.dequantize() if isinstance(value, Weight) else value for name, value in found.items()}


def close(one: torch.Tensor, other: torch.Tensor, name: str) -> None:
    torch.testing.assert_close(one, other, rtol=SAME, atol=SAME, msg=lambda said: f"{name}: {said}")


def test_two_ranks_have_the_losses_of_one_process(folder):
    for one, two in zip(histories(folder, "1"), histories(folder, "2"), strict=True):
        assert len(one["steps"]) == OPTIONS["steps"]
        lost = {key for key in one["held_out"][0] if key != "step"}
        for key in (*sorted(lost), "loss", "gradient", "scale_gradient"):
            mine, theirs = ([line[key] for line in history["steps"]] for history in (one, two))
            assert mine == pytest.approx(theirs, rel=SAME, abs=1e-15), key
        assert [line["logits"] for line in one["held_out"]] == pytest.approx(
            [line["logits"] for line in two["held_out"]], rel=SAME
        )


def test_two_ranks_train_what_one_process_trains(folder):
    one, two = weights(folder / "out-1"), weights(folder / "out-2")
    assert one.keys() == two.keys()
    for name, value in one.items():
        close(value, two[name], name)


def test_a_training_that_two_ranks_began_goes_on_with_three(folder):
    one, three = histories(folder, "1"), histories(folder, "3")
    assert three[0]["resumed"] == 2  # of the last checkpoint
    mine = [line["loss"] for line in one[0]["steps"]][2:]
    assert mine == pytest.approx([line["loss"] for line in three[0]["steps"]], rel=SAME)
    first, last = weights(folder / "out-1"), weights(folder / "resumed")
    for name, value in first.items():
        close(value, last[name], name)


def test_two_ranks_prune_what_one_process_prunes_before_anything_ran(folder, tmp_path):
    compress.quantize(folder / "model", FIRST, output=tmp_path / "first-1", **DATA)
    one, two = weights(tmp_path / "first-1"), weights(folder / "first-2")
    for name, value in one.items():
        close(value, two[name], name)
        assert "proj" not in name or (value == 0).double().mean() == pytest.approx(0.5, abs=1e-3)


def test_two_replicas_train_what_one_process_trains(folder, tmp_path):
    compress.quantize(folder / "model", PASSES[2:], output=tmp_path / "one", **DATA)
    one, two = weights(tmp_path / "one"), weights(folder / "copies-2")
    for name, value in one.items():
        close(value, two[name], name)


def test_two_ranks_choose_the_rate_of_one_process_and_keep_what_was_best(folder, tmp_path):
    one = compress.quantize(folder / "model", CHOSEN, output=tmp_path / "chosen-1", **DATA).record.training
    two = histories(folder, "chosen")
    for mine, theirs in zip(one, two, strict=True):
        assert (mine["options"]["learning_rate"], mine["kept"]) == (theirs["options"]["learning_rate"], theirs["kept"])
        (before, after), (first, last) = (history["held_out"] for history in (mine, theirs))
        assert (before["logits"], after["logits"]) == pytest.approx((first["logits"], last["logits"]), rel=SAME)
    curves = [[loss for _, loss in history[0]["range_test"]["curve"]] for history in (one, two)]
    assert curves[0] == pytest.approx(curves[1], rel=SAME)
    assert [history["kept"] for history in one] == [2, 0]
    found, other = weights(tmp_path / "chosen-1"), weights(folder / "chosen-2")
    for name, value in found.items():
        close(value, other[name], name)


def test_two_ranks_train_a_tied_embedding_and_caches_of_codes_as_one_process(folder, tmp_path):
    found = compress.quantize(folder / "tied", TABLES, output=tmp_path / "tables-1", **DATA).record.training
    for key in ("loss", "gradient", "scale_gradient"):
        one, two = ([line[key] for line in of[0]["steps"]] for of in (found, histories(folder, "tables")))
        assert one == pytest.approx(two, rel=SAME), key
    compress.quantize(folder / "tied", [TABLES[0], TABLES[1]], output=tmp_path / "before", **DATA)
    one, two, before = (weights(at) for at in (tmp_path / "tables-1", folder / "tables-2", tmp_path / "before"))
    assert one.keys() == two.keys()
    assert any("k_scale" in name for name in one)
    for name, value in one.items():
        close(value, two[name], name)
    assert not torch.equal(one["model.embed_tokens.weight"], before["model.embed_tokens.weight"])


def test_a_model_of_16_bits_is_one_after_sharded_training(folder):
    found = weights(folder / "narrow-2")
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    with torch.no_grad():
        ids = DATA["calibration"]
        loaded = compress.load(folder / "narrow-2", dequantize=True)
        assert torch.isfinite(loaded(input_ids=ids).logits).all()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_loop_of_ones_own_is_the_same_sharded_before_it_is_prepared_or_after(folder, when):
    alone, ranks = weights(folder / "own-never"), weights(folder / f"own-{when}")
    assert alone.keys() == ranks.keys()
    for name, tensor in alone.items():
        close(ranks[name], tensor, name)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_compiled_blocks_on_two_ranks_learn_what_others_learn(tmp_path):
    """As a person runs it: `torchrun -m compress qat --fsdp --train compile=true`."""
    words = ["demo", "--scheme", "w4a16", "--group-size", "32", "--calibration", "demo", "--samples", "16"]
    words += ["--training", "demo", "--steps", "3", "--rows", "4", "--fsdp"]
    losses = []
    for compiled in ("true", "false"):
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "compress", "qat"]
        own = ["--train", f"compile={compiled}", "--output", str(tmp_path / compiled)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*launch, *words, *own], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        record = json.loads((tmp_path / compiled / "compress.json").read_text())
        losses.append([line["held_out"]["logits"] for line in record["training"][0]["held_out"]])
    before, after = losses[0]
    assert after != before
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
