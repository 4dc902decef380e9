"""`compress bench` on the CPU, tiny: what is refused, what is written, and that what is wrong is not timed."""

import json
import threading
from importlib import metadata
from pathlib import Path

import pytest
import torch
from commands import command
from models import build, tokens
from planar import spoil
from torch.utils._python_dispatch import TorchDispatchMode

from compress import RTN, load, quantize
from compress.evaluation.speed import decoder, memory, models
from compress.evaluation.speed.generation import GenerationTimer
from compress.evaluation.speed.report import SpeedReport
from compress.inference.check import dense_twin
from compress.inference.layers.compressed_layers import compressed_layers
from compress.inference.load.conversions import fuse

CPU = torch.device("cpu")
MODEL = ("bench", "tiny", "--device", "cpu", "--batch", "1,3", "--prompt", 6, "--new", 2, "--rounds", 2)


def written(path: Path) -> dict:
    assert not path.with_name(path.name + ".partial").exists()
    return json.loads(path.read_text(encoding="utf-8"))


def tiny(scheme: str = "w4a16", dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    return decoder.random_llama(decoder.config_of("tiny"), scheme, dtype, CPU)


# --- what is refused -----------------------------------------------------------------------------------------------

REFUSED = {
    "no model": ((), "a checkout times each kernel: python -m compress.recipes.studies.kernels.bench"),
    "no rounds": (("tiny", "--rounds", "0"), "at least 1"),
    "an unknown dtype": (("tiny", "--dtype", "int3"), "bfloat16, float16, float32"),
    "an unknown device": (("tiny", "--device", "gpu"), "usable here: cpu"),
    "an unknown model": (("nosuchmodel",), "llama-3-8b"),
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

    monkeypatch.setattr(models, "measure_variant", never)
    words, part = REFUSED[name]
    found = command("bench", *words, "--json", tmp_path / "speed.json")
    assert (found.code, found.out) == (2, ""), found
    assert found.err.startswith("compress: ")
    assert found.err.count("\n") == 1
    assert part in found.err
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_file_is_refused_before_the_work(tmp_path: Path) -> None:
    assert command(*MODEL, "--json", tmp_path / "no" / "file").code == 2


# --- whole models --------------------------------------------------------------------------------------------------


def check_facts(found: dict) -> None:
    assert (found["format"], found["complete"]) == (1, True)
    assert found["command"].startswith("compress bench ")
    assert {"commit", "modified", "date", "device", "device_type", "threads", "load", "cuda"} <= found.keys()
    assert found["versions"]["torch"] == metadata.version("torch")
    assert found["settings"]["rounds"] == 2
    assert found["settings"]["quoted"] == "minimum"


def test_what_is_not_a_number_is_null_in_a_report() -> None:
    report = SpeedReport("model", CPU, {})
    report.results.append({"error": float("nan"), "others": [float("inf"), 1.5]})
    assert json.loads(json.dumps(report.content(), allow_nan=False))["results"] == [
        {"error": None, "others": [None, 1.5]}
    ]


def check_model(found: dict, variants: list[str], batches: list[int]) -> None:
    check_facts(found)
    assert [(e["variant"], e["batch"]) for e in found["results"]] == [(v, b) for v in variants for b in batches]
    weights = {e["variant"]: e["weights_bytes"] for e in found["results"]}
    assert all(weights[name] < weights["dense"] for name in variants if name != "dense")
    for entry in found["results"]:
        assert entry["launch"] == "eager"
        assert entry["why_eager"]
        assert ("layer_error" in entry) == (entry["variant"] != "dense")
        assert entry.get("layer_error", 0) <= 1
        for part in ("prefill", "decode"):
            assert entry[part]["tokens_per_s"] > 0
            assert ("speedup_over" in entry[part]) == (entry["variant"] != "dense")


def test_a_random_model_end_to_end(tmp_path: Path) -> None:
    outcome = command(*MODEL, "--json", tmp_path / "speed.json")
    assert outcome.code == 0, outcome.err
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
    model, ids = tiny(scheme, dtype), torch.arange(70)[None]
    with torch.no_grad(), dense_twin.compare_layers(model, 16) as errors:
        model(ids)
    assert max(errors.values()) <= 1
    assert len(errors) == 14
    layer = next(layer for _, layer in compressed_layers(model))
    right = type(layer).forward
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch, dense_twin.compare_layers(model, 16) as errors:
        patch.setattr(type(layer), "forward", lambda self, x: right(self, x) * 1.5)
        model(ids)
        assert min(errors.values()) > 1


@pytest.mark.parametrize("options", [{"scheme": "w8a8", "activation_grid": "asymmetric"}, {"scheme": "fp8"}])
def test_rounded_outputs_are_right_up_to_a_step(options: dict[str, str], tmp_path: Path) -> None:
    method = RTN(activations="static", outputs="static", **options)
    quantize(build("llama"), method, calibration=tokens(), output=tmp_path / "out", verify=False)
    model, ids = load(tmp_path / "out"), tokens(2, 7)
    with torch.no_grad(), dense_twin.compare_layers(model, 16) as errors:
        model(ids)
    assert len(errors) == 14
    assert max(errors.values()) <= 1
    layer = next(layer for _, layer in compressed_layers(model))
    x = torch.randn(3, layer.in_features)
    assert dense_twin.error(layer, x, layer(x) * 1.5) > 1


def test_what_is_not_a_number_is_wrong() -> None:
    layer = next(layer for _, layer in compressed_layers(tiny()))
    x = torch.randn(3, layer.in_features)
    assert dense_twin.error(layer, x, layer(x)) <= 1
    assert dense_twin.error(layer, x, layer(x) * float("nan")) == float("inf")


def test_the_twin_is_gone_afterwards() -> None:
    model = tiny()
    with dense_twin.compare_layers(model):
        pass
    assert all("forward" not in vars(layer) for _, layer in compressed_layers(model))


def test_fused_models_compute_what_they_did() -> None:
    ids = torch.arange(9)[None]
    compressed, plain = tiny(), tiny("dense")
    before = [model(ids).logits for model in (compressed, plain)]
    assert fuse(compressed) == []
    decoder.fuse_dense(plain)
    for model, logits in zip((compressed, plain), before, strict=True):
        assert decoder.fused_groups(model) == 4
        assert torch.allclose(model(ids).logits, logits, rtol=1e-4, atol=1e-4)
    decoder.densify(compressed)
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
    head.weight = table.weight
    assert memory.held_bytes(both) == 100 * 8 * 4


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
    with memory.watch_memory(CPU, base) as peak:
        large = torch.ones(2**24)
        while looks.acquire(blocking=False):
            pass
        assert all(looks.acquire(timeout=60) for _ in range(2))  # the second look began after the tensor was there
        del large
        monkeypatch.setattr(memory, "anonymous_bytes", lambda: 0)  # looks from here on see nothing
    assert peak.bytes is not None
    assert peak.bytes > 2**24 * 4 * 0.9
