"""Models with a narrower hidden state: exact where nothing was in what goes, and loaded by transformers."""

import json

import pytest
import torch
import transformers
from blocks import answer
from commands import command, make_llama, save
from models import GATED, build, strong, tokens

import compress
from compress.base.errors import InputError

DEAD = torch.arange(1, 32, 2)  # of 32 channels
LIVE = torch.arange(0, 32, 2)
ON_TOKENS = {"calibration": tokens(16, 16), "verify": False}


def batch():
    return {"input_ids": tokens(3, 12, seed=9)}


def silence(weight, centred=False):
    """Nothing is written to what is to go, and (for a norm that takes the mean away) the others have a mean of zero."""
    weight.data[DEAD] = 0
    if centred:
        weight.data[LIVE] -= weight.data[LIVE].mean(0)


def half_dead_llama():
    model = strong("llama")
    model.lm_head.weight.data *= 3
    silence(model.model.embed_tokens.weight.data.T)
    for block in model.model.layers:
        silence(block.self_attn.o_proj.weight)
        silence(block.mlp.down_proj.weight)
    for norm in (m for m in model.modules() if type(m).__name__ == "LlamaRMSNorm"):
        norm.variance_epsilon = model.config.rms_norm_eps = 1e-12
        norm.weight.data = torch.rand(32) + 0.5
    return model


def half_dead_bert():
    """Two of its four heads say nothing, either: BERT's configuration has no size of heads."""
    model = strong("bert")
    tables = model.embeddings
    for table in (tables.word_embeddings, tables.position_embeddings, tables.token_type_embeddings):
        silence(table.weight.data.T, centred=True)
    for block in model.encoder.layer:
        for layer in (block.attention.output.dense, block.output.dense):
            layer.bias.data = torch.randn(32)
            silence(layer.weight, centred=True)
            silence(layer.bias, centred=True)
        block.attention.self.value.weight.data[:16] = 0
        block.attention.self.value.bias.data[:16] = 0
        block.attention.output.dense.weight.data[:, :16] = 0
    for norm in (m for m in model.modules() if isinstance(m, torch.nn.LayerNorm)):
        norm.bias.data = torch.randn(32)
        silence(norm.weight)
        silence(norm.bias, centred=True)
    return model


@pytest.mark.first
@pytest.mark.parametrize("importance", ["loss", "magnitude"])
@pytest.mark.parametrize("make", [half_dead_llama, half_dead_bert])
def test_channels_in_which_nothing_is_leave_nothing_behind(make, importance):
    """Norms are scaled for fewer channels, measured on data or derived from weights."""
    model, before = make(), answer(make(), batch())
    result = compress.quantize(model, compress.Structure(hidden=0.5, importance=importance), **ON_TOKENS)
    went = result.record.structure["hidden"]
    assert went["removed"] == DEAD.tolist()
    assert list(went["scales"].values()) == pytest.approx([2**0.5] * len(went["scales"]), rel=1e-5)
    after = answer(model, batch())
    wanted = before if before.shape == after.shape else before[..., LIVE]
    torch.testing.assert_close(after, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.first
@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "bert"])
def test_every_tensor_has_the_same_channels_and_transformers_loads_it(kind, tmp_path):
    """A quarter goes; of GPT-2 and BERT a quarter of the heads, too. Qwen's hidden state may have any width."""
    model, before = build(kind), build(kind)
    share = 11 / 32 if kind == "qwen2" else 0.25
    result = compress.quantize(model, compress.Structure(hidden=share), **ON_TOKENS)
    gone = result.record.structure["hidden"]["removed"]
    kept = [i for i in range(32) if i not in gone]
    assert len(kept) == model.config.hidden_size == 32 - len(gone) == {"qwen2": 21}.get(kind, 24)
    embedding, whole = (m.get_input_embeddings().weight for m in (model, before))
    assert torch.equal(embedding, whole[:, kept])
    if kind != "bert":
        head, whole = (m.get_output_embeddings().weight for m in (model, before))
        assert torch.equal(head, whole[:, kept])
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(**batch())[0], model.eval()(**batch())[0])
    assert result.record.structure["after"]["parameters"] == sum(p.numel() for p in again.parameters())


