"""Sums of terms through whole runs: written, verified, resumed, loaded; ranks shared out between layers by a survey."""

import json
from pathlib import Path

import pytest
import torch
from commands import PLAIN_GPTQ, StopAfterOne, command
from models import build, tokens

import compress
from compress.checkpoint.files import OWN_WHOLE
from compress.checkpoint.read.compressed_layers import stored_in
from compress.checkpoint.read.source import find_source
from compress.inference.check.dense_twin import compare_layers
from compress.inference.layers.compressed_layers import compressed_layers
from compress.passes.protocol.base import only
from compress.passes.protocol.recipe import describe, parse_recipe

METHODS = {
    "spqr": compress.SpQR(group_size=8, tile_rows=12, outliers=0.02, sweeps=0),
    "gptq, outliers": compress.GPTQ(scheme="w3a16", group_size=32, outliers=0.02, **PLAIN_GPTQ),
    "low-rank": compress.LowRank(share=0.6),
    "low-rank, shared out": compress.LowRank(share=0.6, allocate="layer-loss"),
    "low-rank of codes, outliers": compress.LowRank(rank=6, factor_bits=8, outliers=0.02, iterations=1),
    "lqs": compress.LQS(scheme="w2a16", group_size=32, rank=3, iterations=1, **PLAIN_GPTQ),
    "lqs, all": compress.LQS(
        scheme="w2a16", group_size=32, rank=3, factor_bits=8, outliers=0.02, iterations=1, **PLAIN_GPTQ
    ),
    "lqs, shared out": compress.LQS(
        scheme="w3a16", group_size=32, rank=3, allocate="layer-loss", iterations=0, **PLAIN_GPTQ
    ),
}
IDS = tokens(24, 16)
HALF = ("*.[qk]_proj", "*.o_proj", "*.down_proj")  # alone at its site, beside another, and of other widths


@pytest.mark.first
@pytest.mark.parametrize("name", [name for name in METHODS if name != "lqs"])  # "lqs, all" is more of it
def test_what_is_written_is_what_was_decided_and_resumes_to_the_same_bits(
    name: str, llama: Path, tmp_path: Path
) -> None:
    method, out, twice = only(METHODS[name], *HALF), tmp_path / "out", tmp_path / "twice"
    compress.quantize(llama, method, calibration=IDS, output=out, verify=False)
    with pytest.raises(KeyboardInterrupt):
        compress.quantize(llama, method, calibration=IDS, output=twice, reporter=StopAfterOne())
    compress.quantize(llama, method, calibration=IDS, output=twice, resume=True, verify=False)
    assert (twice / OWN_WHOLE).read_bytes() == (out / OWN_WHOLE).read_bytes()
    in_memory, dense = compress.load(llama), compress.load(out, dequantize=True)
    compress.quantize(in_memory, method, calibration=IDS)
    for (key, one), other in zip(in_memory.state_dict().items(), dense.state_dict().values(), strict=True):
        assert torch.equal(one, other), key
    for dtype in (torch.float32, torch.bfloat16):
        loaded = compress.load(out, dtype)
        with torch.no_grad(), compare_layers(loaded) as worst:
            loaded(tokens(3, 12))
        assert len(worst) == len(list(compressed_layers(loaded)))
        assert max(worst.values()) <= 1, worst


def test_what_was_written_is_verified_and_shown(llama: Path, tmp_path: Path) -> None:
    options = {"rank": 3, "outliers": 0.02, "iterations": 1, **PLAIN_GPTQ}
    out, words = tmp_path / "out", [word for key, value in options.items() for word in ("--set", f"{key}={value}")]
    torch.save(IDS, tmp_path / "ids.pt")
    outcome = command(
        *("quantize", llama, "--method", "lqs", "--scheme", "w3a16", "--group-size", 32, *words),
        *("--calibration", tmp_path / "ids.pt", "--output", out),
    )
    assert outcome.code == 0, outcome.err
    record = json.loads((out / "compress.json").read_text())
    assert record["verification"]["layers"] == len(record["layers"]) == 14
    figures = [layer["figures"] for layer in record["layers"]]
    assert all(f["loss"] <= f["codes_loss"] and f["rank"] in (0, 3) for f in figures)
    assert any(f["rank"] == 3 for f in figures)
    assert "rank 3 + " in command("inspect", out).out.replace("\n", " ")


def test_ranks_are_shared_out_under_the_budget_and_layers_left_alone_are_named(llama: Path, tmp_path: Path) -> None:
    method = compress.LowRank(share=0.8, allocate="layer-loss")
    result = compress.quantize(llama, method, calibration=IDS, output=tmp_path / "out", verify=False)
    stored = stored_in(find_source(str(tmp_path / "out"))).layers
    alone = {n for n, why in result.record.left_alone.items() if "its share of the budget" in why}
    found = {r.name: (r.figures["rank"], r.shape) for r in result.record.layers}
    assert not alone & set(found)
    assert set(stored) == set(found)
    assert len(alone) + len(found) == 14
    assert len({rank for rank, _ in found.values()}) > 1
    original = find_source(str(llama)).headers
    whole = {n: original[f"{n}.weight"][0] for n in (*alone, *found)}
    room = sum(rows * columns for rows, columns in whole.values())
    taken = sum(rank * sum(shape) for rank, shape in found.values())
    taken += sum(whole[n][0] * whole[n][1] for n in alone)
    assert 0.75 * room < taken <= 0.8 * room
    # The whole budget may be all that the layers take: then there is nothing to do, which is said.
    with pytest.raises(compress.CompressError, match="low-rank compressed nothing"):
        compress.quantize(llama, compress.LowRank(share=1.0, allocate="layer-loss"), calibration=IDS)


def test_a_survey_leaves_a_model_in_memory_as_it_is_until_the_run() -> None:
    model, plain = build("llama"), build("llama")
    compress.quantize(model, compress.LowRank(rank=8, drift=0.0), calibration=IDS)
    ranks = [(n, 8) for n, m in plain.named_modules() if isinstance(m, torch.nn.Linear) and "layers" in n]
    compress.quantize(plain, compress.LowRank(ranks=tuple(ranks), drift=0.0), calibration=IDS)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_recipes_hold_all_options() -> None:
    methods = (*METHODS.values(), compress.LowRank(ranks=(("a", 3), ("b", 0))))
    assert parse_recipe(json.loads(json.dumps(describe(methods))), "here") == methods


@pytest.mark.parametrize("kind", ["gpt2", "bert", "t5"])
def test_other_architectures_are_surveyed_and_compressed(kind: str) -> None:
    model, ids = build(kind), tokens()
    inputs = {"input_ids": ids, "decoder_input_ids": ids} if kind == "t5" else {"input_ids": ids}
    method = compress.LowRank(share=0.5, allocate="layer-loss")
    result = compress.quantize(model, method, calibration=[inputs])
    assert result.record.layers
    with torch.no_grad():
        assert torch.isfinite(model(**inputs)[0]).all()
