"""`compress bench` on the CPU, tiny: what is refused, what is written, and that what is wrong is not timed."""

import json
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import command, shorten_benchmarks
from models import build, tokens
from planar import spoil
from torch.utils._python_dispatch import TorchDispatchMode

from compress import RTN, load, quantize
from compress.evaluation.report import wording
from compress.evaluation.report.content import Picture, ReportTable, Words
from compress.evaluation.report.page import as_html
from compress.evaluation.speed import check, decoder, dense, memory, models, options, plot, run, speed_tables
from compress.evaluation.speed.generation import GenerationTimer
from compress.evaluation.speed.report import SpeedReport
from compress.inference.check import dense_twin
from compress.inference.load.assembly import compressed_layers, fuse
from compress.kernels.measure import benchmark

CPU = torch.device("cpu")
LINEARS = ("bench", "--device", "cpu", "--shapes", "64x256,96x128", "--tokens", "1,5", "--rounds", 2)
MODEL = ("bench", "tiny", "--device", "cpu", "--batch", "1,3", "--prompt", 6, "--new", 2, "--rounds", 2)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_benchmarks(monkeypatch)


def written(path: Path) -> dict:
    assert not path.with_name(path.name + ".partial").exists()
    return json.loads(path.read_text(encoding="utf-8"))


