"""Rotation of a whole model: the function stays, weights look like normal numbers, and what stays out is named."""

import pytest
import torch
import transformers
from blocks import answer, inputs, livelier
from checkpoints import same
from commands import StopAfterOne, command, make_llama, save
from models import build, tokens
from torch import Tensor, nn

import compress
from compress.base.errors import InputError
from compress.model.calls import without_cache
from compress.model.structure.streams import find_streams

BATCH = {"input_ids": tokens(3, 12, seed=9)}
TIGHT = 1e-9  # of the largest logit, in float64
# Kinds of models: what of them is rotated, and the notes about the rest.
HIDDEN = {
    "llama": "5 norms and 16 weights",
    "qwen2": "5 norms and 16 weights",
    "qwen3": "5 norms and 16 weights",
    "mistral": "5 norms and 16 weights",
    "gemma": "5 norms and 16 weights",
    "gpt2": "5 norms and 11 weights",
    "opt": "5 norms and 15 weights",
}
STAYS = {
    "gemma2": "model.layers.0.post_attention_layernorm is a norm that adds to it, with a gain for each channel",
    "t5": "the model returns what encoder.final_layer_norm makes of it",
    "bert": "no hidden state is read by several norms",
}


@pytest.fixture
def exact_norms(monkeypatch):
    """Norms of transformers that compute in the dtype of their input, not in float32."""

    def computing(offset: float):
        def forward(self: nn.Module, x: Tensor) -> Tensor:
            eps = getattr(self, "variance_epsilon", getattr(self, "eps", None))
            weight = self.get_parameter("weight")
            return (offset + weight) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

        return forward

    models = transformers.models
    for norm in (
        models.llama.modeling_llama.LlamaRMSNorm,
        models.qwen2.modeling_qwen2.Qwen2RMSNorm,
        models.qwen3.modeling_qwen3.Qwen3RMSNorm,
        models.mistral.modeling_mistral.MistralRMSNorm,
        models.t5.modeling_t5.T5LayerNorm,
    ):
        monkeypatch.setattr(norm, "forward", computing(0))
    for norm in (models.gemma.modeling_gemma.GemmaRMSNorm, models.gemma2.modeling_gemma2.Gemma2RMSNorm):
        monkeypatch.setattr(norm, "forward", computing(1))


def rotated(model: nn.Module, **options) -> tuple[nn.Module, list[str]]:
    result = compress.quantize(model, compress.Rotation(**options))
    return model, list(result.record.notes)


@pytest.mark.parametrize(("kind", "block"), [*((kind, None) for kind in (*HIDDEN, *STAYS)), ("llama", 8), ("opt", 8)])
def test_the_function_stays(kind, block, exact_norms):
    model, batch = livelier(build(kind)).double(), inputs(kind)
    before, weights = answer(model, batch), {n: p.clone() for n, p in model.named_parameters()}
    _, notes = rotated(model, block=block)
    after = answer(model, batch)
    assert (after - before).abs().max() <= TIGHT * before.abs().max()
    said = "\n".join(notes)
    if kind in HIDDEN:
        assert HIDDEN[kind] in said
        assert "stays as it is" not in said
    else:
        assert f"the hidden state stays as it is: {STAYS[kind]}" in said
    moved = [n for n, p in model.named_parameters() if n in weights and not torch.equal(p, weights[n])]
    values = [n for n in moved if any(each in n for each in ("v_proj", ".v.", "value", "c_attn"))]
    assert values
    assert len(moved) > len(values)


def outlying(model: nn.Module) -> nn.Module:
    """A model with one channel of what norms return fifty times as large, and the weights that read it as much
    smaller."""
    with torch.no_grad():
        for layer in model.model.layers:
            for norm, names in (
                (layer.input_layernorm, ("q_proj", "k_proj", "v_proj")),
                (layer.post_attention_layernorm, ("gate_proj", "up_proj")),
            ):
                norm.weight[5] *= 50
                for name, module in layer.named_modules():
                    if name.endswith(names):
                        module.weight[:, 5] /= 50
            layer.mlp.down_proj.weight[5] *= 50
    return model