@pytest.mark.full
def test_channels_and_whatever_else_goes_together():
    model = build("mistral")
    how = compress.Structure(hidden=0.5, heads=0.5, channels=0.25, layers=1)
    result = compress.quantize(model, how, **ON_TOKENS)
    config = model.config
    sizes = (config.hidden_size, config.num_attention_heads, config.intermediate_size, config.num_hidden_layers)
    assert sizes == (16, 2, 48, 1)
    assert set(result.record.structure["config"]) >= {"hidden_size", "intermediate_size", "num_hidden_layers"}
    assert torch.isfinite(answer(model, batch())).all()


def test_students_of_the_command(llama, tmp_path):
    """With data (and fewer blocks), and without; what is written is a plain checkpoint."""
    ids = tmp_path / "ids.pt"
    torch.save(torch.randint(2048, (4, 16), generator=torch.Generator().manual_seed(3)), ids)
    teacher = save(make_llama(), tmp_path / "teacher")
    words = ["--student-hidden", 32, "--steps", 1, "--rows", 4, "--train", "held_out=0", "--quiet"]
    for name, more in {
        "by-data": ["--calibration", ids, "--student-layers", 1],
        "by-weights": ["--training", ids],
    }.items():
        done = command("distill", teacher, *words, *more, "--output", tmp_path / name)
        assert done.code == 0, done.err
        student = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert student.model.embed_tokens.weight.shape == (2048, 32)
        assert student.config.num_hidden_layers == (1 if name == "by-data" else 2)
        record = json.loads((tmp_path / name / "compress.json").read_text())
        assert len(record["structure"]["hidden"]["removed"]) == 32


@pytest.mark.parametrize(
    ("kind", "share", "said"),
    [
        ("gemma", 0.25, "no configuration of GemmaForCausalLM .*embed_scale.* leave hidden out"),
        ("bert", 11 / 32, "21 of 32 channels; BertConfig has no size of heads, .* allowed are multiples of 8"),
        ("llama", 11 / 32, "LlamaConfig takes no hidden_size 21: .*not a multiple of the number of attention heads"),
    ],
)
def test_what_no_configuration_says_is_refused_with_nothing_changed(kind, share, said):
    model, before = build(kind), build(kind)
    with pytest.raises(InputError, match=said):
        compress.quantize(model, compress.Structure(hidden=share), **ON_TOKENS)
    for (name, own), other in zip(model.named_parameters(), before.parameters(), strict=True):
        assert torch.equal(own, other), name
    assert model.config.to_dict() == before.config.to_dict()


def test_a_layer_to_be_left_alone_has_these_channels_too():
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**GATED))
    with pytest.raises(InputError, match=r"hidden takes channels of model\.layers\.\S+, too"):
        compress.quantize(model, compress.Structure(hidden=0.5), ignore=["*.0.self_attn.q_proj"], **ON_TOKENS)


def test_a_width_that_goes_with_the_hidden_state_by_another_name_follows_it(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 40, "word_embed_proj_dim": 40, "num_attention_heads": 5, "ffn_dim": 48, "vocab_size": 64}
    config = transformers.OPTConfig(**sizes, num_hidden_layers=2, max_position_embeddings=32)
    model = transformers.OPTForCausalLM(config).eval()
    how = compress.Structure(heads=0.2, hidden=0.2)
    compress.quantize(model, how, calibration=tokens(8, 16) % 64)
    left = model.config
    assert (left.hidden_size, left.word_embed_proj_dim, left.num_attention_heads) == (32, 32, 4)
    model.save_pretrained(tmp_path / "out")
    again = transformers.OPTForCausalLM.from_pretrained(tmp_path / "out")
    ids = tokens(2, 8) % 64
    assert torch.equal(again(ids).logits, model(ids).logits)