def tiny(scheme: str = "w4a16", dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return decoder.random_llama(decoder.config_of("tiny"), scheme, dtype, CPU)


# --- what is refused -----------------------------------------------------------------------------------------------

REFUSED = {
    "a shape of one size": (("--shapes", "4096"), "outputs x inputs"),
    "a shape of words": (("--shapes", "axb"), "outputs x inputs"),
    "an empty shape": (("--shapes", "64x128,"), "outputs x inputs"),
    "a shape of no outputs": (("--shapes", "0x128"), "outputs x inputs"),
    "inputs that no group divides": (("--shapes", "64x100"), "multiple of 128"),
    "no tokens": (("--tokens", "0"), "positive numbers"),
    "tokens of words": (("--tokens", "1,two"), "positive numbers"),
    "no rounds": (("--rounds", "0"), "at least 1"),
    "an unknown dtype": (("--dtype", "int3"), "bfloat16, float16, float32"),
    "an unknown device": (("--device", "gpu"), "usable here: cpu"),
    "tuning without a GPU": (("--device", "cpu", "--tune"), "on a GPU; the device is cpu"),
    "options of models alone": (("--batch", "1", "--new", "2"), "--batch, --new: only for a MODEL"),
    "a page on standard output": (("--html", "-"), "give a file"),
    "an unknown model": (("nosuchmodel",), "llama-3-8b"),
    "options of linears alone": (("tiny", "--tokens", "1"), "--tokens: only for the linear layers"),
    "an unknown scheme": (("tiny", "--schemes", "w5a5"), "unknown scheme 'w5a5'"),
    "a scheme twice": (("tiny", "--schemes", "dense,dense"), "twice"),
    "no batch": (("tiny", "--batch", "0"), "positive numbers"),
    "no prompt": (("tiny", "--prompt", "0"), "at least 1 token"),
    "no new tokens": (("tiny", "--new", "-1"), "at least 1 token"),
    "more than the context": (("tiny", "--prompt", "2048", "--new", "1"), "the model holds 2048"),
    "a dense checkpoint": (("demo",), "is not compressed"),
    "schemes of a checkpoint": (("demo", "--schemes", "dense"), "--schemes is for a shape"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_ends_with_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("work has begun")

    monkeypatch.setattr(models, "measure_ceilings", never)
    monkeypatch.setattr(run, "measure_ceilings", never)
    words, part = REFUSED[name]
    found = command("bench", *words, "--json", tmp_path / "speed.json")
    assert (found.code, found.out) == (2, ""), found
    assert found.err.startswith("compress: ")
    assert found.err.count("\n") == 1
    assert part in found.err
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_file_is_refused_before_the_work(tmp_path: Path) -> None:
    for option in ("--json", "--html"):
        assert command(*LINEARS, option, tmp_path / "no" / "file").code == 2


# --- linear layers -------------------------------------------------------------------------------------------------


def check_facts(found: dict) -> None:
    assert (found["format"], found["complete"]) == (1, True)
    assert found["command"].startswith("compress bench ")
    assert {"commit", "modified", "date", "device", "device_type", "threads", "load", "cuda"} <= found.keys()
    assert found["versions"]["torch"] == metadata.version("torch")
    assert found["settings"]["rounds"] == 2
    assert found["settings"]["quoted"] == "minimum"
    assert {"copy", "read", "bfloat16", "float16", "float32", "int8", "uint8"} == found["ceilings"].keys()
    assert all(c.get("per_s", 0) > 0 or c["skipped"] for c in found["ceilings"].values())


def needs_no_network(directory: Path) -> None:
    """The page beside the report is whole."""
    assert {path.name for path in directory.iterdir()} == {"speed.json", "speed.html"}
    page = (directory / "speed.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert not re.search(r"<script|url\(|@import|https?://", page)


def test_linears_end_to_end(tmp_path: Path) -> None:
    outcome = command(*LINEARS, "--json", tmp_path / "speed.json", "--html", tmp_path / "speed.html")
    assert outcome.code == 0, outcome.err
    needs_no_network(tmp_path)
    found = written(tmp_path / "speed.json")
    check_facts(found)
    assert found["settings"]["shapes"] == [[64, 256], [96, 128]]
    assert {(e["N"], e["K"], e["M"]) for e in found["results"]} == {
        (64, 256, 1),
        (64, 256, 5),
        (96, 128, 1),
        (96, 128, 5),
    }
    for entry in found["results"]:
        if "skipped" not in entry:
            assert entry["share"] == pytest.approx(entry["limit_ms"] / entry["time_ms"])
            assert entry["bound"] in ("memory", "compute")
            assert entry["rounds"] == 2
    for part in ("ceilings of ", "64 x 256", "w4a16", "not measured: gemlite w4a16 (64x256 M=1, 64x256 M=5, 96x128"):
        assert part in outcome.out


def test_json_on_standard_output_is_all_that_is_there() -> None:
    found = command(
        "bench", "--device", "cpu", "--shapes", "64x128", "--tokens", "1", "--rounds", 1, "--json", "-"
    ).json()
    assert found["complete"] is True


def test_a_wrong_kernel_fails_the_command_and_is_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, 1.05)
    outcome = command(*LINEARS, "--json", tmp_path / "speed.json")
    assert outcome.code == 1
    assert outcome.err.splitlines()[-1].startswith("compress: wrong or failed, and not timed: w4a16 64x256 M=1")
    found = written(tmp_path / "speed.json")
    assert len(found["failures"]) == 8  # w4a16 and w8a16 at two shapes and two numbers of tokens
    assert all("time_ms" not in e for e in found["results"] if e["candidate"] in ("w4a16", "w8a16"))
    assert any("time_ms" in e for e in found["results"] if e["candidate"] == "w8a8")


def test_what_is_not_a_number_is_null_in_a_report() -> None:
    report = SpeedReport("linears", CPU, {})
    report.results.append({"error": float("nan"), "others": [float("inf"), 1.5]})
    assert json.loads(json.dumps(report.content(), allow_nan=False))["results"] == [
        {"error": None, "others": [None, 1.5]}
    ]


def test_work_that_fails_leaves_what_it_had_and_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = benchmark.measure

    def measure(N: int, *rest: object) -> object:
        if N == 96:
            raise OSError(5, "the machine is on fire")
        return right(N, *rest)

    monkeypatch.setattr(benchmark, "measure", measure)
    assert command(*LINEARS, "--json", tmp_path / "speed.json").code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["speed.json.partial"]
    left = json.loads((tmp_path / "speed.json.partial").read_text())
    assert left["complete"] is False
    assert {e["N"] for e in left["results"]} == {64}


def test_tuning_is_asked_for_the_products_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Problem:
        op: str
        M: int
        N: int
        K: int
        bits: int
        group_size: int
        dtype: torch.dtype

        def stored(self) -> dict[str, Any]:
            return vars(self)

    def answer(problems: list[Problem], device: torch.device, say: Callable[[str], object]) -> list[Problem]:
        say(f"{len(problems)} on {device}")
        return problems

    monkeypatch.setitem(sys.modules, "compress.kernels.measure.tune", SimpleNamespace(Problem=Problem, tune=answer))
    wanted = options.linear_options(shapes="64x128", tokens="1,16", device="cpu")
    said: list[str] = []
    found = run.tune_products(wanted, said.append)
    assert said == ["6 on cpu"]
    assert [(p["op"], p["M"], p["bits"], p["group_size"]) for p in found] == [
        (op, M, bits, group)
        for M in (1, 16)
        for op, bits, group in (("weight_only", 4, 128), ("weight_only", 8, -1), ("w8a8", 8, -1))
    ]


# --- whole models --------------------------------------------------------------------------------------------------


def check_model(found: dict, variants: list[str], batches: list[int]) -> None:
    check_facts(found)
    assert [(e["variant"], e["batch"]) for e in found["results"]] == [(v, b) for v in variants for b in batches]
    weights = {e["variant"]: e["weights_bytes"] for e in found["results"]}
    assert all(weights[name] < weights["dense"] for name in variants if name != "dense")
    for entry in found["results"]:
        assert entry["launch"] == "eager"
        assert entry["why_eager"]
        assert 0 < entry["read_bytes"] <= entry["weights_bytes"]
        assert ("layer_error" in entry) == (entry["variant"] != "dense")
        assert entry.get("layer_error", 0) <= 1
        assert entry.get("logits_error", 0) <= entry.get("logits_allowed", 0)
        for part in ("prefill", "decode"):
            assert entry[part]["tokens_per_s"] > 0
            assert ("speedup_over" in entry[part]) == (entry["variant"] != "dense")
            assert entry[part]["share"] == pytest.approx(entry[part]["limit_ms"] / entry[part]["time_ms"])
            assert entry[part]["bytes"] == entry["read_bytes"] + entry["cache_bytes"]
        assert entry["decode"]["operations"] == 2 * entry["linear_weights"] * entry["batch"]
        assert entry["linear_weights"] == found["results"][0]["linear_weights"]
        assert entry["arithmetic"] == ("int8" if entry["variant"] == "w8a8" else found["settings"]["dtype"])


def test_a_random_model_end_to_end(tmp_path: Path) -> None:
    outcome = command(*MODEL, "--json", tmp_path / "speed.json", "--html", tmp_path / "speed.html")
    assert outcome.code == 0, outcome.err
    needs_no_network(tmp_path)
    found = written(tmp_path / "speed.json")
    check_model(found, ["dense", "w4a16", "w8a8"], [1, 3])
    assert found["settings"]["model"] == "tiny"
    for part in ("tiny, bfloat16, prompt of 6, 2 new tokens, minimum of 2 rounds", "w8a8", "reference"):
        assert part in outcome.out


def test_a_checkpoint_end_to_end(llama_w4: Path, tmp_path: Path) -> None:
    words = ("--device", "cpu", "--batch", 1, "--prompt", 6, "--new", 2, "--rounds", 2, "--dtype", "float32")
    outcome = command("bench", llama_w4, *words, "--quiet", "--json", tmp_path / "speed.json")
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "")
    found = written(tmp_path / "speed.json")
    check_model(found, ["dense", "compressed"], [1])
    assert found["results"][1]["schemes"] == ["w4a16 g32 symmetric"]


@pytest.mark.full
def test_a_wrong_model_is_not_timed_and_fails_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, 1.05)
    outcome = command(*MODEL, "--json", tmp_path / "speed.json")
    assert outcome.code == 1
    assert "wrong or failed, and not timed: w4a16, batch 1: model.layers." in outcome.err.splitlines()[-1]
    assert "not measured: w4a16 (batch 1" in outcome.out
    found = written(tmp_path / "speed.json")
    assert [e["variant"] for e in found["results"] if "decode" in e] == ["dense", "dense", "w8a8", "w8a8"]
    assert all(e["skipped"].startswith("wrong: ") for e in found["results"] if e["variant"] == "w4a16")


FAILURES = {
    "memory": (torch.OutOfMemoryError("too large\nby far"), 0, "out of memory: too large"),
    "anything": (RuntimeError("no such kernel"), 1, "RuntimeError: no such kernel"),
}


@pytest.mark.first
@pytest.mark.parametrize("name", FAILURES)
def test_a_variant_that_fails_is_named_and_the_others_are_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error, code, said = FAILURES[name]
    right = decoder.random_llama

    def make(config: object, scheme: str, *rest: object) -> torch.nn.Module:
        if scheme == "dense":
            raise error
        return right(config, scheme, *rest)

    monkeypatch.setattr(decoder, "random_llama", make)
    outcome = command(*MODEL, "--schemes", "dense,w8a8")
    assert outcome.code == code, outcome.err
    assert f"not measured: dense (batch 1, batch 3): {said}" in outcome.out
    assert "w8a8" in outcome.out


# --- the parts -----------------------------------------------------------------------------------------------------


def test_variants_of_a_shape_have_the_same_weights() -> None:
    weights = {n: m.weight for n, m in tiny("dense").named_modules() if isinstance(m, torch.nn.Linear)}
    layers = dict(compressed_layers(tiny("w8a8")))
    assert set(weights) - set(layers) == {"lm_head"}
    for name, layer in layers.items():
        assert torch.allclose(layer.dequantize(), weights[name], atol=0.05 * weights[name].std().item())


@pytest.mark.parametrize("scheme", ["w4a16", "w8a16", "w4a8", "w8a8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_model_passes_and_a_wrong_one_does_not(scheme: str, dtype: torch.dtype) -> None:
    model, ids = tiny(scheme, dtype), torch.arange(7)[None]
    allowed = check.logits_allowed(model, 2, dtype)
    with torch.no_grad(), check.watched_layers(model) as errors:
        model(ids)
    assert max(errors.values()) <= 1
    assert len(errors) == 14
    assert check.logits_error(model, ids) <= allowed
    layer = next(layer for _, layer in compressed_layers(model))
    right = type(layer).forward
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch, check.watched_layers(model) as errors:
        patch.setattr(type(layer), "forward", lambda self, x: right(self, x) * 1.5)
        model(ids)
        assert min(errors.values()) > 1
        assert check.logits_error(model, ids) > allowed


@pytest.mark.parametrize("options", [{"scheme": "w8a8", "activation_grid": "asymmetric"}, {"scheme": "fp8"}])
def test_rounded_outputs_are_right_up_to_a_step(options: dict[str, str], tmp_path: Path) -> None:
    method = RTN(activations="static", outputs="static", **options)
    quantize(build("llama"), method, calibration=tokens(), output=tmp_path / "out", verify=False)
    model, ids = load(tmp_path / "out"), tokens(2, 7)
    with torch.no_grad(), check.watched_layers(model) as errors:
        model(ids)
    assert len(errors) == 14
    assert max(errors.values()) <= 1
    assert check.logits_error(model, ids) <= check.logits_allowed(model, 2, torch.float32)
    layer = next(layer for _, layer in compressed_layers(model))
    x = torch.randn(3, layer.in_features)
    assert check.layer_error(layer, x, layer(x) * 1.5) > 1


def test_what_is_not_a_number_is_wrong() -> None:
    layer = next(layer for _, layer in compressed_layers(tiny()))
    x = torch.randn(3, layer.in_features)
    assert check.layer_error(layer, x, layer(x)) <= 1
    assert check.layer_error(layer, x, layer(x) * float("nan")) == float("inf")


def test_the_twin_is_gone_afterwards() -> None:
    model = tiny()
    with dense_twin.dequantized(model):
        pass
    assert all("forward" not in vars(layer) for _, layer in compressed_layers(model))


def test_fused_models_compute_what_they_did() -> None:
    ids = torch.arange(9)[None]
    compressed, plain = tiny(), tiny("dense")
    before = [model(ids).logits for model in (compressed, plain)]
    assert fuse(compressed) == []
    dense.fuse_dense(plain)
    for model, logits in zip((compressed, plain), before, strict=True):
        assert dense.fused_groups(model) == 4
        assert torch.allclose(model(ids).logits, logits, rtol=1e-4, atol=1e-4)
    dense.densify(compressed)
    assert next(compressed_layers(compressed), None) is None


def test_a_step_asks_the_device_for_nothing() -> None:
    """What is captured into a graph may not wait for a value, and may not take one from the host."""
    seen: set[str] = set()

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.add(str(func))
            return func(*args, **(kwargs or {}))

    for model in (tiny("dense"), tiny("w4a16"), tiny("w8a8")):
        generation = GenerationTimer(model, 2, 5, 3)
        generation.start()
        with Log():
            generation.step()
    assert "aten.index_copy_.default" in seen
    assert not {
        name for name in seen if name.split(".")[1] in ("_local_scalar_dense", "lift_fresh", "nonzero", "equal")
    }


def test_tokens_are_those_that_transformers_generates() -> None:
    model = tiny("w4a16")
    generation = GenerationTimer(model, 2, 5, 3)
    for _ in range(2):  # the second time over the cache of the first
        generation.start()
        found = [generation.ids.clone()]
        for _ in range(3):
            generation.step()
            found.append(generation.ids.clone())
        wanted = model.generate(generation.prompt, max_new_tokens=4, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert torch.equal(torch.cat(found, 1), wanted[:, 5:])


def test_bytes_are_counted_once() -> None:
    table, head = torch.nn.Embedding(100, 8), torch.nn.Linear(8, 100, bias=False)
    both = torch.nn.ModuleList([table, head])
    assert memory.held_bytes(both) == 2 * 100 * 8 * 4
    assert memory.read_bytes(both) == 100 * 8 * 4  # of the table a row is read
    head.weight = table.weight
    assert memory.held_bytes(both) == memory.read_bytes(both) == 100 * 8 * 4


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_a_peak_is_seen_after_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watcher's thread may get no time for longer than the peak lasts: it lasts until that has looked."""
    base, level = memory.settled_bytes(CPU), memory.anonymous_bytes
    looks = threading.Semaphore(0)

    def counted() -> int | None:
        found = level()
        looks.release()
        return found

    monkeypatch.setattr(memory, "anonymous_bytes", counted)
    with memory.watched_memory(CPU, base) as peak:
        large = torch.ones(2**24)
        while looks.acquire(blocking=False):
            pass
        assert all(looks.acquire(timeout=60) for _ in range(2))  # the second look began after the tensor was there
        del large
        monkeypatch.setattr(memory, "anonymous_bytes", lambda: 0)  # looks from here on see nothing
    assert peak.bytes is not None
    assert peak.bytes > 2**24 * 4 * 0.9


def test_where_two_of_four_gain_nothing_is_said() -> None:
    where = {"N": 64, "K": 128, "candidate": "2:4 w4a16"}
    found = [{**where, "M": M, "speedup_over": {"dense": 3.0, "w4a16": ratio}} for M, ratio in ((1, 1.2), (8, 0.5))]
    found += [
        {**where, "M": 64, "skipped": "why"},
        {**where, "M": 1, "candidate": "2:4", "speedup_over": {"dense": 2.0}},
    ]
    assert speed_tables.slower(found) == ["2:4 w4a16 is no faster than w4a16: 64x128 M=8: 0.50x"]


# --- the page ------------------------------------------------------------------------------------------------------


def spread(*candidates: dict[str, Any]) -> SpeedReport:
    """A report on one shape, of dense and of these."""
    found = SpeedReport("linears", CPU, {"shapes": [[64, 128]], "dtype": "float32", "rounds": 2})
    found.notes.clear()  # the machine may be busy
    entry = {"N": 64, "K": 128, "M": 8, "ours": True, "share": 0.5, "time_ms": 1.0, "speedup_over": {}}
    found.results += [{**entry, "candidate": "dense", "ours": False, "M": M} for M in (1, 8)]
    found.results += [{**entry, **each} for each in candidates]
    return found


def boxes(svg: str) -> dict[str, float]:
    """The length of every bar, by the name before it."""
    found = re.findall(r'<rect [^>]*width="([\d.]+)"[^>]*/><text [^>]*>([^<]*)</text>', svg)
    return {name: float(width) for width, name in found}


def test_the_page_holds_what_was_measured() -> None:
    half = {"candidate": "w4a16", "speedup_over": {"dense": 2.0}, "time_ms": 0.5}
    lost = {"N": 64, "K": 128, "M": 1, "candidate": "w4a16", "skipped": "why"}
    alone = {"candidate": "torch._int_mm", "ours": False, "speedup_over": {"dense": float("nan")}}
    report = spread(half, alone)
    report.results.append(lost)
    made = plot.page_of(report)
    shape, rest, _ = made.articles[0].sections
    _, one, eight, times = shape.blocks
    assert isinstance(one, Picture)
    assert isinstance(eight, Picture)
    assert isinstance(times, ReportTable)
    assert (one.title, eight.title) == ("1 token", "8 tokens")
    assert boxes(one.svg).keys() == {"dense"}
    lengths = boxes(eight.svg)
    assert lengths["w4a16"] == pytest.approx(2 * lengths["dense"], abs=0.2)
    assert lengths["int_mm"] == 0
    assert "2.00x, 50%" in eight.svg
    assert times.rows[:2] == [("dense", "1,000", "1,000"), ("w4a16", wording.NONE, "500.0")]
    assert rest.blocks == [Words("w4a16 (64x128 M=1): why", "note")]


def test_a_page_of_nothing_that_could_be_measured_says_why() -> None:
    report = SpeedReport("linears", CPU, {"shapes": [[64, 128]], "dtype": "float32", "rounds": 2})
    report.results.append({"N": 64, "K": 128, "M": 1, "candidate": "w4a16", "skipped": "<b>why</b>"})
    text = as_html(plot.page_of(report))
    assert "w4a16 (64x128 M=1): &lt;b&gt;why&lt;/b&gt;" in text
    assert "<svg" not in text
