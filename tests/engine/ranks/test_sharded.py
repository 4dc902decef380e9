"""Under FSDP2 on gloo ranks: the codes of one process, shards that keep their edits, training that goes on."""

import json
import math
from pathlib import Path

import pytest
import torch
from checkpoints import same
from commands import StopAfterOne
from experts import Experts, routed, shown
from models import build, tokens
from places import RANKS
from processes import python
from sharded_worker import (
    CONVOLUTIONS,
    DYNAMIC_CACHES,
    EMBEDDINGS,
    EXACT,
    EXPERTS,
    FLOAT8,
    FLOAT32,
    FOLDING,
    MASKS,
    PAIRS,
    PLAIN,
    STRUCTURE,
    SUMS,
    train,
)
from vision import calibration, net

import compress
from compress.checkpoint.read.compressed_layers import read_tensors
from compress.checkpoint.read.source import find_source
from compress.engine.residency import Sharded

pytestmark = [
    pytest.mark.full,
    pytest.mark.dist,
    pytest.mark.skipif(not hasattr(torch.distributed.fsdp.FSDPModule, "reset_iter_state"), reason="torch < 2.13"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model, what one process makes of it, and a run of one process that was stopped after its first block."""
    folder = tmp_path_factory.mktemp("sharded")
    build("llama").save_pretrained(folder / "model")
    common = {"calibration": tokens(8), "batch_size": 2, "verify": False}
    compress.quantize(folder / "model", EXACT, output=folder / "exact-1", **common)
    compress.quantize(folder / "model", FLOAT8, output=folder / "float8-1", **common)
    compress.quantize(folder / "model", FLOAT32, output=folder / "float32-1", **common)
    rtn = compress.RTN(group_size=16, grid="asymmetric")
    compress.quantize(folder / "model", rtn, output=folder / "rtn-1", verify=False)
    for name, passes in FOLDING.items():
        compress.quantize(folder / "model", passes, output=folder / f"{name}-1", **common)
    for name, passes in STRUCTURE.items():
        compress.quantize(folder / "model", passes, output=folder / f"{name}-1", **common)
    for name, method in {**SUMS, **MASKS}.items():
        compress.quantize(folder / "model", method, output=folder / f"{name}-1", **common)
    build("gemma").save_pretrained(folder / "tied")
    for name in ("model", "tied"):
        compress.quantize(folder / name, EMBEDDINGS, output=folder / f"embeddings-{name}-1", **common)
    build("t5").save_pretrained(folder / "t5")
    compress.quantize(folder / "t5", EXACT, output=folder / "t5-1", **{**common, "calibration": PAIRS})
    stop = {"output": folder / "embeddings-resumed", "reporter": StopAfterOne()}
    with pytest.raises(KeyboardInterrupt):
        compress.quantize(folder / "tied", EMBEDDINGS, **stop, **common)
    passes = FOLDING["awq-gptq"]
    with pytest.raises(KeyboardInterrupt):
        compress.quantize(folder / "model", passes, output=folder / "refolded", reporter=StopAfterOne(), **common)
    return folder


@pytest.fixture(scope="module")
def two(folder):
    """What two ranks found; three have left their files, too."""
    done = python(RANKS / "sharded_worker.py", folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "found-2.json").read_text())


def ranges(output: Path) -> list[dict]:
    """What calibration fixed, with its histograms."""
    return json.loads((output / "compress.json").read_text())["ranges"]


def test_two_ranks_decide_what_one_process_decides(folder, two):
    same(folder / "exact-1", folder / "exact-2")
    same(folder / "rtn-1", folder / "rtn-2")
    same(folder / "float8-1", folder / "float8-2")


@pytest.mark.parametrize("name", sorted(FOLDING))
def test_two_ranks_fold_and_calibrate_as_one_process(folder, two, name):
    same(folder / f"{name}-1", folder / f"{name}-2")
    one, other = (ranges(folder / f"{name}-{n}") for n in (1, 2))
    assert one == other
    assert all(found["histogram"] for found in one)
    assert len(one) == {"smoothquant": 8, "w8a8": 8, "outputs": 8 + 14, "kv-cache": 4}.get(name, 0)


@pytest.mark.parametrize("name", sorted(SUMS))
def test_two_ranks_make_sums_as_one_process(folder, two, name):
    record = json.loads((folder / f"{name}-1" / "compress.json").read_text())
    same(folder / f"{name}-1", folder / f"{name}-2", layers=len(record["layers"]))
    figures = [layer["figures"] for layer in record["layers"]]
    assert len({figure.get("rank", figure.get("outliers")) for figure in figures}) > 1


def test_two_ranks_remove_what_one_process_removes(folder, two):
    for name, layers in (("structure", 7), ("structure-alone", 0)):
        same(folder / f"{name}-1", folder / f"{name}-2", layers=layers)
        one, other = (json.loads((folder / f"{name}-{n}" / "compress.json").read_text()) for n in (1, 2))
        assert one["structure"]["dropped"] == other["structure"]["dropped"]
        assert [c["removed"] for c in one["structure"]["cut"]] == [c["removed"] for c in other["structure"]["cut"]]
        if name == "structure":
            assert one["structure"]["hidden"]["removed"] == other["structure"]["hidden"]["removed"]


def test_two_ranks_rotate_as_one_process(folder, two):
    same(folder / "rotate-1", folder / "rotate-2")
    one, other = (json.loads((folder / f"rotate-{n}" / "compress.json").read_text())["structure"] for n in (1, 2))
    assert one["edits"] == other["edits"]
    assert [each["edit"] for each in one["edits"]] == ["rotate-stream", *["rotate"] * 2, *["rotate-online"] * 2]


@pytest.mark.parametrize("name", sorted(MASKS))
def test_masks_are_those_of_one_process_on_two_and_on_three_ranks(folder, two, name):
    alone, *others = (read_tensors(find_source(str(folder / f"{name}-{ranks}"))) for ranks in (1, 2, 3))
    zeros = {tensor: value == 0 for tensor, value in alone.items() if tensor.endswith("proj.weight")}
    assert len(zeros) == 14
    assert len({float(zero.double().mean()) for zero in zeros.values()}) > 3
    for found in others:
        for tensor, zero in zeros.items():
            assert torch.equal(found[tensor] == 0, zero), tensor
            torch.testing.assert_close(found[tensor], alone[tensor], rtol=1e-5, atol=1e-8)
    remarks = [json.loads((folder / f"{name}-{ranks}" / "compress.json").read_text())["notes"] for ranks in (1, 2, 3)]
    assert remarks[0] == remarks[1] == remarks[2]


def test_two_ranks_round_embeddings_as_one_process(folder, two):
    same(folder / "embeddings-model-1", folder / "embeddings-model-2", layers=16)
    same(folder / "embeddings-tied-1", folder / "embeddings-tied-2", layers=15)


def test_a_run_that_rounded_the_embedding_resumes_on_two_ranks(folder, two):
    same(folder / "embeddings-tied-1", folder / "embeddings-resumed", layers=15)


def test_a_run_of_one_process_that_folds_resumes_on_two_ranks(folder, two):
    same(folder / "awq-gptq-1", folder / "refolded")


def test_three_ranks_decide_what_one_process_decides(folder, two):
    same(folder / "exact-1", folder / "exact-3")
    same(folder / "w8a8-1", folder / "w8a8-3")
    assert ranges(folder / "w8a8-1") == ranges(folder / "w8a8-3")


def test_in_float32_two_ranks_lose_what_one_process_loses(folder, two):
    held_out = tokens(32, seed=5)
    one, other = (compress.evaluate(folder / f"float32-{n}", text=held_out) for n in (1, 2))
    assert abs(math.log(one.perplexity) - math.log(other.perplexity)) < 1e-3


def test_each_rank_writes_its_share_and_the_files_are_the_same(folder, two):
    assert max(two["written"]) < 0.75 * sum(two["written"])
    names = sorted(p.name for p in (folder / "exact-1").iterdir())
    assert names == sorted(p.name for p in (folder / "exact-2").iterdir())
    assert "model.safetensors" in names
    for name in set(names) - {"compress.json"}:
        assert (folder / "exact-1" / name).read_bytes() == (folder / "exact-2" / name).read_bytes()


def test_statistics_of_two_ranks_are_those_of_one_pass(two):
    assert two["statistics"]["hessian"] < 1e-14
    assert two["statistics"]["bounds"] is True
    assert two["statistics"]["tokens"] == 60


def test_opening_a_sharded_block_gives_full_copies_and_keeps_edits(two):
    found = two["residency"]
    assert 0.5 <= found.pop("share") < 0.55
    assert found == {"plain": True, "stored": True, "kept": True, "resharded": True}


def test_training_a_sharded_model_goes_on_as_if_nothing_had_happened(two):
    model = build("llama")
    compress.quantize(model, PLAIN, calibration=tokens(8), batch_size=2)
    assert two["losses"] == pytest.approx(train(model), abs=1e-5)


def test_a_sharded_model_is_as_it_was_when_its_run_is_stopped(two):
    assert two["restored"]["same"] is True
    assert two["restored"]["losses"] == pytest.approx(train(build("llama")), abs=1e-5)


def test_a_model_that_somebody_sharded_is_written_with_dynamic_caches(two, folder):
    """Its heads are measured on a model without data, not by a forward of the shards."""
    compress.quantize(build("llama"), DYNAMIC_CACHES, output=folder / "caches-1", verify=False)
    same(folder / "caches-1", folder / "caches-2")
    schemes = [find_source(str(folder / f"caches-{n}")).quantization["kv_cache_scheme"] for n in (1, 2)]
    assert schemes[0] == schemes[1]
    assert schemes[0]["group_size"] == 8


def test_a_model_that_is_not_sharded_is_refused():
    with pytest.raises(compress.InputError, match="is not sharded"):
        Sharded(build("llama"), torch.device("cpu"))


def test_an_older_torch_is_refused_in_one_line(monkeypatch):
    monkeypatch.delattr(torch.distributed.fsdp.FSDPModule, "reset_iter_state")
    with pytest.raises(compress.InputError, match=r"torch >= 2\.13"):
        Sharded.require()


def test_convolutions_are_the_same_under_fsdp(two, folder):
    """A depthwise convolution's groups have one row each, fewer than there are ranks."""
    model = net()
    compress.quantize(model, CONVOLUTIONS, calibration=calibration())
    found = torch.load(folder / "cnn-2.pt")
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, value in model.named_parameters():
        assert torch.equal(found[name], value), name


def test_an_encoder_and_its_decoder_are_the_same_under_fsdp(two, folder):
    same(folder / "t5-1", folder / "t5-2", layers=32)


def test_experts_in_one_parameter_are_the_same_under_fsdp(two, folder):
    """Ranks hold two experts each of four, and see other tokens of all of them."""
    model = routed(Experts)
    record = compress.quantize(model, EXPERTS, calibration=shown(), experts=True).record
    assert len(record.layers) == 16
    found = torch.load(folder / "experts-2.pt")
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, value in model.named_parameters():
        assert torch.equal(found[name], value), name
    # Of so many rows as are looked at, or of those that a rank has.
    assert {name: count for name, count in two["zeros"].items() if "experts" in name} == {
        f"blocks.{i}.experts.{key}.{e}": [0, 8 * width, True]
        for i in range(2)
        for key, width in (("up", 16), ("down", 24))
        for e in range(4)
    }
