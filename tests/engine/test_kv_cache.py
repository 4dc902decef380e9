"""Key-value caches in few bits: the same codes in memory, in a checkpoint, in transformers and in any kind of cache."""

import json
import sys
from functools import cache

import pytest
import torch
from checkpoints import same
from combinations import each
from commands import StopAfterOne, command, fast_gptq, make_llama, save
from models import GATED, build, tokens
from safetensors.torch import load_file, save_file
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    DynamicCache,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    StaticCache,
)

import compress
from compress.base.errors import CheckpointError, InputError
from compress.checkpoint.read.source import find_source
from compress.inference.check.by_transformers import load_with_transformers
from compress.inference.load.kv_caches import RoundCache, cache_hook
from compress.jobs.verify import outputs, probe
from compress.model.attention import attentions
from compress.solvers.statistics.calibrators import OPTIONS as CALIBRATORS
from compress.weights.grid import Grid, fake_quantize
from compress.weights.kv_cache_codes import CacheScheme, bytes_of_token, decode_states, encode_states

KINDS = [
    *((kind, per) for kind in ("int8", "fp8") for per in ("token", "head", "tensor")),
    ("int4", "token"),
    ("int3", "token"),
]
every_kind = pytest.mark.parametrize(("kind", "per"), KINDS)
WEIGHTS = compress.RTN(scheme="w8a16", group_size=-1)


def passes(kind, per, **options):
    return [WEIGHTS, compress.KVCache(type=kind, granularity=per, **options)]


def shown(per):
    """Calibration data, for those that need some."""
    return None if per == "token" else tokens()


def rounded(family="llama", kind="int8", per="token", **options):
    model = build(family)
    compress.quantize(model, passes(kind, per, **options), calibration=shown(per))
    return model


# --- codes ---------------------------------------------------------------------------------------------------------


def states(dtype=torch.float32):
    x = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0)) * torch.tensor([0.1, 1, 30]).view(3, 1, 1)
    x[0, 1, 2] = 0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["int", "float"])
def test_codes_of_tokens_are_those_of_the_grid_and_carry_their_scale(kind, dtype):
    x, scheme = states(dtype), CacheScheme(type=kind)
    stored = encode_states(x, scheme, None)
    assert stored.dtype == torch.int8
    assert stored.shape == (2, 3, 5, 12)
    grid = Grid(bits=8, type=kind, granularity="token")
    expected = fake_quantize(x.reshape(-1, 8).float(), grid, torch.float32).to(dtype).view_as(x)
    assert torch.equal(decode_states(stored, scheme, None, x), expected)


@pytest.mark.parametrize(("size", "group"), [(8, 8), (96, 48), (128, 64), (80, 40)])
@pytest.mark.parametrize("bits", [4, 3])
def test_codes_of_groups_are_the_nearest_between_a_minimum_and_a_maximum(bits, size, group):
    x, scheme = torch.randn(2, 3, 5, size, generator=torch.Generator().manual_seed(0)), CacheScheme(bits=bits, group=64)
    x[0, 1, 2] = 0
    x[1, 2, 3] = -7.5
    stored = encode_states(x, scheme, None)
    assert stored.dtype == torch.int8
    assert stored.shape[-1] == bytes_of_token(scheme, size) == size * bits // 8 + 4 * size // group
    groups = x.view(2, 3, 5, -1, group)
    low = groups.amin(-1, keepdim=True).bfloat16().float()
    step = ((groups.amax(-1, keepdim=True) - low) / (2**bits - 1)).bfloat16().float()
    codes = ((groups - low) / step).nan_to_num(0).round().clamp(0, 2**bits - 1)
    found = decode_states(stored[:, :, 1:], scheme, None, x)  # rows that begin at any address
    torch.testing.assert_close(found, (low + codes * step).view_as(x)[:, :, 1:], rtol=1e-6, atol=1e-6)
    assert torch.equal(found[1, 2, 2], x[1, 2, 3])


