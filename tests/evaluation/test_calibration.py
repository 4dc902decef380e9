"""What calibration fixed, as it is recorded, kept over an interruption, and shown as a table and JSON."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import StopAfterOne, command, fast_gptq, save
from models import build, tokens
from vision import calibration as images
from vision import net

import compress
from compress.base.errors import CheckpointError, InputError
from compress.checkpoint.write.record import RangeRecord, range_record
from compress.evaluation.report import calibration, wording
from compress.solvers.statistics.calibrators import calibrator
from compress.weights.grid import Grid

STATIC = {"scheme": "w8a8", "activations": "static", "histograms": True}
SITES = [
    ("self_attn.q_proj", ["self_attn.k_proj", "self_attn.v_proj"]),
    ("self_attn.o_proj", []),
    ("mlp.gate_proj", ["mlp.up_proj"]),
    ("mlp.down_proj", []),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A tiny Llama with static inputs by percentile, its histograms kept."""
    folder = tmp_path_factory.mktemp("ranges")
    save(build("llama"), folder / "in")
    method = compress.RTN(**STATIC, calibrator="percentile", percentile=99.0)
    compress.quantize(folder / "in", method, calibration=tokens(), output=folder / "out", verify=False)
    return folder / "out"


# --- what is recorded ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["minmax", "moving-average", "percentile"])
def test_the_record_counts_what_every_layer_of_the_result_is_given(name):
    model = build("llama")
    record = compress.quantize(model, compress.RTN(**STATIC, calibrator=name), calibration=tokens()).record
    full = [(f"model.layers.{i}.{a}", [f"model.layers.{i}.{b}" for b in also]) for i in (0, 1) for a, also in SITES]
    assert [(found.tensor, found.also) for found in record.ranges] == full
    seen = {}
    for layer in record.layers:
        module = model.get_submodule(layer.name)
        keep = lambda _, args, name=layer.name: seen.update({name: args[0].numpy()})  # noqa: E731
        module.register_forward_pre_hook(keep, prepend=True)  # before the hook that rounds
    with torch.no_grad():
        model(input_ids=tokens())
    figures = {layer.name: layer.figures for layer in record.layers}
    for found in record.ranges:
        assert (found.role, found.calibrator, found.tokens, found.ranges) == ("input", name, tokens().numel(), 1)
        for layer in (found.tensor, *found.also):
            x, edges = seen[layer].ravel(), np.array(found.histogram.edges)
            assert (x.min(), x.max()) == (np.float32(found.lowest), np.float32(found.highest))
            for side, values in ((found.histogram.negative, -x[x < 0]), (found.histogram.rest, x[x >= 0])):
                assert side == np.bincount(np.searchsorted(edges, values.astype(np.float64), side="right") - 1).tolist()
            assert figures[layer]["input_low"] == found.low
            assert figures[layer]["input_high"] == found.high
            assert figures[layer]["input_clipped"] == found.clipped
            clipped = np.mean((x < found.low) | (x > found.high))
            assert found.clipped == pytest.approx(clipped, abs=2e-3)


def test_without_histograms_the_same_is_chosen_and_less_is_kept(tmp_path):
    models, found = [], []
    for histograms in (True, False):
        models.append(build("llama"))
        method = compress.RTN(**{**STATIC, "histograms": histograms}, calibrator="moving-average")
        found.append(compress.quantize(models[-1], method, calibration=tokens()).record.ranges)
    for one, other in zip(*found, strict=True):
        assert other.histogram is None
        assert other.clipped is None
        assert (one.low, one.high, one.tokens) == (other.low, other.high, other.tokens)
    for one, other in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(one, other)


def test_every_element_of_an_image_is_counted_once():
    record = compress.quantize(model := net(), compress.RTN(**STATIC), calibration=images()).record
    stem = next(found for found in record.ranges if found.tensor == "stem")
    x = torch.cat([batch["x"] for batch in images()])
    assert sum(stem.histogram.negative) == int((x < 0).sum())
    assert sum(stem.histogram.rest) == int((x >= 0).sum())
    named = [name for name, _ in model.named_modules()]
    order = [named.index(found.tensor) for found in record.ranges]
    assert order == sorted(order)


def test_ranges_are_in_the_order_of_the_model_whatever_the_order_of_the_passes():
    passes = [compress.only(compress.RTN(**STATIC), pattern) for pattern in ("*.mlp.*", "*.self_attn.*")]
    record = compress.quantize(build("llama"), passes, calibration=tokens()).record
    names = [f"model.layers.{i}.{site}" for i in (0, 1) for site, _ in SITES]
    assert [found.tensor for found in record.ranges] == names


