"""The pipeline on every family of models: what is compressed, what is left alone, in which order, and what it costs."""

import copy
import gc
from dataclasses import replace

import pytest
import torch
import transformers
from commands import DRIFT_GPTQ, PLAIN_GPTQ, fast_gptq, save
from models import DECODERS, FAMILIES, build, tokens
from torch import nn

import compress
from compress.base.errors import CompressError, InputError
from compress.checkpoint.write.record import LayerRecord
from compress.engine.walk.block import ELSEWHERE, BlockRun
from compress.engine.walk.remarks import remark_on_few_tokens, remark_on_less
from compress.model.layers import find_stacks, layers_of
from compress.model.splitting.split_layers import ADVICE
from compress.model.untreated_layers import UNASKED_EXPERTS

GPTQ = compress.GPTQ(group_size=16, **DRIFT_GPTQ)


def batches(kind):
    ids = tokens()
    if kind == "t5":
        return [{"input_ids": part, "decoder_input_ids": part} for part in ids.split(3)]
    return ids


def run(model, kind):
    ids = tokens()
    inputs = {"input_ids": ids, "decoder_input_ids": ids} if kind == "t5" else {"input_ids": ids}
    with torch.no_grad():
        return model(**inputs)[0]


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_gptq_compresses_every_linear_layer_of_the_blocks_and_keeps_the_function(kind):
    model = build(kind)
    expected = run(model, kind)
    inside = {layer.name for s in find_stacks(model) for n, b in s.blocks for layer in layers_of(b, n)}
    p = compress.GPTQ(scheme="w8a16", group_size=16, **DRIFT_GPTQ)
    result = compress.quantize(model, p, calibration=batches(kind), batch_size=3)
    assert {r.name for r in result.record.layers} == inside
    assert not inside & set(result.record.left_alone)
    assert result.model is model
    assert (run(model, kind) - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_every_weight_matrix_is_compressed_or_named_with_a_reason(kind):
    model = build(kind)
    result = compress.quantize(model, compress.RTN(group_size=16))
    told = {r.name for r in result.record.layers} | set(result.record.left_alone)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            assert name.removesuffix(".weight") in told or name in told, name


@pytest.mark.parametrize("kind", DECODERS)
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_compressed_weights_lie_on_their_grid(kind, method):
    model = build(kind)
    p = compress.RTN(group_size=16) if method == "rtn" else GPTQ
    compress.quantize(model, p, calibration=tokens() if p.needs() else None)
    for stack in find_stacks(model):
        for name, block in stack.blocks:
            for layer in layers_of(block, name):
                assert layer.parameter.is_contiguous(), layer.name
                groups = layer.weight.unflatten(-1, (-1, 16))
                distinct = [len(torch.unique(group)) for row in groups for group in row]
                assert max(distinct) <= 16, layer.name


def test_gptq_loses_less_than_rtn_on_a_model_with_structure():
    # The inputs of a random model are uncorrelated; the demo model's are not.
    ids = torch.randint(2048, (16, 64), generator=torch.Generator().manual_seed(0))
    reference = compress.load("demo", torch.float32)

    def kl(p):
        model = compress.load("demo", torch.float32)
        first = compress.only(p, "model.layers.[01].*")
        compress.quantize(model, first, calibration=ids if p.needs() else None)
        return compress.evaluate(model, reference=reference, text=ids).kl_mean

    assert kl(compress.GPTQ(scheme="w3a16", group_size=64, **DRIFT_GPTQ)) < 0.5 * kl(
        compress.RTN(scheme="w3a16", group_size=64)
    )


def test_rtn_needs_no_forward():
    result = compress.quantize(build("llama"), compress.RTN(group_size=16))
    assert result.record.block_forwards == 0


@pytest.mark.parametrize(
    "method", [compress.RTN(group_size=16), GPTQ, replace(GPTQ, objective="loss")], ids=["rtn", "gptq", "loss"]
)
def test_what_was_decided_about_a_block_is_freed_with_it(method):
    gc.collect()
    gc.disable()  # which looks for cycles the less often, the more objects a model has
    try:
        compress.quantize(build("llama"), method, calibration=tokens())
        assert not [each for each in gc.get_objects() if type(each) is BlockRun]
    finally:
        gc.enable()


def test_two_runs_are_identical():
    first, second = build("qwen2"), build("qwen2")
    for model in (first, second):
        compress.quantize(model, GPTQ, calibration=tokens(), batch_size=2)
    for (name, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_passes_share_a_model_by_layer():
    model = build("llama")
    passes = (
        compress.only(compress.RTN(scheme="w8a16", group_size=-1), "*.self_attn.*"),
        compress.but(GPTQ, "*.self_attn.*"),
    )
    result = compress.quantize(model, passes, calibration=tokens())
    by_method = {m: [r.name for r in result.record.layers if r.method == m] for m in ("rtn", "gptq")}
    assert len(by_method["rtn"]) == 8
    assert len(by_method["gptq"]) == 6
    assert all(".self_attn." in name for name in by_method["rtn"])


def test_a_later_rtn_pass_reaches_what_the_next_block_sees():
    # The last pass needs no forward of its own; the next block's input must still carry its rounding.
    gptq = compress.only(compress.GPTQ(group_size=16, drift=0.0, statistics="float64"), "*.self_attn.*")
    rtn = compress.only(compress.RTN(group_size=16), "*.mlp.*")
    one, other = build("llama").double(), build("llama").double()
    compress.quantize(one, (gptq, rtn), calibration=tokens())
    compress.quantize(other, (rtn, gptq), calibration=tokens())
    # The first block's attention comes before its MLP: both orders see the same inputs, so all weights agree.
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, msg=name)


def test_ignored_layers_stay_and_are_named():
    model = build("llama")
    before = model.model.layers[0].mlp.down_proj.weight.clone()
    result = compress.quantize(model, compress.RTN(group_size=16), ignore=["*.down_proj"])
    assert torch.equal(model.model.layers[0].mlp.down_proj.weight, before)
    assert result.record.left_alone["model.layers.0.mlp.down_proj"] == "ignored by '*.down_proj'"


def test_regular_expressions_match_from_the_beginning_of_a_name():
    down, first = "re:.*down_proj", "re:model.layers.0"
    rtn = compress.RTN(group_size=16)
    ways = [(rtn, [down]), (compress.but(rtn, down), []), (compress.only(rtn, r"re:.*(attn|mlp)\.(?!down)"), [])]
    for passes, ignore in ways:
        names = {layer.name for layer in compress.quantize(build("llama"), passes, ignore=ignore).record.layers}
        assert "model.layers.1.mlp.up_proj" in names
        assert not any("down_proj" in name for name in names)
    record = compress.quantize(build("llama"), rtn, ignore=[first]).record
    assert {layer.name.split(".")[2] for layer in record.layers} == {"1"}
    assert not any(why.endswith("'re") for why in record.coverage.rest)


@pytest.mark.parametrize("pattern", ["lm_head", "re:.*norm", "*embed_tokens"])
def test_a_pattern_of_what_stays_dense_anyway_is_remarked_on(pattern):
    rtn = compress.RTN(group_size=16)
    plain = {layer.name for layer in compress.quantize(build("llama"), rtn).record.layers}
    for passes, ignore in ((rtn, [pattern]), (compress.but(rtn, pattern), [])):
        record = compress.quantize(build("llama"), passes, ignore=ignore).record
        assert {layer.name for layer in record.layers} == plain
        assert any(f"{pattern!r} changes nothing" in note for note in record.notes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ignore": ["*.no_such"]}, "matches no layer"),
        ({"ignore": ["*"]}, "no layer is left"),
        ({"passes": ()}, "no pass given"),
        ({"passes": compress.GPTQ(group_size=16)}, "needs calibration"),
        ({"samples": 4}, "samples, length and bos are of calibration data"),
        ({"passes": compress.RTN(group_size=24)}, "does not divide the 32 inputs.*sizes that work: 16, 32, -1"),
        ({"passes": (compress.RTN(group_size=16), compress.RTN(group_size=16))}, "has quantized before it"),
        ({"passes": compress.only(compress.RTN(), "nothing")}, "matches no layer"),
        ({"passes": compress.only(compress.RTN(), "*.mlp.*", "lm_head")}, "'lm_head' of `only` .* matches no layer"),
        ({"passes": compress.but(compress.RTN(), "*.up_proj", "*.mlp")}, r"'\*\.mlp' of `but` .* matches no layer"),
        ({"passes": (compress.RTN(), compress.but(compress.Embeddings(), "*.mlp.*"))}, "of `but` .* matches no layer"),
        ({"passes": (compress.Embeddings(), compress.only(compress.RTN(), "nothing"))}, "a layer is called .*q_proj"),
        ({"passes": compress.GPTQ(group_size=16), "calibration": "demo"}, "has no tokenizer"),
        ({"passes": compress.GPTQ(group_size=16), "calibration": tokens() + 90}, "vocabulary is 0 to 95"),
        ({"passes": compress.GPTQ(group_size=16), "calibration": []}, "no batch"),
        ({"batch_size": 0}, "batch size 0"),
        ({"resume": True}, "need an output"),
    ],
)
def test_input_that_cannot_work_is_refused_before_a_weight_changes(arguments, message):
    model = build("llama")
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(InputError, match=message):
        compress.quantize(model, **{"passes": compress.RTN(group_size=16), **arguments})
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_damaged_weight_and_an_overflowing_activation_are_named():
    model = build("llama")
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
    with pytest.raises(CompressError, match=r"layers\.1\.mlp\.up_proj\.weight has non-finite weights"):
        compress.quantize(model, compress.RTN(group_size=16))
    model = build("llama")
    model.model.layers[0].input_layernorm.weight.data.fill_(3e38)  # finite; not so what it multiplies
    with pytest.raises(CompressError, match=r"layers\.0\.self_attn\.q_proj has non-finite values"):
        compress.quantize(model, compress.GPTQ(group_size=16), calibration=tokens())