def test_rotated_keys_have_less_error_where_one_channel_is_large():
    """The channels of a key are far from equal; rotation shares a large one out among all of a group."""
    keys = torch.randn(1, 2, 64, 64, generator=torch.Generator().manual_seed(0))
    keys[..., 5] *= 30
    errors = []
    for turned in (False, True):
        hook = RoundCache(CacheScheme(bits=4, group=64, rotated=turned), "past_key_values", 0)
        found, _ = hook.keep(torch.nn.Module(), None, keys, keys)
        errors.append((found - keys)[..., :5].square().mean())
    assert errors[1] < errors[0] / 4


@pytest.mark.parametrize("kind", ["int", "float"])
@pytest.mark.parametrize("per", ["head", "tensor"])
def test_codes_of_fixed_scales(kind, per):
    x, scheme = states(), CacheScheme(type=kind, granularity=per)
    top = 127.5 if kind == "int" else 448
    scale = x.abs().amax((0, 2, 3)).view(3, 1, 1) / top if per == "head" else x.abs().max().view(1) / top
    stored = encode_states(x, scheme, scale)
    assert stored.shape == x.shape
    found = decode_states(stored, scheme, scale, x)
    if kind == "int":
        assert torch.equal(found, (x / scale).round().clamp(-128, 127) * scale)
    else:
        assert torch.equal(found, (x / scale).to(torch.float8_e4m3fn).float() * scale)
    assert 0 < (found - x).abs().max() < x.abs().max() / 16


def test_nothing_stored_is_nothing_kept():
    """What a static cache holds where no token has come yet."""
    like = torch.ones(1, 1, 4, 8)
    for scheme in (CacheScheme(), CacheScheme(bits=3, group=64)):
        empty = torch.zeros(1, 1, 4, bytes_of_token(scheme, 8), dtype=torch.int8)
        assert not decode_states(empty, scheme, None, like).any()


# --- models --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "mistral", "opt", "gpt2"])
def test_attentions_are_found_and_their_cache_is_rounded(family):
    model, dense = rounded(family), build(family)
    compress.quantize(dense, WEIGHTS)
    assert len(attentions(model)) == 2
    assert all(cache_hook(attention) is not None for attention in attentions(model).values())
    expected, found = outputs(dense, probe(96)), outputs(model, probe(96))
    assert 1e-4 < (found - expected).abs().mean() / expected.std() < 0.02


@every_kind
@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_a_cache_of_any_kind_says_the_same_text(kind, per, implementation):
    model = rounded("mistral", kind, per)  # its window of 8 slides
    ids = tokens(2, 12)
    common = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, use_cache=False, **common)
    assert torch.equal(model.generate(ids, cache_implementation=implementation, **common), expected)


@every_kind
def test_token_by_token_computes_what_one_forward_computes(kind, per):
    model, ids = rounded("llama", kind, per), tokens(2, 12)
    whole = model(ids).logits
    cache = DynamicCache()
    steps = [model(part, past_key_values=cache).logits for part in (ids[:, :5], *ids[:, 5:].split(1, 1))]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=1e-4, atol=1e-5)
    kept = cache.layers[0].keys
    assert kept.dtype == torch.int8
    assert kept.shape == (2, 2, 12, bytes_of_token(compress.KVCache(type=kind, granularity=per).scheme, 8))