def test_a_stopped_run_keeps_its_ranges(tmp_path):
    method = fast_gptq(**STATIC, calibrator="mse")
    arguments = {"calibration": tokens(), "verify": False}
    whole = compress.quantize(build("llama"), method, output=tmp_path / "whole", **arguments).record
    with pytest.raises(KeyboardInterrupt):
        compress.quantize(build("llama"), method, output=tmp_path / "out", reporter=StopAfterOne(), **arguments)
    resumed = compress.quantize(build("llama"), method, output=tmp_path / "out", resume=True, **arguments).record
    assert len(whole.ranges) == 8
    assert resumed.ranges == whole.ranges
    kept = [json.loads((tmp_path / name / "compress.json").read_text())["ranges"] for name in ("whole", "out")]
    assert kept[0] == kept[1] == [asdict(found) for found in whole.ranges]
    assert calibration.calibrated_ranges(str(tmp_path / "out")) == whole.ranges


def test_ranges_of_channels_are_recorded_as_their_outermost():
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 10.0, 0.1])
    grid = Grid(bits=8, granularity="channel", symmetric=False)
    statistic = calibrator("percentile", grid, percentile=90.0, keep_histogram=True)(3, torch.device("cpu"))
    statistic.update(x, None)
    found = statistic.result()
    noted = range_record(found, "block.attention", "keys")
    assert (noted.ranges, noted.low, noted.high) == (3, found.lo[1].item(), found.hi[1].item())
    assert noted.clipped == pytest.approx(((x < found.lo) | (x > found.hi)).float().mean().item())
    assert sum(noted.histogram.negative) + sum(noted.histogram.rest) == x.numel()
    assert noted.histogram.edges[-1] > x.abs().max()


# --- what is shown -------------------------------------------------------------------------------------------------


def test_the_table_has_every_layer_and_says_what_is_clipped_most(written):
    outcome = command("inspect", written, "--calibration")
    assert outcome.code == 0, outcome.err
    assert "model.layers.0.self_attn.q_proj, k_proj, v_proj" in outcome.out
    assert all(f"model.layers.1.{site}" in outcome.out for site, _ in SITES)
    ranges = calibration.calibrated_ranges(str(written))
    worst = max(ranges, key=lambda found: found.clipped)
    line = f"8 calibrated ranges: at most {wording.share(worst.clipped)} is clipped (input of {worst.tensor})"
    assert outcome.out.splitlines()[-1] == line
    assert "…" not in outcome.out
    assert command("inspect", written, "--calibration", "--quiet").out == ""


def test_json_holds_the_record_and_the_edges_of_the_bins(written):
    found = command("inspect", written, "--calibration", "--json", "-").json()
    kept = json.loads((written / "compress.json").read_text())["ranges"]
    for shown, noted in zip(found["ranges"], kept, strict=True):
        edges = shown["histogram"].pop("edges")
        assert shown == noted
        assert len(edges) == max(len(noted["histogram"]["negative"]), len(noted["histogram"]["rest"])) + 1
        assert edges[1] == noted["histogram"]["width"]


def test_names_from_a_checkpoint_stay_text(written, tmp_path):
    name = "</script><script>alert(1)</script>&[bold]"
    record = json.loads((written / "compress.json").read_text())
    for found in record["ranges"]:
        found["tensor"] = found["calibrator"] = found["role"] = name
    hostile = Path(shutil.copytree(written, tmp_path / "out"))
    (hostile / "compress.json").write_text(json.dumps(record))
    outcome = command("inspect", hostile, "--calibration")
    assert outcome.code == 0, outcome.err
    assert "[bold]" in outcome.out


def test_ranges_that_nobody_counted_are_said():
    ranges = [RangeRecord("a", "input", "minmax", -1, 1, -1, 1, share, 7) for share in (None, 0.25, 0.5)]
    assert calibration.clipping_line(ranges[:2]) == (
        "2 calibrated ranges: at most 25.0 % is clipped (input of a); "
        "not counted for 1 (--set histograms=true counts it)"
    )
    assert calibration.clipping_line(ranges[1:]) == "2 calibrated ranges: at most 50.0 % is clipped (input of a)"