def test_a_pass_that_forgets_to_round_inputs_is_named():
    class Forgets(compress.RTN):
        def apply(self, site):
            return {name: replace(decision, inputs=None) for name, decision in super().apply(site).items()}

    with pytest.raises(CompressError, match=r"rtn has options that round inputs, and decides about .*q_proj without"):
        compress.quantize(build("llama"), Forgets(scheme="w8a8"))
    compress.quantize(build("llama"), Forgets(group_size=16))  # asked for weights alone


def test_a_layer_without_calibration_is_left_alone_and_named():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.twice, self.never = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.used(self.twice(self.twice(x)))

    model = Odd()
    result = compress.quantize(model, compress.GPTQ(group_size=-1), calibration=[{"x": torch.randn(32, 8)}])
    assert [r.name for r in result.record.layers] == ["used", "twice"]
    assert result.record.left_alone["never"] == "never called during calibration"


def test_a_run_in_which_a_pass_compresses_nothing_is_an_error_and_leaves_nothing(tmp_path):
    class Uncalled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.called, self.read = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            return nn.functional.linear(self.called(x), self.read.weight)

    passes = (compress.only(compress.GPTQ(group_size=16), "read"), compress.only(compress.RTN(group_size=16), "called"))
    cases = {passes[:1]: r"like read, 1 never called during calibration$", passes: "^gptq compressed nothing"}
    for given, says in cases.items():
        model = Uncalled()
        before = model.called.weight.clone()
        with pytest.raises(CompressError, match=says) as failed:
            compress.quantize(model, given, calibration=[{"x": torch.randn(8, 16)}], output=tmp_path / "out")
        assert not isinstance(failed.value, InputError)
        assert list(tmp_path.iterdir()) == []
        assert torch.equal(model.called.weight, before)