def test_beams_reorder_codes():
    model, ids = rounded(), tokens(2, 6)
    common = {"num_beams": 3, "max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(model.generate(ids, **common), model.generate(ids, use_cache=False, **common))


def test_ranges_are_those_of_real_tokens():
    """Per head, pads left out, after the rotary embedding and with the rounded weights."""
    model, dense = build("llama"), build("llama").requires_grad_(False)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[0, 6:] = 0
    batches = [{"input_ids": tokens(2, 10, seed), "attention_mask": mask} for seed in (3, 4)]
    result = compress.quantize(model, passes("int8", "head"), calibration=batches)
    compress.quantize(dense, WEIGHTS)
    widest = torch.zeros(2)
    for batch in batches:
        cache = DynamicCache()
        dense(**batch, past_key_values=cache)
        kept = cache.layers[0].keys.transpose(1, 2)[mask.bool()]  # [M, H, D]
        widest = torch.maximum(widest, kept.abs().amax((0, 2)))
    scale = model.model.layers[0].self_attn.k_scale
    torch.testing.assert_close(scale.flatten(), widest / 127.5, rtol=1e-6, atol=0)
    keys, values = result.record.ranges[:2]
    assert (keys.tensor, keys.role, values.role) == ("model.layers.0.self_attn", "keys", "values")
    assert (keys.tokens, keys.ranges) == (2 * 16, 2)
    assert keys.high == pytest.approx(float(widest.max()))


@pytest.mark.parametrize(
    ("calibrator", "kind"),
    [
        (c, kind)
        for c in sorted(set(CALIBRATORS) - {"minmax"})
        for kind in ("int8", "fp8")
        if (c, kind) != ("kl", "fp8")
    ],
)
def test_every_calibrator_fixes_scales_within_the_observed_range(calibrator, kind):
    model = build("llama")
    cache = compress.KVCache(type=kind, granularity="head", calibrator=calibrator)
    ranges = compress.quantize(model, [WEIGHTS, cache], calibration=tokens(), batch_size=2).record.ranges
    assert [found.role for found in ranges] == ["keys", "values"] * 2
    for found in ranges:
        assert found.calibrator == calibrator
        assert 0 < found.high <= max(-found.lowest, found.highest)
    widest = rounded(kind=kind, per="head").model.layers[0].self_attn
    for side in ("k_scale", "v_scale"):
        assert (getattr(model.model.layers[0].self_attn, side) <= getattr(widest, side)).all()


def test_calibrators_clip_what_they_clip():
    whole, cut = (rounded(per="tensor", calibrator=c) for c in ("minmax", "kl"))
    scales = [m.model.layers[1].self_attn.v_scale for m in (whole, cut)]
    assert 0 < scales[1] < scales[0]


def test_gradients_pass_as_if_nothing_were_rounded():
    model, ids = rounded(), tokens(2, 8)
    exact = build("llama")
    for mine, other in zip(model.parameters(), exact.parameters(), strict=True):
        other.data = mine.data.clone()
    gradients = []
    for one in (model, exact):
        one(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append(one.model.layers[0].self_attn.k_proj.weight.grad)
    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0.1, atol=0.05 * float(gradients[1].abs().max()))
    cache = DynamicCache()
    with torch.no_grad():
        model(ids, past_key_values=cache)
    loss = model(ids, past_key_values=cache, labels=ids).loss
    with pytest.raises(InputError, match="use_cache=False"):
        loss.backward()


def test_compiles_into_one_graph_that_fills_a_static_cache():
    model, ids = rounded().requires_grad_(False), tokens(2, 8)
    found = []
    for step in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        cache = StaticCache(model.config, max_cache_len=16)
        logits = [model(ids[:, :5], past_key_values=cache).logits]
        logits += [step(token, past_key_values=cache).logits for token in ids[:, 5:].split(1, 1)]
        assert cache.layers[0].values.dtype == torch.int8
        found.append(torch.cat(logits, 1))
    torch.testing.assert_close(found[1], found[0])


def test_later_passes_and_blocks_compensate_for_a_rounded_cache():
    """The original model's stream, beside which GPTQ corrects drift, is not rounded."""
    model, other = build("llama"), build("llama")
    gptq = fast_gptq(scheme="w4a16", group_size=16)
    compress.quantize(model, [gptq, compress.KVCache(type="fp8", granularity="tensor")], calibration=tokens())
    compress.quantize(other, gptq, calibration=tokens())
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, other.model.layers[0].mlp.up_proj.weight)
    assert not torch.equal(model.model.layers[1].mlp.up_proj.weight, other.model.layers[1].mlp.up_proj.weight)
    assert all(cache_hook(attention).active for attention in attentions(model).values())


