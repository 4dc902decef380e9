"""Structure removed from whole models: what is left loads as any model of transformers, and is as large as was said."""

import copy
import json
import math

import pytest
import torch
import transformers
import vision
from blocks import answer
from combinations import every
from commands import DRIFT_GPTQ
from models import GATED, SIZES, build, strong, tokens

import compress
from compress.base.errors import InputError
from compress.base.progress import Silent
from compress.checkpoint.read.source import find_source
from compress.evaluation.cost.size import tensor_sizes
from compress.model.edits.configuration_search import facts_of
from compress.passes.protocol.recipe import parse_recipe
from compress.passes.train import Train

EIGHT_HEADS = {**GATED, "hidden_size": 48, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 3}
THREE = {**SIZES, "num_hidden_layers": 3}
MODELS = {
    # A size of heads that is not hidden / heads once heads are gone, and not in the file.
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**EIGHT_HEADS, sliding_window=None)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**EIGHT_HEADS, "head_dim": 6})),
    # Its class of configuration knows no size of heads, which its attention reads nevertheless.
    "qwen2": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**{key: size for key, size in EIGHT_HEADS.items() if key != "head_dim"})
    ),
    "nomic-bert": lambda: transformers.NomicBertModel(
        transformers.NomicBertConfig(
            **{**SIZES, "num_hidden_layers": 3}, intermediate_size=64, max_position_embeddings=64
        )
    ),
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(**THREE, intermediate_size=64, max_position_embeddings=64)
    ),
}
QUARTER = {"heads": 0.25, "channels": 0.25, "layers": 1}
ON_TOKENS = {"calibration": tokens(16, 16), "verify": False}


class Notes(Silent):
    """Remembers what is said before the first step."""

    def __init__(self):
        self.first, self.begun = [], False

    def step(self, done, total, what):
        self.begun = True

    def note(self, message):
        if not self.begun:
            self.first.append(message)


def made(kind, seed=0):
    torch.manual_seed(seed)
    model = MODELS[kind]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.2)
    return model


def batch():
    return {"input_ids": tokens(3, 12, seed=9)}