def test_quantize_says_how_much_is_clipped_at_most(tmp_path):
    source = save(build("llama"), tmp_path / "in")
    torch.save(tokens(), tmp_path / "ids.pt")
    words = ["--scheme", "w8a8", "--calibration", tmp_path / "ids.pt", "--method", "smoothquant"]
    lines = {}
    for name, more in (("minmax", ()), ("percentile", ("--set", "percentile=99")), ("moving-average", ())):
        options = ["--activations", "static", "--calibrator", name, *more, "--output", tmp_path / name]
        lines[name] = command("quantize", source, *words, *options).out
    assert "8 calibrated ranges: nothing is clipped" in lines["minmax"]
    assert "8 calibrated ranges: at most 0." in lines["percentile"]
    assert "8 calibrated ranges: what they clip was not counted" in lines["moving-average"]
    assert "calibrated ranges" not in command("quantize", source, *words, "--output", tmp_path / "dynamic").out


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--calibration", "--kernels"], "two reports; ask for one"),
        (["--calibration", "--device", "cpu"], "--device is for --kernels"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_line(words, message, written, tmp_path):
    outcome = command("inspect", written, *(word.format(here=tmp_path) for word in words))
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert message in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_without_calibrated_ranges_are_refused(llama, llama_w4, written, tmp_path):
    with pytest.raises(InputError, match=r"holds no compress\.json: give a directory that `compress quantize` wrote"):
        calibration.calibrated_ranges(str(llama))
    with pytest.raises(InputError, match=r"has no calibrated ranges.*activations=static"):
        calibration.calibrated_ranges(str(llama_w4))
    assert command("inspect", llama_w4, "--calibration").err.count("\n") == 1
    damaged = Path(shutil.copytree(written, tmp_path / "out"))
    for text in ("[]", '{"ranges": [{"tensor": "a"}]}', '{"ranges": 3}', '{"ranges": [{"histogram": null}]}'):
        (damaged / "compress.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"compress\.json: .* (is|must)"):
            calibration.calibrated_ranges(str(damaged))


def test_ranges_that_no_calibration_finds_are_refused_by_name(written, tmp_path):
    damaged = Path(shutil.copytree(written, tmp_path / "out"))
    whole = (written / "compress.json").read_text()
    for keys, value, says in (
        (("high",), float("inf"), "high is inf"),
        (("lowest",), float("nan"), "lowest is nan"),
        (("histogram", "width"), 0.0, "histogram.width is 0"),
        (("histogram", "width"), 1e308, r"histogram.width is 1e\+308"),
        (("histogram", "rest"), [3, -1], "histogram.rest has counts below zero"),
        (("histogram", "negative"), [1] * 5000, "histogram.negative has 5000 bins"),
    ):
        record = json.loads(whole)
        place = record["ranges"][1] if len(keys) == 1 else record["ranges"][1][keys[0]]
        place[keys[-1]] = value
        (damaged / "compress.json").write_text(json.dumps(record))
        with pytest.raises(CheckpointError, match=rf"ranges\[1\]\.{says}, which no calibration finds"):
            calibration.calibrated_ranges(str(damaged))


def test_outputs_and_caches_are_reported_beside_inputs():
    """Of each, where it fixes a range; outputs also of layers whose inputs are fitted to every token."""
    model = build("llama")
    dynamic = compress.RTN(scheme="w8a8", outputs="static", histograms=True)
    cache = compress.KVCache(granularity="head", histograms=True)
    ranges = compress.quantize(model, [dynamic, cache], calibration=tokens()).record.ranges
    first = [(r.tensor.removeprefix("model.layers.0."), r.role) for r in ranges[: len(ranges) // 2]]
    layers = [name for site, also in SITES for name in (site, *also)]
    assert sorted(first) == sorted(
        [("self_attn", "keys"), ("self_attn", "values"), *((name, "output") for name in layers)]
    )
    count = tokens().numel()
    channels = {"q_proj": 32, "k_proj": 16, "v_proj": 16, "o_proj": 32, "gate_proj": 64, "up_proj": 64, "down_proj": 32}
    for each in ranges:
        counted = sum(each.histogram.negative) + sum(each.histogram.rest)
        assert counted == count * channels.get(each.tensor.rpartition(".")[2], 2 * 8)
        assert each.tokens == count
    static = compress.RTN(scheme="w8a8", activations="static", outputs="static")
    roles = [r.role for r in compress.quantize(build("llama"), static, calibration=tokens()).record.ranges]
    assert roles.count("input") == 2 * len(SITES)
    assert roles.count("output") == 2 * len(layers)