# --- checkpoints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "family"), each(KINDS, ["llama", "gemma2"]), ids=str)
def test_memory_checkpoint_and_transformers_agree(how, family, tmp_path):
    kind, per = how
    pytest.importorskip("compressed_tensors", reason="needs the hf extra")
    source = save(build(family), tmp_path / "in")
    compress.quantize(source, passes(kind, per), calibration=shown(per), output=tmp_path / "out", verify=False)
    expected = outputs(rounded(family, kind, per), probe(96))
    low = compress.load(tmp_path / "out")
    dense = compress.load(tmp_path / "out", dequantize=True)
    theirs, loader = load_with_transformers(find_source(str(tmp_path / "out")), torch.float32)
    assert loader == "default"
    for other in (low, dense, theirs):
        torch.testing.assert_close(outputs(other, probe(96)), expected, rtol=1e-5, atol=1e-5)
    state = low.state_dict()
    files = {k: v for path in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(path).items()}
    assert set(state) - {"lm_head.weight"} == set(files) - {"lm_head.weight"}
    assert all(torch.equal(state[name], value) for name, value in files.items())
    low.save_pretrained(tmp_path / "again")
    again = compress.load(tmp_path / "again")
    torch.testing.assert_close(outputs(again, probe(96)), expected, rtol=1e-5, atol=1e-5)


def test_a_cache_beside_rounded_inputs_and_outputs(tmp_path):
    """Keys are those that the rounded projections return."""
    pytest.importorskip("compressed_tensors", reason="needs the hf extra")
    every = [
        compress.RTN(scheme="w8a8", activations="static", outputs="static"),
        compress.KVCache(granularity="tensor", calibrator="percentile"),
    ]
    source = save(build("llama"), tmp_path / "in")
    compress.quantize(source, every, calibration=tokens(), output=tmp_path / "out", verify=False)
    memory = build("llama")
    compress.quantize(memory, every, calibration=tokens())
    expected = outputs(memory, probe(96))
    theirs, _ = load_with_transformers(find_source(str(tmp_path / "out")), torch.float32)
    rounding = (outputs(build("llama"), probe(96)) - expected).abs().mean()
    for other in (compress.load(tmp_path / "out"), theirs):
        assert (outputs(other, probe(96)) - expected).abs().max() <= 0.05 * expected.std()
        assert (outputs(other, probe(96)) - expected).abs().mean() <= 0.1 * rounding
    assert compress.verify(tmp_path / "out")["cache"] == "compared"


@pytest.mark.parametrize("grid", ["signed-scale", "asymmetric"])
def test_a_written_cache_is_verified(grid, tmp_path):
    pytest.importorskip("compressed_tensors", reason="needs the hf extra")
    source = save(make_llama(), tmp_path / "in")
    method = [compress.RTN(group_size=16, grid=grid), compress.KVCache()]
    made = compress.quantize(source, method, output=tmp_path / "out", verify=False)
    assert any("vLLM" in note for note in made.record.notes)
    found = compress.verify(tmp_path / "out")
    assert found["layers"] == 14
    assert found["cache"] == "compared" if grid != "asymmetric" else "leaves it as it is" in found["cache"]


def test_a_loader_that_leaves_the_cache_alone_does_not_verify(tmp_path, monkeypatch):
    pytest.importorskip("compressed_tensors", reason="needs the hf extra")
    source = save(make_llama(), tmp_path / "in")
    compress.quantize(source, [compress.RTN(group_size=16), compress.KVCache()], output=tmp_path / "out", verify=False)

    def unrounded(given, dtype):
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        del config["quantization_config"]["kv_cache_scheme"]
        (tmp_path / "out" / "config.json").write_text(json.dumps(config))
        return load_with_transformers(find_source(str(given.path)), dtype)

    monkeypatch.setattr(sys.modules["compress.inference.check.by_transformers"], "load_with_transformers", unrounded)
    with pytest.raises(compress.CompressError, match="without a rounded key-value cache"):
        compress.verify(tmp_path / "out")