def test_reasons_name_what_torchs_own_modules_are():
    class Torchs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.linear = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 16)
            self.up, self.both = nn.ConvTranspose1d(4, 4, 2), nn.Bilinear(4, 4, 4)
            self.experts = nn.Module()
            self.experts.gate = nn.Parameter(torch.randn(4, 16, 16))

        def forward(self, x):
            return self.linear(self.attention(x, x, x)[0])

    reasons = {
        "attention.in_proj_weight": f"MultiheadAttention: {ADVICE}",
        "attention.out_proj": f"its MultiheadAttention never calls the layer: {ADVICE}",
        "up.weight": "ConvTranspose1d: not a linear layer",
        "both.weight": "Bilinear: not a linear layer",
        "experts.gate": UNASKED_EXPERTS,
    }
    batch = [{"x": torch.randn(2, 32, 16)}]
    result = compress.quantize(Torchs(), compress.GPTQ(group_size=16), calibration=batch)
    assert result.record.left_alone == reasons
    # Its input cannot be rounded, either; its weight can.
    assert compress.quantize(Torchs(), compress.RTN(scheme="w8a8")).record.left_alone == reasons
    result = compress.quantize(Torchs(), compress.RTN(group_size=16))
    assert [r.name for r in result.record.layers] == ["attention.out_proj", "linear"]


