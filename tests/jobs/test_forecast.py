"""`compress.plan`: what it tells is what `quantize` then does."""

import json
import re
import resource
import shutil

import pytest
import torch
import transformers
from commands import command
from models import GATED, build
from torch import nn

import compress
from compress.base import memory
from compress.base.collectives import Comm
from compress.base.errors import InputError
from compress.base.progress import Silent
from compress.cli.forecasts import memory_line
from compress.evaluation.report.wording import data
from compress.jobs.forecast.forecast import Outline
from compress.jobs.forecast.inference_memory import RunMemory
from compress.jobs.known_models import known_models, model_from_configuration
from compress.jobs.model_source import find_model, open_model
from compress.model.split_experts import split_experts

RTN = compress.RTN(group_size=16)


def mixture():
    config = transformers.MixtralConfig(**GATED, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


def tied():
    config = transformers.Qwen2Config(**{**GATED, "head_dim": 8}, tie_word_embeddings=True)
    return transformers.Qwen2ForCausalLM(config)


def zamba():
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    blocks = {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"], "num_mem_blocks": 1}
    mamba = {"n_mamba_heads": 4, "mamba_d_state": 8, "mamba_ngroups": 1, "chunk_size": 8}
    config = transformers.Zamba2Config(**sizes, **blocks, **mamba, num_key_value_heads=4, hybrid_layer_ids=[1, 2])
    return transformers.Zamba2ForCausalLM(config)


def image_model():
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
    return transformers.ResNetForImageClassification(config)


def some_dense():
    return [compress.only(RTN, "*.q_proj"), compress.only(compress.Magnitude(), "*.up_proj")]


class Listener(Silent):
    """Keeps the outline of a run."""

    told: Outline | None = None

    def outline(self, told: Outline) -> None:
        self.told = told


CASES = {
    "experts of a mixture": (mixture, RTN, {}),
    "a tied table of 4 bits": (tied, [RTN, compress.Embeddings(scheme="w4a16")], {}),
    "a tied table of int8": (tied, [RTN, compress.Embeddings(), compress.KVCache()], {}),
    "layers left alone": (lambda: build("llama"), RTN, {"ignore": ["*.down_proj"]}),
    "layers of one pass alone": (lambda: build("llama"), some_dense(), {}),
    "2:4 without zeros": (lambda: build("llama"), [compress.Magnitude(pattern="2:4"), RTN], {"store": "2:4"}),
    "zero points": (lambda: build("opt"), compress.RTN(scheme="w3a16", grid="asymmetric", group_size=16), {}),
    "transposed layers": (lambda: build("gpt2"), RTN, {}),
    "blocks with shared weights": (zamba, RTN, {}),
    "two stacks": (lambda: build("t5"), RTN, {}),
    "convolutions": (image_model, compress.RTN(), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_bytes_and_layers_are_those_that_a_run_writes(case, tmp_path):
    make, passes, options = CASES[case]
    torch.manual_seed(0)
    make().bfloat16().save_pretrained(tmp_path / "model")
    found = compress.plan(tmp_path / "model", passes, **options)
    heard = Listener()
    how = {"output": tmp_path / "out", "verify": False, "reporter": heard}
    record = compress.quantize(tmp_path / "model", passes, **how, **options).record
    assert found.exact
    assert found.saving == record.saving
    assert heard.told is not None
    assert (heard.told.saving, heard.told.layers, heard.told.dense) == (found.saving, found.layers, found.dense)
    done = {layer.name for layer in record.layers}
    assert {layer.name for layer in found.layers} <= done
    assert record.left_alone.items() <= found.dense.items()
    assert done.isdisjoint(found.dense.keys() - {name for name, why in found.dense.items() if "stored dense" in why})


def test_a_model_in_memory_is_told_by_its_shapes_and_left_as_it_is():
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
    before = {name: p.clone() for name, p in model.named_parameters()}
    found = compress.plan(model, RTN)
    assert [layer.shape for layer in found.layers] == [(32, 64), (8, 32)]
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_the_random_numbers_of_the_caller_stay_where_they_are(tmp_path):
    build("llama").save_pretrained(tmp_path)
    before = torch.get_rng_state()
    compress.plan(tmp_path, RTN)
    assert torch.equal(before, torch.get_rng_state())


def test_no_weight_is_read(tmp_path):
    build("llama").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as opened:  # numbers of a sparse file are zeros, of any size
        length = 8 + int.from_bytes(opened.read(8), "little")
        opened.truncate(length)
        opened.truncate(size)
    assert compress.plan(tmp_path, compress.GPTQ(group_size=16)).exact


@pytest.mark.parametrize(
    ("passes", "options", "words"),
    [
        (compress.Structure(channels=0.25), {}, "by what it finds in their values"),
        (compress.RTN(group_size=24), {}, "group size 24 does not divide"),
        (RTN, {"ignore": ["nothing"]}, "matches no layer"),
        (RTN, {"store": "4:8"}, "store '4:8'"),
        (RTN, {"device": "nowhere"}, "device 'nowhere' cannot be used"),
    ],
)
def test_what_a_run_refuses_is_refused(passes, options, words):
    with pytest.raises(InputError, match=words):
        compress.plan(build("llama"), passes, **options)


def test_the_command_shows_what_python_tells(tmp_path):
    shown = command("plan", "demo", "--method", "rtn", "--embeddings", "w8a16", "--json", tmp_path / "plan.json")
    found = compress.plan("demo", [compress.RTN(), compress.Embeddings()])
    told = json.loads((tmp_path / "plan.json").read_text())
    assert told["saving"]["after"] == found.saving.after
    assert f"size: {data(found.saving.before)} -> {data(found.saving.after)}, " in shown.out


def test_memory_is_that_of_the_site_that_takes_most():
    """The input of down_proj is the widest: H, drift and contrast of it, or seven matrices while tokens are few."""
    model, gptq = build("llama"), compress.GPTQ(group_size=16)
    widest = max(m.in_features for m in model.modules() if isinstance(m, nn.Linear))
    many = compress.plan(model, gptq, samples=widest, length=2)
    few = compress.plan(model, gptq, samples=widest - 1, length=2)
    assert many.memory is not None
    assert few.memory is not None
    assert many.memory.site.endswith("down_proj")
    assert (many.memory.statistics, few.memory.statistics) == (3 * 4 * widest**2, 7 * 4 * widest**2)
    longer = compress.plan(model, gptq, samples=10 * widest, length=2).memory
    assert longer is not None
    assert longer.activations == 10 * many.memory.activations
    rounded = compress.plan(model, RTN).memory
    assert rounded is not None
    assert rounded.activations == rounded.statistics == 0
    assert rounded.total == rounded.program + rounded.working


def test_forwards_are_told_to_be_repeated_where_they_do_not_fit(monkeypatch):
    monkeypatch.setattr("compress.jobs.forecast.duration._seconds", lambda work: 1e-3)  # both times of one machine

    def plan():
        return compress.plan(build("llama"), compress.GPTQ(group_size=16), samples=1024, length=256, batch_size=2)

    enough = plan()
    assert enough.memory is not None
    assert enough.memory.kept is None
    monkeypatch.setattr("compress.jobs.forecast.forecast.available_bytes", lambda _: enough.memory.working - 1)
    short = plan()
    assert short.memory is not None
    assert short.memory.kept == enough.memory.working
    assert short.memory.working < enough.memory.working / 2
    assert short.seconds > enough.seconds
    assert f"to keep all forwards of a block would take {short.memory.kept / 2**20:.0f} MiB" in memory_line(short)
    assert "repeated" not in memory_line(enough)


def test_available_memory_is_what_all_limits_leave(monkeypatch, tmp_path):
    cpu = torch.device("cpu")
    monkeypatch.setattr(memory, "CGROUP", (tmp_path / "memory.max",))
    monkeypatch.setattr(memory, "meminfo", {"MemTotal": 2**40, "MemAvailable": 2**38}.get)
    assert memory.available_bytes(cpu) == 2**38
    (tmp_path / "memory.max").write_text(f"{2**37}\n")
    (tmp_path / "memory.stat").write_text(f"file 77\nanon {2**36}\n")
    assert memory.available_bytes(cpu) == 2**37 - 2**36
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert memory.available_bytes(cpu) == 2**34
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1, 1))
    assert memory.available_bytes(cpu) == 0
    assert memory.available_bytes(torch.device("meta")) is None


def test_time_grows_with_what_there_is_to_do():
    model = build("llama")
    little, much = (
        compress.plan(model, compress.GPTQ(group_size=16), samples=n, length=64).seconds for n in (8, 80000)
    )
    assert little is not None
    assert much is not None
    assert 0 < little < much


def test_many_sweeps_are_counted_and_not_run():
    model = build("llama")
    few, many = (
        compress.plan(model, compress.GPTQ(group_size=16, sweeps=sweeps), samples=1, length=64).seconds
        for sweeps in (4, 10**7)
    )
    assert many > 10**4 * few  # seconds that a plan that ran them would take itself


def test_what_trains_is_not_told():
    found = compress.plan(build("llama"), [RTN, compress.Reconstruct()])
    assert found.memory is None
    assert found.seconds is None


def test_experts_that_are_stored_one_by_one_stay_in_their_files(tmp_path):
    mixture().bfloat16().save_pretrained(tmp_path / "model")
    found = compress.plan(tmp_path / "model", RTN).memory
    assert found is not None
    assert found.loaded == 0
    opened = open_model(find_model(str(tmp_path / "model"), "cpu", False), None, Comm())
    assert opened.source is not None
    mapped = {opened.source.weights.tensor(name).data_ptr() for name in opened.source.weights}
    held = {p.data_ptr() for name, p in opened.model.named_parameters() if ".experts." in name}
    assert len(held) == 24
    assert held <= mapped


@pytest.mark.first
@pytest.mark.parametrize("name", ["llama-3.1-8b", *sorted(known_models().keys() - {"llama-3.1-8b"})])
def test_a_known_model_has_the_parameters_that_the_hub_counts(name):
    model = model_from_configuration(name)
    distinct = {id(p): p.numel() for p in model.parameters()}
    assert sum(distinct.values()) == known_models()[name]["parameters"]


def test_a_configuration_alone_is_planned_like_its_checkpoint(tmp_path):
    build("llama").bfloat16().save_pretrained(tmp_path / "model")
    (tmp_path / "alone").mkdir()
    shutil.copy(tmp_path / "model" / "config.json", tmp_path / "alone")
    known = compress.plan(tmp_path / "model", RTN)
    for place in ("alone", "alone/config.json"):
        found = compress.plan(tmp_path / place, RTN)
        assert (found.layers, found.dense, found.run) == (known.layers, known.dense, known.run)


@pytest.mark.parametrize("cache", [None, compress.KVCache(type="int4", group_size=8)], ids=["16 bits", "int4"])
def test_a_context_takes_the_bytes_that_a_cache_holds(cache, tmp_path):
    model = build("llama").bfloat16()
    compress.quantize(model, [RTN] if cache is None else [RTN, cache], output=tmp_path / "out")
    passes = [RTN] if cache is None else [RTN, cache]
    told = compress.plan(build("llama").bfloat16(), passes).run
    loaded = compress.load(tmp_path / "out", dtype=torch.bfloat16)
    held = loaded(torch.arange(12).reshape(1, 12), use_cache=True).past_key_values
    tensors = [t for layer in held.layers for t in (layer.keys, layer.values)]
    assert told.at(12) - told.at(0) == sum(t.nbytes for t in tensors)


def test_ranks_hold_and_open_a_share_of_the_experts():
    gptq, how = compress.GPTQ(group_size=16), {"samples": 8, "length": 32, "batch_size": 2}
    split_experts(model := mixture())
    two, four = (compress.plan(model, gptq, ranks=ranks, **how).rank for ranks in (2, 4))
    experts = 2 * 4 * 3 * 32 * 64  # 2 blocks of 4, each with 3 matrices
    dense = sum(p.numel() for p in model.parameters()) - experts
    assert (two.held, four.held) == (4 * (dense // 2 + experts // 2), 4 * (dense // 4 + experts // 4))
    assert two.opened - four.opened == experts // 2  # a quarter of a block's, 4 bytes each
    assert four.memory.block < two.memory.block < compress.plan(model, gptq, **how).memory.block
    assert four.sent == pytest.approx(two.sent * (3 / 4) / (1 / 2))  # of rings


def test_ranks_that_share_out_tokens_hold_fewer_and_sum_their_statistics():
    model, how = build("llama"), {"samples": 64, "length": 32, "batch_size": 2}
    rtn, gptq = (compress.plan(model, p, ranks=2, **how).rank for p in (RTN, compress.GPTQ(group_size=16)))
    alone = compress.plan(model, compress.GPTQ(group_size=16), **how).memory
    assert gptq.memory.activations < alone.activations
    # H and two halves of the drift, of the inputs of attention, gate and down in 2 blocks, summed over a ring of two.
    assert gptq.sent - rtn.sent == 3 * 4 * 2 * (2 * 32**2 + 64**2)


def test_a_card_by_its_name_and_its_ranks():
    ran = command("plan", "qwen3-0.6b", "--method", "gptq", "--device", "h100", "--ranks", 4)
    assert ran.code == 0, ran.err
    assert "a device of 80.0 GiB is large enough to quantize it" in ran.out
    assert "--device cuda --output OUT" in ran.out
    assert re.search(
        r"each of 4 ranks takes [0-9.]+ GiB of cuda at its peak, .* of weights at rest .*: not measured", ran.out
    )


def test_the_longest_context_is_the_last_that_fits():
    run = RunMemory(weights=1000, full=3.0, sliding=5.0, window=16, longest=64)
    assert run.context_within(999) == 0
    for available in range(1000, 1300, 7):
        most = run.context_within(available)
        assert run.at(most) <= available
        assert most == run.longest or run.at(most + 1) > available


def test_a_card_of_8_gb_and_a_model_of_8_b(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ask = ("plan", "llama-3.1-8b", "--method", "gptq", "--device", "cuda", "--device-memory")
    ran = command(*ask, "8GB")
    assert ran.code == 0, ran.err
    first, second, *others = ran.out.splitlines()
    assert re.fullmatch(r"a device of 7.45 GiB runs it, with up to [0-9,]+ tokens of context", first)
    assert re.fullmatch(r"a device of 7.45 GiB is large enough to quantize it, which takes [67][0-9.]+ GiB", second)
    words = "--method gptq --calibration TEXT --device cuda --output OUT"
    assert f"this fits: compress quantize meta-llama/Llama-3.1-8B {words}" in others
    assert re.search(
        r"wait in the host's memory, and rows are solved in runs; at most [1-4] samples run at once", ran.out
    )
    assert "is too small to quantize it" in command(*ask, "4GB").out
    assert "note: 8 GB = 7.45 GiB (a card sold as 8 GB has 8 GiB: --device-memory 8GiB)" in others
    assert "of the host, beside the mapped weight files" in ran.out
    assert "kernels: not known for cuda, which is not here" in ran.out


def test_a_hub_id_that_is_not_to_be_had_is_planned_as_the_known_model_of_its_name(monkeypatch):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: 1 / 0)
    told = compress.plan("HuggingFaceTB/SmolLM2-135M", RTN)
    assert told.layers == compress.plan("smollm2-135m", RTN).layers
    note = "HuggingFaceTB/SmolLM2-135M cannot be had from the hub now; planned by the known configuration of"
    assert f"{note} smollm2-135m" in told.notes


def test_the_command_that_fits_has_what_plan_was_given(tmp_path):
    """That of rounding has no text, and of `--set` what rounding knows."""
    build("llama").save_pretrained(model := tmp_path / "a model")
    words = ("--set", "damp=0.02", "--set", "group_size=16", "--ignore", "*.k_proj", "--effort", "default")
    enough = command("plan", model, *words, "--device-memory", "64GiB").out
    given = "--effort default --set damp=0.02 --set group_size=16 --calibration TEXT --ignore '*.k_proj' --output OUT"
    assert f"this fits: compress quantize '{model}' {given}\n" in enough
    told = compress.plan(model, compress.GPTQ(group_size=16), ignore=["*.k_proj"], device="cuda", device_memory=1)
    least = next(run.memory for run in told.cheaper if run.options == "--method rtn")
    short = command("plan", model, *words, "--device", "cuda", "--device-memory", str(least)).out
    rounded = "--method rtn --set group_size=16 --ignore '*.k_proj' --device cuda --output OUT"
    assert f"this fits: compress quantize '{model}' {rounded}\n" in short


def test_a_known_model_is_asked_for_an_engine_by_its_shapes():
    ran = command("plan", "smollm2-135m", "--method", "rtn", "--for", "llama.cpp")
    assert ran.code == 0, ran.err
    assert "whether llama.cpp has this family, its checkpoint alone tells" in ran.out
    narrow = command("plan", "smollm2-135m", "--method", "rtn", "--group-size", "128", "--for", "llama.cpp")
    assert narrow.code == 2


def test_only_a_gpu_may_be_elsewhere(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cudax", "xpu:0"):
        ran = command("plan", "demo", "--method", "rtn", "--device", device)
        assert ran.code == 2
        assert f"device {device!r} cannot be used" in ran.err