def test_a_cache_alone(tmp_path):
    pytest.importorskip("compressed_tensors", reason="needs the hf extra")
    source = save(make_llama(), tmp_path / "in")
    cache = compress.KVCache(type="fp8", granularity="tensor")
    ids = torch.randint(2048, (6, 16), generator=torch.Generator().manual_seed(0))
    made = compress.quantize(source, cache, calibration=ids, output=tmp_path / "out", verify=False)
    assert compress.verify(tmp_path / "out")["cache"] == "compared"
    assert made.record.layers == []
    assert not any("vLLM" in note for note in made.record.notes)
    weights = {k: v for p in (tmp_path / "out").glob("*.safetensors") for k, v in load_file(p).items()}
    assert torch.equal(weights["model.layers.0.mlp.up_proj.weight"], make_llama().model.layers[0].mlp.up_proj.weight)
    assert weights["model.layers.0.self_attn.k_scale"].shape == (1,)


def test_a_run_that_is_stopped_resumes_with_its_caches(tmp_path):
    source = save(build("llama"), tmp_path / "in")
    common = {
        "passes": passes("int8", "head", calibrator="mse", histograms=True),
        "calibration": tokens(),
        "verify": False,
    }
    compress.quantize(source, output=tmp_path / "whole", **common)
    with pytest.raises(KeyboardInterrupt):
        compress.quantize(source, output=tmp_path / "out", reporter=StopAfterOne(), **common)
    again = compress.quantize(source, output=tmp_path / "out", resume=True, **common)
    assert len(again.record.caches) == 2
    assert [r.role for r in again.record.ranges] == ["keys", "values"] * 2
    counts = again.record.ranges[0].histogram
    assert sum(counts.negative) + sum(counts.rest) == tokens().numel() * 2 * 8
    same(tmp_path / "whole", tmp_path / "out")


def test_on_the_command_line(tmp_path):
    source = save(make_llama(), tmp_path / "in")
    common = ("quantize", source, "--method", "rtn", "--group-size", 16, "--output", tmp_path / "out")
    data = ("--calibration", "demo", "--samples", 4, "--length", 16)
    done = command(*common, "--kv-cache", "int8:head", *data)
    assert done.code == 0, done.err
    assert "keys and values of 2 attentions: int8 cache, per head" in done.out
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["kv_cache_scheme"] == {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "dynamic": False,
        "strategy": "attn_head",
    }
    inspected = command("inspect", tmp_path / "out", "--all")
    assert "keys and values: int8 cache, per head" in inspected.out
    assert "model.layers.1.self_attn " in inspected.out
    plain = command("inspect", source, "--json", "-").json()["size"]
    assert command("inspect", tmp_path / "out", "--json", "-").json()["size"]["parameters"] == plain["parameters"]
    for given, message in (
        (("--kv-cache", "int5"), "'int5'; allowed: int8, fp8, int4, int3"),
        (("--kv-cache", "int4:head"), "int4 per head; allowed: per token"),
        (("--kv-cache", "fp8:head"), "kv-cache needs calibration data"),
        (("--kv-cache", "int8", "--samples", "2"), "uses no calibration data; drop --samples"),
    ):
        refused = command(*common, "--overwrite", *given)
        assert refused.code == 2
        assert message in refused.err


# --- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"type": "int5"}, "type of a key-value cache 'int5'; .*allowed: int8, fp8, int4, int3"),
        ({"group_size": 32}, "are of caches of int4 and int3, not of int8"),
        ({"type": "fp8", "rotate": False}, "are of caches of int4 and int3, not of fp8"),
        ({"type": "int4", "group_size": 4}, "group_size 4 of a key-value cache; allowed: 8 or more"),
        ({"granularity": "channel"}, "granularity of a key-value cache 'channel'; allowed: tensor, head, token"),
        ({"calibrator": "mse"}, "give granularity=head or tensor"),
        ({"histograms": True}, "give granularity=head or tensor"),
        ({"granularity": "head", "calibrator": "best"}, "calibrator 'best'"),
        ({"granularity": "head", "percentile": 99.0}, "percentile is of the calibrator"),
        ({"type": "fp8", "granularity": "head", "calibrator": "kl"}, "evenly spaced codes"),
    ],
)
def test_options_that_do_not_go_together(options, message):
    with pytest.raises(InputError, match=message):
        compress.KVCache(**options)