def test_float64_models_are_compressed_as_those_of_float32():
    for p in (compress.GPTQ(group_size=16), compress.AWQ(group_size=16)):
        one, other = build("llama"), build("llama").double()
        for model in (one, other):
            compress.quantize(model, p, calibration=tokens())
        assert all(parameter.dtype == torch.float64 for parameter in other.parameters())
        # A few codes fall on the other side; the blocks' outputs and so most weights agree.
        changes = [
            (a.double() - b).norm() / b.norm() for a, b in zip(one.parameters(), other.parameters(), strict=True)
        ]
        assert max(changes) < 0.05, p.name


def test_the_training_mode_of_a_model_in_memory_is_kept():
    model = build("llama").train()
    compress.quantize(model, compress.RTN(group_size=16))
    assert model.training


def test_an_encoder_decoder_runs_as_one_block_for_what_looks_at_all_of_it_and_says_so():
    labelled = [{**batch, "labels": batch["input_ids"]} for batch in batches("t5")]
    result = compress.quantize(build("t5"), compress.Taylor(), calibration=labelled)
    assert any("several stacks" in note for note in result.record.notes)
    ids = tokens()
    mask = torch.ones_like(ids)
    mask[:, 8:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids}
    with pytest.raises(InputError, match="samples of one length"):
        compress.quantize(build("t5"), GPTQ, calibration=[batch])


def test_a_layer_that_is_called_several_times_is_decided_by_all_its_calls():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.twice = nn.Linear(16, 16)

        def forward(self, x):
            return self.twice(self.twice(x).tanh())

    torch.manual_seed(0)
    model, x = Twice(), torch.randn(40, 16)
    lone = nn.Sequential(copy.deepcopy(model.twice))
    with torch.no_grad():
        both = torch.cat([x, model.twice(x).tanh()])
    method = compress.GPTQ(group_size=-1, **PLAIN_GPTQ)
    found = compress.quantize(model, method, calibration=[{"x": x}]).record.layers
    compress.quantize(lone, method, calibration=[{"input": both}])
    assert found[0].figures["tokens"] == 80
    torch.testing.assert_close(model.twice.weight, lone[0].weight, rtol=0, atol=1e-6)


def albert():
    config = transformers.AlbertConfig(
        vocab_size=96,
        embedding_size=16,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_hidden_layers=3,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    model = transformers.AlbertModel(config).eval()
    for p in model.parameters():
        p.data.mul_(8 if p.ndim > 1 else 1)
    return model


@pytest.mark.first
@pytest.mark.parametrize("method", [GPTQ, compress.SmoothQuant(activations="static")], ids=["gptq", "smoothquant"])
def test_layers_that_share_one_block_are_compressed_and_run(method, tmp_path):
    source = save(albert(), tmp_path / "in")
    found = compress.quantize(source, method, calibration=tokens(24), output=tmp_path / "out", verify=False)
    assert len(found.record.layers) == 8
    assert set(found.record.left_alone.values()) == {"embedding"}
    decided = compress.quantize(albert(), method, calibration=tokens(24)).model
    plain = compress.quantize(albert(), compress.RTN(group_size=16)).model
    with torch.no_grad():
        expected, own, kept, rounded = (
            each(tokens(4, 16, 9))[0] for each in (albert(), compress.load(tmp_path / "out"), decided, plain)
        )
    assert float((own - kept).abs().max()) < 0.05 * float(
        kept.std()
    )  # a rounded input may take the other code of a tie
    assert float((own - expected).norm()) < 0.7 * float((rounded - expected).norm())


def test_what_no_pass_asks_for_is_named_so():
    result = compress.quantize(build("llama"), compress.only(compress.RTN(group_size=16), "*.mlp.*"))
    assert result.record.left_alone["model.layers.0.self_attn.q_proj"] == "no pass asks for it"
    assert result.record.left_alone["lm_head"] == "output head"


def test_layers_that_share_one_weight_are_left_alone():
    model = build("llama")
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    before = model.model.layers[0].mlp.up_proj.weight.clone()
    result = compress.quantize(model, compress.RTN(group_size=16))
    for layer in (0, 1):
        reason = result.record.left_alone[f"model.layers.{layer}.mlp.up_proj"]
        assert reason == "shares its weight with another module"
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight, before)