def kurtosis(weight: Tensor) -> float:
    x = weight.flatten() - weight.mean()
    return float(x.pow(4).mean() / x.square().mean().square())


def test_outliers_are_spread():
    model = outlying(build("llama"))
    before = kurtosis(model.model.layers[0].mlp.down_proj.weight.detach())
    rotated(model)
    after = kurtosis(model.model.layers[0].mlp.down_proj.weight.detach())
    assert before > 10
    assert after < 4  # 3 for normal numbers


def test_what_is_rounded_afterwards_is_nearer():
    """Rounding to 4 bits of a model with an outlying channel: the logits are off by less behind a rotation."""
    wanted = answer(outlying(build("llama")), BATCH)
    off = {}
    for name, first in (("plain", ()), ("rotated", (compress.Rotation(),))):
        model = outlying(build("llama"))
        compress.quantize(model, (*first, compress.RTN(scheme="w4a4", group_size=-1)), calibration=[BATCH])
        off[name] = float((answer(model, BATCH) - wanted).norm())
    assert off["rotated"] < 0.5 * off["plain"]


def test_end_to_end_with_a_tied_head(tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**make_llama().config.to_dict(), "tie_word_embeddings": True})
    model = livelier(transformers.LlamaForCausalLM(config).eval())
    before = answer(model, BATCH)
    (tmp_path / "recipe.yaml").write_text(
        "passes: [rotate: {seed: 3}, rtn: {scheme: w8a16}, embeddings: {scheme: w8a16}]"
    )
    out = tmp_path / "out"
    given = save(model, tmp_path / "model")
    run = command("quantize", given, "--recipe", tmp_path / "recipe.yaml", "--output", out, "--verify")
    assert run.code == 0, run.err
    size = config.vocab_size * config.hidden_size
    assert "lm_head was tied to the embedding and gets a weight of its own" in run.err
    assert f"{size} parameters more" in run.err
    left = compress.load(out, dequantize=True)
    assert not left.config.tie_word_embeddings
    assert (answer(left, BATCH) - before).abs().max() < 0.05 * before.abs().max()
    plain = compress.quantize(str(given), compress.Rotation(), output=tmp_path / "plain")
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    torch.testing.assert_close(answer(opened, BATCH), before, atol=1e-4, rtol=1e-4)
    kinds = [each["edit"] for each in plain.record.structure["edits"]]
    assert kinds == ["rotate-stream", *["rotate"] * config.num_hidden_layers]


def test_a_head_stays_tied_where_the_gain_is_one_number(tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**make_llama().config.to_dict(), "tie_word_embeddings": True})
    model = transformers.LlamaForCausalLM(config).eval()
    before = answer(model, BATCH)
    compress.quantize(model, compress.Rotation())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    torch.testing.assert_close(answer(model, BATCH), before, atol=1e-5, rtol=1e-4)


def test_seeds_and_parts_that_are_left_out():
    weights = {}
    for name, options in {
        "one": {"seed": 1},
        "again": {"seed": 1},
        "two": {"seed": 2},
        "hidden": {"heads": False},
        "heads": {"hidden": False},
    }.items():
        model, _ = rotated(livelier(build("llama")), **options)
        weights[name] = model.state_dict()
    plain, v = livelier(build("llama")).state_dict(), "model.layers.0.self_attn.v_proj.weight"
    assert torch.equal(weights["one"][v], weights["again"][v])
    assert not torch.equal(weights["one"][v], weights["two"][v])
    assert torch.equal(weights["heads"]["model.embed_tokens.weight"], plain["model.embed_tokens.weight"])
    assert torch.equal(weights["heads"]["model.norm.weight"], plain["model.norm.weight"])
    # Without heads the values are mixed along their inputs only.
    rows = weights["hidden"][v] @ weights["hidden"][v].T
    gained = plain[v] * plain["model.layers.0.input_layernorm.weight"]
    torch.testing.assert_close(rows, gained @ gained.T, atol=1e-5, rtol=1e-4)