@pytest.mark.parametrize(
    ("family", "given", "message"),
    [
        ("llama", [compress.KVCache(), WEIGHTS], "put it last"),
        ("llama", [WEIGHTS, compress.KVCache(), compress.KVCache()], "give one"),
        ("llama", [WEIGHTS, compress.only(compress.KVCache(), "*.0.*")], "without `only` or `but`"),
        ("bert", [WEIGHTS, compress.KVCache()], "BertModel has no key-value cache"),
        ("t5", [WEIGHTS, compress.KVCache()], "T5ForConditionalGeneration has no key-value cache"),
    ],
)
def test_runs_that_cannot_work(family, given, message):
    model = build(family)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(InputError, match=message):
        compress.quantize(model, given)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("family", "message"), [("gpt2", "GPT2Attention"), ("opt", "num_key_value_heads")])
def test_caches_that_readers_would_not_round_are_not_written(family, message, tmp_path):
    with pytest.raises(InputError, match=message):
        compress.quantize(build(family), passes("int8", "token"), output=tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_caches_of_few_bits_are_written_for_any_attention(tmp_path):
    """Only compress reads them, which knows an attention by what it does, not by its name."""
    passes_ = [compress.RTN(scheme="w8a16", group_size=-1), compress.KVCache(type="int4")]
    made = compress.quantize(build("gpt2"), passes_, output=tmp_path / "out", verify=False)
    assert any("the int4 cache, per token in groups of 64, keys rotated" in note for note in made.record.notes)
    model = build("gpt2")
    compress.quantize(model, passes_)
    torch.testing.assert_close(outputs(compress.load(tmp_path / "out"), probe(96)), outputs(model, probe(96)))


def test_heads_whose_codes_fill_no_bytes_are_refused():
    model = LlamaForCausalLM(LlamaConfig(**{**GATED, "head_dim": 12}))
    with pytest.raises(InputError, match="takes heads of a multiple of 8, not 12"):
        compress.quantize(model, compress.KVCache(type="int4"))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"bits": 5}, "bits is 5; it must be 4 or 3"),
        ({"group": 4}, "in groups of 4; readable: 8 or more"),
        ({"rotated": "yes"}, "rotated is 'yes'; it must be true or false"),
    ],
)
def test_damaged_entries_are_refused(entry, message, tmp_path):
    compress.quantize(build("llama"), compress.KVCache(type="int4"), output=tmp_path / "out", verify=False)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["quantization_config"]["caches"] |= entry
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        compress.load(tmp_path / "out")


def test_keys_and_values_of_two_sizes_have_no_dynamic_format(tmp_path, caplog):
    """Latent attention: its keys carry a rotary part beside what its values have."""
    config = DeepseekV3Config(
        **{**GATED, "num_key_value_heads": 4, "head_dim": 8},
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
    )
    model = DeepseekV3ForCausalLM(config).eval()
    with pytest.raises(InputError, match=r"8 and 16 elements per head.*granularity=head or tensor"):
        compress.quantize(model, passes("int8", "token"), output=tmp_path / "out")
    assert not list(tmp_path.iterdir())
    compress.quantize(model, passes("int8", "head"), calibration=tokens(), output=tmp_path / "out", verify=False)
    expected = outputs(model, probe(96))
    torch.testing.assert_close(outputs(compress.load(tmp_path / "out"), probe(96)), expected, rtol=1e-4, atol=1e-5)
    assert not [r for r in caplog.records if "fake_tensor" in r.name]  # tracing without data is tried, quietly


@pytest.mark.parametrize("kind", ["lfm2", "minimax"])
def test_layers_that_keep_something_else_in_a_cache_are_no_attentions(kind, tmp_path):
    """The states of convolutions and of linear attentions stay as they are."""
    torch.manual_seed(0)
    if kind == "lfm2":
        types = ["conv", "full_attention"]
        model = Lfm2ForCausalLM(Lfm2Config(**GATED, layer_types=types, block_multiple_of=8)).eval()
    else:
        types = ["linear_attention", "full_attention"]
        experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 4}
        model = MiniMaxForCausalLM(MiniMaxConfig(**GATED, **experts, layer_types=types)).eval()
    compress.quantize(model, passes("int8", "tensor"), calibration=tokens(), output=tmp_path / "out", verify=False)
    assert list(attentions(model)) == ["model.layers.1.self_attn"]
    cache = model(tokens(), use_cache=True).past_key_values
    assert cache.layers[1].keys.dtype == torch.int8
    found = outputs(compress.load(tmp_path / "out"), probe(96))
    torch.testing.assert_close(found, outputs(model, probe(96)), rtol=1e-4, atol=1e-5)