def test_drift_counts_as_none_where_the_streams_route_tokens_differently():
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.expert = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            x = self.first(x)
            chosen = x[..., 0] > x[..., 0].median()
            near = (x[..., 0] > x[..., 0].quantile(0.4)) & (x[..., 1] > 0)
            x[chosen | near] = self.expert(x[chosen | near])
            return x

    torch.manual_seed(1)
    batch = [{"x": torch.randn(1, 64, 16)}]
    models = [Routed() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    records = [
        compress.quantize(model, fast_gptq(scheme="w2a16", group_size=16, drift=drift), calibration=batch).record
        for model, drift in zip(models, (1.0, 0.0), strict=True)
    ]
    assert [ELSEWHERE in record.notes for record in records] == [True, False]
    assert torch.equal(models[0].expert.weight, models[1].expert.weight)


def test_what_is_not_compressed_is_not_rounded_by_the_compute_dtype():
    model = build("llama")
    torch.manual_seed(3)
    for p in model.parameters():
        p.data += 1e-4 * torch.randn_like(p)
    before = {n: p.clone() for n, p in model.named_parameters() if "norm" in n}
    compress.quantize(model, compress.RTN(group_size=16), dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name in before:
            assert torch.equal(parameter, before[name]), name


def test_layers_that_saw_few_tokens_are_counted():
    def layer(**figures):
        return LayerRecord("a", "gptq", "w4a16", "symmetric", None, (8, 32), figures)

    assert remark_on_few_tokens([layer(), layer(tokens=32), layer(tokens=900)]) is None
    remark = remark_on_few_tokens([layer(), layer(tokens=31), layer(tokens=900), layer(tokens=4)])
    assert remark.startswith("2 of 3 layers saw fewer calibration tokens than they have inputs (at worst 4 for 32)")


def test_layers_that_get_less_than_asked_for_are_counted():
    def layers(*solutions):
        return [LayerRecord("a", "gptq", "w4a16", "symmetric", None, (8, 32), {"solution": s}) for s in solutions]

    plain = LayerRecord("a", "rtn", "w4a16", "symmetric", None, (8, 32), {})
    assert remark_on_less([plain, *layers("gptq", "gptq")]) is None
    remark = remark_on_less([plain, *layers("gptq", "rounding", "gptq without drift", "rounding")])
    assert remark.startswith("3 of 4 layers were solved by less than gptq")
    assert "(1 by gptq without drift, 2 by rounding)" in remark


def test_gptq_on_one_row_is_no_worse_than_rounding_and_its_additions_than_none():
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 256, "num_hidden_layers": 2}
    config = transformers.OPTConfig(
        **sizes, num_attention_heads=4, max_position_embeddings=128, init_std=0.12, dropout=0.0
    )
    model = transformers.OPTForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(100)
    row, held_out = (torch.randint(0, 256, (n, 64), generator=generator) for n in (1, 32))

    def divergence(p):
        made = copy.deepcopy(model)
        result = compress.quantize(made, p, calibration=row if p.calibrated else None)
        return compress.evaluate(made, reference=model, text=held_out).kl_mean, result.record

    rounded, _ = divergence(compress.RTN(group_size=64))
    bare, _ = divergence(compress.GPTQ(group_size=64, drift=0.0, refit=0, sweeps=0))
    full, record = divergence(compress.GPTQ(group_size=64))
    assert full < bare < rounded
    assert all("solution" in layer.figures for layer in record.layers)