def test_a_stopped_run_resumes_to_the_same_files(tmp_path):
    build("gemma").save_pretrained(tmp_path / "model")
    passes = (compress.Rotation(seed=4), compress.RTN(group_size=16))
    common = {"verify": False}
    compress.quantize(tmp_path / "model", passes, output=tmp_path / "whole", **common)
    with pytest.raises(KeyboardInterrupt):
        compress.quantize(tmp_path / "model", passes, output=tmp_path / "out", reporter=StopAfterOne(), **common)
    compress.quantize(tmp_path / "model", passes, output=tmp_path / "out", resume=True, **common)
    same(tmp_path / "whole", tmp_path / "out")


def test_a_plan_says_what_a_head_of_its_own_may_take(tmp_path):
    livelier(build("gemma")).save_pretrained(tmp_path / "tied")
    build("llama").save_pretrained(tmp_path / "apart")
    passes = (compress.Rotation(), compress.RTN(group_size=16))
    told = compress.plan(tmp_path / "tied", passes)
    record = compress.quantize(tmp_path / "tied", passes, output=tmp_path / "out", verify=False).record
    (note,) = [note for note in told.notes if "up to" in note]
    assert f"up to {record.saving.after - told.saving.after} bytes more than told" in note
    assert not told.exact
    assert compress.plan(tmp_path / "apart", passes).exact


def test_a_failure_later_brings_the_model_back():
    torch.manual_seed(0)
    model = livelier(build("gemma"))
    before, tied = {k: v.clone() for k, v in model.state_dict().items()}, model.lm_head.weight
    with pytest.raises(InputError, match="group size 64"):
        compress.quantize(model, (compress.Rotation(), compress.RTN(group_size=64)))
    assert model.lm_head.weight is tied
    assert tied is model.model.embed_tokens.weight
    assert model.config.tie_word_embeddings
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_channels_without_gain_whose_bias_can_go_nowhere():
    model = livelier(build("opt"))
    model.model.decoder.final_layer_norm.weight.data[3] = 0
    _, notes = rotated(model)
    (said,) = [note for note in notes if "stays as it is" in note]
    assert "model.decoder.final_layer_norm has channels of gain 0, whose bias can go nowhere" in said


class ByLargest(nn.Module):
    """A norm that divides by the largest channel, which commutes with no rotation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(32) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / x.abs().amax(-1, keepdim=True)


def test_a_norm_that_mixes_otherwise_is_refused():
    model = livelier(build("llama"))
    model.model.norm = ByLargest()
    with without_cache(model):
        found = find_streams(model, BATCH)
    assert found.found == ()
    assert found.rejected == ("model.norm does not commute with rotations",)


def test_layers_that_share_a_weight():
    model = livelier(build("llama"))
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    _, notes = rotated(model, heads=True)
    assert any("share a weight that would have to turn in several ways" in note for note in notes)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"hidden": False, "heads": False}, "rotate with nothing to rotate; give hidden, heads or online"),
        ({"block": 1}, "rotate: block 1; allowed: 2 or more, or none"),
        ({"seed": -1}, "rotate: seed -1; allowed: 0 to"),
        ({"block": 5}, "rotate: blocks of 5 for 32 channels; blocks that fit: 2, 4, 8, 16, 32"),
        (
            {"hidden": False, "heads": False, "online": True, "block": 6},
            "rotate: blocks of 6 for 32 inputs of model.layers.0.self_attn.q_proj; blocks that fit: 2, 4, 8, 16, 32",
        ),
    ],
)
def test_options_that_cannot_be(options, said):
    with pytest.raises(InputError, match=said):
        compress.quantize(build("llama"), compress.Rotation(**options))


def test_a_model_without_anything_to_rotate():
    with pytest.raises(InputError, match="rotate finds nothing to edit in BertModel"):
        compress.quantize(build("bert"), compress.Rotation(heads=False))