def test_an_indexer_inside_an_attention_is_not_in_its_place():
    config = DeepseekV32Config(**{**GATED, "num_key_value_heads": 4}, kv_lora_rank=16, q_lora_rank=16)
    with torch.device("meta"):
        model = DeepseekV32ForCausalLM(config)
    assert list(attentions(model)) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]


def test_a_model_is_not_rounded_twice():
    with pytest.raises(InputError, match="rounds its key-value cache already"):
        compress.quantize(rounded(), WEIGHTS)


def scale_of(name):
    return f"model.layers.0.self_attn.{name}_scale"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A checkpoint with caches of int8 in ranges of some kind. Not to be changed: copy it."""

    @cache
    def write(per):
        out = tmp_path_factory.mktemp("caches") / per
        compress.quantize(build("llama"), passes("int8", per), calibration=shown(per), output=out, verify=False)
        return out

    return write


@pytest.mark.parametrize(
    ("per", "tensors", "scheme", "message"),
    [
        ("head", lambda t: t.pop(scale_of("v")), {}, r"layers\.0\.self_attn\.v_scale is missing"),
        ("head", lambda t: t.update({scale_of("k"): torch.ones(1)}), {}, r"k_scale is F32 \[1\].*\[heads, 1, 1\]"),
        ("tensor", lambda t: t.update({scale_of("k"): torch.ones(2)}), {}, r"must be floats \[1\]"),
        ("head", lambda t: t.update({scale_of("k"): torch.ones(3, 1, 1)}), {}, "2 heads and.* 3 of their"),
        (
            "tensor",
            lambda t: t[scale_of("k")].fill_(float("nan")),
            {},
            "k_scale holds values that are negative or not finite",
        ),
        ("tensor", lambda t: [t.pop(k) for k in list(t) if k[-7:] in ("k_scale", "v_scale")], {}, "holds none of them"),
        (
            "tensor",
            lambda t: [t.pop(scale_of(k)) for k in "kv"],
            {},
            "fills its cache with 2 heads and.* none of their",
        ),
        ("token", lambda t: t.update({scale_of(k): torch.ones(1) for k in "kv"}), {}, "fitted to every token"),
        ("tensor", lambda t: t.update({f"model.norm.{k}_scale": torch.ones(1) for k in "kv"}), {}, "model.norm"),
        ("token", None, {"num_bits": 4}, "cannot be read; readable: 8 bits"),
        ("token", None, {"strategy": "token"}, "cannot be read"),
        ("token", None, {"symmetric": False}, "cannot be read"),
    ],
)
def test_damaged_checkpoints_are_refused(written, copy_of, per, tensors, scheme, message):
    out = copy_of(written(per))
    held = load_file(out / "model.safetensors")
    (tensors or (lambda t: None))(held)
    save_file(held, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] |= scheme
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        outputs(compress.load(out), probe(96))


def test_a_head_that_is_always_zero_runs_in_any_dtype(tmp_path):
    """Its scale is the smallest normal float32, which is 0 in float16."""
    model = build("llama")
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight[:8] = 0
    out = tmp_path / "out"
    compress.quantize(model, passes("int8", "head"), calibration=tokens(), output=out, verify=False)
    loaded = compress.load(out, torch.float16)
    assert loaded.model.layers[0].self_attn.v_scale[0] == 0
    expected = outputs(model, probe(96))
    assert (outputs(loaded, probe(96)).float() - expected).abs().mean() <= 0.02 * expected.std()
    loaded.model.layers[0].self_attn.v_scale.neg_()
    loaded.save_pretrained(tmp_path / "negative")
    with pytest.raises(CheckpointError, match="v_scale holds values that are negative"):
        compress.load(tmp_path / "negative")