@pytest.mark.first
@pytest.mark.parametrize("kind", MODELS)
def test_what_is_left_loads_anywhere_and_is_what_was_foreseen(kind, tmp_path):
    """A quarter of the channels and heads, and a block: of BERT, whose configuration has no size of heads, without."""
    model = made(kind).to(torch.bfloat16 if kind == "mistral" else torch.float32)
    before = sum(p.numel() for p in model.parameters())
    model.save_pretrained(tmp_path / "model")
    if kind in ("mistral", "nomic-bert"):  # files that leave the size of a head to transformers
        config = json.loads((tmp_path / "model" / "config.json").read_text())
        size = config.pop("head_dim", None)
        assert size in (None, 8)
        if config["hidden_size"] // config["num_attention_heads"] == 8:
            (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    parts = {key: value for key, value in QUARTER.items() if kind != "bert" or key != "heads"}
    if kind == "bert":
        with pytest.raises(InputError, match=r"heads 0\.25: no configuration of BertForMaskedLM .* or leave heads out"):
            compress.quantize(tmp_path / "model", compress.Structure(**QUARTER), output=tmp_path / "no", **ON_TOKENS)
        assert [p.name for p in tmp_path.iterdir()] == ["model"]
    heard = Notes()
    how = compress.Structure(**parts)
    result = compress.quantize(tmp_path / "model", how, output=tmp_path / "out", reporter=heard, **ON_TOKENS)
    assert compress.verify(tmp_path / "out")["transformers"] == "compared"
    # From its files: .to(bfloat16) rounds the rotary tables, too.
    in_memory = type(model).from_pretrained(tmp_path / "model")
    compress.quantize(in_memory, how, **ON_TOKENS)
    again = type(model).from_pretrained(tmp_path / "out")
    assert torch.equal(answer(again, batch()), answer(in_memory, batch()))
    assert again.dtype == model.dtype

    left = sum(p.numel() for p in again.parameters())
    structure = result.record.structure
    assert structure["before"]["parameters"] == before
    assert structure["after"]["parameters"] == left < before
    assert any(f"{left} of {before} parameters" in note for note in heard.first)
    source = find_source(str(tmp_path / "out"))
    assert sum(each.bytes for each in tensor_sizes(source)) == structure["after"]["bytes"]
    config, heads = again.config, 6 if kind in ("mistral", "llama", "qwen2") else 3
    assert (config.num_hidden_layers, config.intermediate_size) == (2, 48)
    if kind != "bert":
        assert config.num_attention_heads == heads
        assert config.head_dim == {"mistral": 8, "llama": 6, "qwen2": 6, "nomic-bert": 8}[kind]
    record = json.loads((tmp_path / "out" / "compress.json").read_text())
    assert record["structure"]["cut"] == structure["cut"]
    assert [len(cut["removed"]) for cut in structure["cut"] if cut["part"] == "channels"] == [16, 16]
    assert all(cut["figures"]["loss"] < cut["figures"]["zeroed_loss"] for cut in structure["cut"])
    assert structure["config"]["num_hidden_layers"] == [3, 2]


def test_no_more_goes_than_was_asked_for():
    found = compress.quantize(made("mistral"), compress.Structure(heads=0.4, compensate=False), **ON_TOKENS)
    assert "structure: heads 0.4 is less than 2 of 4 groups of heads: removed 1" in found.record.notes


def test_what_the_record_says_went_is_what_went():
    """Without making up for it, the model computes what it did with zeros where those inputs were."""
    model, original = made("mistral"), made("mistral")
    how = compress.Structure(**QUARTER, compensate=False)
    result = compress.quantize(model, how, **ON_TOKENS)
    (dropped,) = result.record.structure["dropped"]
    without = result.record.structure["loss_without"]
    assert dropped == min(without, key=without.get)
    del original.model.layers[int(dropped.split(".")[-1])]
    for index, block in enumerate(original.model.layers):
        block.self_attn.layer_idx = index
    original.config.num_hidden_layers = 2
    for cut in result.record.structure["cut"]:
        (name,) = cut["read_by"]
        weight = original.get_submodule(f"{cut['block']}.{name}").weight.data
        each = weight.shape[1] // cut["of"]
        for group in cut["removed"]:
            weight[:, group * each : (group + 1) * each] = 0
    torch.testing.assert_close(answer(model, batch()), answer(original, batch()), rtol=1e-4, atol=1e-5)


def lacking(kind, *gone):
    """A model without some of its blocks."""
    model = made(kind)
    stack = model.model.layers if kind != "nomic-bert" else model.layers
    for index in sorted(gone, reverse=True):
        del stack[index]
    return model


def loss_between(expected, found):
    """KL of predictions, or the part of the squares that is wrong."""
    with torch.no_grad():
        ours, theirs = (model(tokens(4, 16)) for model in (expected, found))
    if "logits" not in ours:
        ours, theirs = ours[0], theirs[0]
        return float((ours - theirs).square().sum() / ours.square().sum())
    ours, theirs = ours.logits.log_softmax(-1), theirs.logits.log_softmax(-1)
    return float((ours.exp() * (ours - theirs)).sum(-1).mean())


@pytest.mark.parametrize("kind", ["nomic-bert", "llama"])
def test_the_blocks_go_without_which_the_model_loses_least(kind):
    how = compress.Structure(layers=2, compensate=False)
    result = compress.quantize(made(kind), how, calibration=tokens(4, 16), batch_size=4)
    structure, original = result.record.structure, made(kind)
    found = [loss_between(original, lacking(kind, i)) for i in range(3)]
    assert list(structure["loss_without"].values()) == pytest.approx(found, rel=1e-4)
    first = min(range(3), key=found.__getitem__)
    second = min((i for i in range(3) if i != first), key=lambda i: loss_between(original, lacking(kind, first, i)))
    assert [int(name.split(".")[-1]) for name in structure["dropped"]] == sorted([first, second])


@pytest.mark.first
@pytest.mark.parametrize("kind", ["opt", "gpt2", "qwen2"])
def test_what_is_behind_a_block_that_goes_makes_up_for_it(kind, monkeypatch):
    def first(self, gone):
        return {i: float(i) for i in range(len(self.stack.blocks)) if i not in gone}

    monkeypatch.setattr("compress.engine.shrink.block_importance.Without.losses", first)
    seen, original, error = tokens(64, 32), strong(kind), {}
    unseen = {"input_ids": seen[48:]}
    for compensate in (False, True):
        how = compress.Structure(layers=1, compensate=compensate)
        model = compress.quantize(strong(kind), how, calibration=seen[:48]).model
        error[compensate] = float((answer(model, unseen) - answer(original, unseen)).square().sum())
    assert error[True] < 0.75 * error[False]


def test_the_smallest_weights_need_no_calibration():
    model, original = made("mistral"), made("mistral")
    how = compress.Structure(channels=0.25, importance="magnitude", compensate=False)
    result = compress.quantize(model, how)
    for cut in result.record.structure["cut"]:
        mlp = original.get_submodule(cut["block"]).mlp
        size = mlp.gate_proj.weight.square().sum(1) + mlp.up_proj.weight.square().sum(1)
        size += mlp.down_proj.weight.square().sum(0)
        assert sorted(cut["removed"]) == sorted(size.argsort()[:16].tolist())
        kept = [i for i in range(64) if i not in cut["removed"]]
        assert torch.equal(model.get_submodule(cut["block"]).mlp.up_proj.weight, mlp.up_proj.weight[kept])


@pytest.mark.full
def test_a_recipe_goes_on_with_the_smaller_model_and_resumes(tmp_path):
    made("mistral").save_pretrained(tmp_path / "model")
    structure = {"channels": 0.25, "multiple": 16, "layers": 1}
    recipe = {"passes": [{"structure": structure}, {"gptq": {"scheme": "w4a16", "group_size": 16, **DRIFT_GPTQ}}]}
    passes = parse_recipe(recipe, "a test")
    whole = compress.quantize(tmp_path / "model", passes, output=tmp_path / "whole", **ON_TOKENS)
    shapes = {record.name: record.shape for record in whole.record.layers}
    assert shapes["model.layers.1.mlp.down_proj"] == (48, 48)
    assert len(shapes) == 14
    assert compress.verify(tmp_path / "whole")["transformers"] == "compared"
    assert parse_recipe(json.loads((tmp_path / "whole" / "compress.json").read_text())["identity"]["recipe"], "it")

    class StopInTheLoop(Silent):
        """Two walks of three and two blocks remove structure; the first block after them is written."""

        def step(self, done, total, what):
            self.walks = getattr(self, "walks", 0) + (done == total)
            if self.walks >= 2 and done == 1 and what:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress.quantize(tmp_path / "model", passes, output=tmp_path / "out", reporter=StopInTheLoop(), **ON_TOKENS)
    assert (tmp_path / "out.partial").is_dir()
    heard = Notes()
    compress.quantize(tmp_path / "model", passes, output=tmp_path / "out", resume=True, reporter=heard, **ON_TOKENS)
    assert not any("started from the beginning" in note for note in heard.first)
    assert (tmp_path / "whole" / "model.safetensors").read_bytes() == (
        tmp_path / "out" / "model.safetensors"
    ).read_bytes()


def state(model):
    config = model.config.to_dict()
    return {name: value.clone() for name, value in model.state_dict().items()}, facts_of(model), config


@pytest.mark.full
@every("when", ["while it removes", "in the loop after it", "in what is planned after it"])
def test_a_model_in_memory_is_what_it_was_where_a_run_fails(when):
    model = made("bert")
    before = state(model)
    passes = [compress.Structure(channels=0.25, layers=1), compress.RTN(group_size=16)]

    class Stop(Silent):
        def step(self, done, total, what):
            self.steps = [*getattr(self, "steps", []), (done, total)]
            if when == "while it removes" and done == 1 and total == 2:
                raise KeyboardInterrupt
            if when == "in the loop after it" and self.steps.count((1, 2)) == 2 and what:
                raise KeyboardInterrupt

    if when == "in what is planned after it":
        passes[1] = compress.RTN(group_size=7)
    with pytest.raises((KeyboardInterrupt, InputError)):
        compress.quantize(model, passes, reporter=Stop(), **ON_TOKENS)
    now = state(model)
    assert now[0].keys() == before[0].keys()
    assert all(torch.equal(now[0][name], value) for name, value in before[0].items())
    assert now[1:] == before[1:]
    ids = batch()
    assert torch.equal(answer(model, ids), answer(made("bert"), ids))


def test_convolutions_lose_channels_and_make_up_for_them():
    """A model without a configuration: norms and depthwise convolutions go along, patches are what is solved for."""
    torch.manual_seed(0)
    model = vision.Classifier("separable").eval()
    original = copy.deepcopy(model)
    images = [{"x": torch.randn(8, 1, 12, 12, generator=torch.Generator().manual_seed(i))} for i in range(6)]
    size = sum(p.numel() for p in model.parameters())
    result = compress.quantize(model, compress.Structure(channels=0.25), calibration=images)
    cut = result.record.structure["cut"]
    assert result.record.structure["after"]["parameters"] == sum(p.numel() for p in model.parameters()) < size
    assert all(each["figures"]["loss"] <= each["figures"]["zeroed_loss"] for each in cut)
    with torch.no_grad():
        x = images[0]["x"]
        error = (model(x) - original(x)).norm() / original(x).norm()
    assert 0 < error < 0.5


@every(
    ("passes", "said"),
    [
        ([compress.RTN(group_size=16), compress.Structure(channels=0.25)], "put it first"),
        ([compress.Structure(channels=0.25), compress.Structure(layers=1)], "together; give one"),
        ([compress.only(compress.Structure(channels=0.25), "*.0.*")], "leave `only` and `but` out"),
        ([compress.Structure(layers=3)], "has 3 blocks, of which one at least stays"),
        ([compress.Structure(layers=1), compress.RTN(group_size=16), Train(steps=1)], "give the model by name"),
    ],
)
def test_what_cannot_be_removed_so_is_refused(passes, said):
    with pytest.raises(InputError, match=said):
        compress.quantize(made("mistral"), passes, calibration=tokens(8, 16))


PAIRS = [{"input_ids": tokens(2, 8), "decoder_input_ids": tokens(2, 8)}]
IDS = tokens(8, 16)


def wide_llama():
    """8 heads of a hidden size of 64, which 6 do not divide."""
    sizes = {**GATED, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


@every(
    ("make", "parts", "data", "ignore", "said"),
    [
        ("llama", {"channels": 0.25}, IDS, "nothing", "ignore pattern 'nothing' matches no layer"),
        ("llama", {"channels": 0.25}, IDS, "*.0.mlp.up_proj", r"channels 0\.25: no configuration of .* leave channels"),
        ("llama", {"channels": 0.25}, IDS, "*.up_proj", "no channels that can be cut: its layers are to be left alone"),
        ("t5", {"layers": 1}, PAIRS, None, "T5ForConditionalGeneration has several stacks of blocks"),
        (wide_llama, {"heads": 0.25}, IDS, None, "LlamaConfig takes no .*heads 6.* not a multiple .* another share"),
    ],
)
def test_what_no_configuration_can_say_is_refused(make, parts, data, ignore, said):
    model = make() if callable(make) else build(make)
    before = state(model)
    with pytest.raises(InputError, match=said):
        compress.quantize(model, compress.Structure(**parts), calibration=data, ignore=[ignore] if ignore else [])
    assert state(model)[1:] == before[1:]


@pytest.mark.full
def test_an_encoder_and_its_decoder_lose_channels():
    model = build("t5")
    ids = [{"input_ids": tokens(4, 16), "decoder_input_ids": tokens(4, 16, seed=2)}]
    result = compress.quantize(model, compress.Structure(channels=0.25), calibration=ids)
    assert model.config.d_ff == 48
    assert {tuple(cut["cut"]) for cut in result.record.structure["cut"]} == {
        (f"{side}.block.{i}.layer.{layer}.DenseReluDense.wi",)
        for side, layer in (("encoder", 1), ("decoder", 2))
        for i in range(2)
    }
    assert math.isfinite(float(answer(model, ids[0]).sum()))
