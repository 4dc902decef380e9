"""Training inside a run: what comes out is what training saw; it can be stopped; it undoes itself."""

import copy
import json

import pytest
import torch
from checkpoints import same
from combinations import every
from commands import command, fast_gptq
from models import strong, tokens
from torch import nn
from transformers import OPTConfig, OPTForCausalLM

import compress
from compress.base.collectives import Comm
from compress.base.errors import CompressError
from compress.base.progress import Silent
from compress.engine.learn import training
from compress.passes.train import Train

TWO_BITS = fast_gptq(scheme="w2a16", group_size=16)
DATA = {"calibration": tokens(8), "training": tokens(32, seed=4), "batch_size": 4}
SLOW = {"steps": 6, "rows": 16, "learning_rate": 1e-4, "held_out": 0.25}
FEW = {"steps": 6, "rows": 16, "learning_rate": 2e-3, "held_out": 0.25}


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens(4, seed=9)).logits.float()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training")
    strong().save_pretrained(folder / "model")
    strong(dtype=torch.bfloat16).save_pretrained(folder / "narrow")
    return folder


def losses(result) -> list[float]:
    (history,) = result.record.training
    return [line["logits"] for line in history["held_out"]]


SCHEMES = [
    [TWO_BITS, Train(**FEW)],
    [fast_gptq(scheme="w4a16", group_size=16, grid="asymmetric"), Train(**SLOW, task=0.1, features=0.1)],
    # A seed at which no output lies between two codes: floats would choose one of them, integers the other.
    [compress.RTN(scheme="w8a8", activations="static", outputs="static"), Train(**FEW, trains="scales", seed=1)],
    [compress.RTN(scheme="w2a2", group_size=16, activations="static", activation_grid="asymmetric"), Train(**SLOW)],
    [compress.SparseGPT(pattern="2:4"), Train(**FEW), fast_gptq(scheme="w3a16", group_size=16)],
    [fast_gptq(scheme="w3a16", group_size=16, outliers=0.02), Train(**FEW)],
    [compress.Ternary(group_size=16), Train(**FEW, divergence="jensen-shannon", temperature=2.0, checkpointing=True)],
]


@every("passes", SCHEMES)
def test_a_trained_checkpoint_computes_what_training_saw(folder, tmp_path_factory, passes):
    output = tmp_path_factory.mktemp("out") / "out"
    result = compress.quantize(folder / "model", passes, output=output, verify=passes is SCHEMES[0], **DATA)
    if passes[0].rounds_inputs:
        torch.testing.assert_close(logits(compress.load(output)), logits(result.model), rtol=1e-4, atol=1e-4)
    else:
        assert torch.equal(logits(compress.load(output, dequantize=True)), logits(result.model))
    before, after = losses(result)
    assert after < before or before < 1e-3  # nothing is to be gained of 8 bits
    record = json.loads((output / "compress.json").read_text())
    assert {layer["method"] for layer in record["layers"]} == {p.name for p in passes}
    assert record["training"][0]["steps"] == FEW["steps"]


def test_pruned_weights_stay_zero_through_training_and_rounding():
    passes = [compress.SparseGPT(pattern="2:4"), Train(**FEW), fast_gptq(scheme="w4a16", group_size=16)]
    model = compress.quantize(strong(), passes, **DATA).model
    plain = compress.quantize(strong(), passes[:1], **DATA).model
    for name, p in model.named_parameters():
        if "proj" in name:
            assert not p[plain.get_parameter(name) == 0].any()
            assert (p != 0).double().mean() > 0.3


def test_a_model_of_16_bits_is_trained_in_32_and_stays_one_of_16(folder, tmp_path):
    output = tmp_path / "out"
    result = compress.quantize(folder / "narrow", [TWO_BITS, Train(**FEW)], output=output, verify=False, **DATA)
    before, after = losses(result)
    assert after < before or before < 1e-3  # nothing is to be gained of 8 bits
    loaded = compress.load(output, dequantize=True)
    for model in (result.model, loaded):
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.equal(logits(loaded), logits(result.model))


def test_the_command_trains_embeddings_and_caches_too(folder, tmp_path):
    torch.save(tokens(12), tmp_path / "ids.pt")
    words = ["--method", "rtn", "--scheme", "w2a16", "--group-size", 16, "--training", tmp_path / "ids.pt"]
    words += ["--batch-size", 2, "--embeddings", "w4a16", "--kv-cache", "int8:head"]
    few = ["--steps", 2, "--rows", 4, "--learning-rate", 1e-3]
    done = command("qat", folder / "model", *words, *few, "--output", tmp_path / "out", "--json", "-")
    assert done.code == 0, done.err
    found = {layer["name"]: layer["method"] for layer in done.json()["layers"]}
    assert found["model.embed_tokens"] == found["model.layers.0.mlp.up_proj"] == "train"
    written = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert written["kv_cache_scheme"]["num_bits"] == 8
    assert "model.embed_tokens" in json.dumps(written["config_groups"])


def test_products_of_16_bits_train_as_full_ones_do(folder):
    few = {**FEW, "steps": 2}
    full, narrow = (
        losses(compress.quantize(folder / "model", [TWO_BITS, Train(**few, precision=precision)], verify=False, **DATA))
        for precision in ("full", "bfloat16")
    )
    assert narrow[-1] < 0.95 * narrow[0]
    assert narrow != full
    assert narrow == pytest.approx(full, rel=0.05)


@every("options", [{"trains": "layers"}, {"trains": "scales"}, {"scales": "fitted"}])
def test_layers_that_a_step_does_not_want_stay_as_they_are(folder, options):
    few = {**FEW, "steps": 2, "held_out": 0.0, **options}
    start = compress.quantize(folder / "model", [TWO_BITS], **DATA).model.state_dict()
    result = compress.quantize(folder / "model", [TWO_BITS, compress.but(Train(**few), "*.mlp.*")], **DATA)
    moved = {name for name, value in result.model.state_dict().items() if not torch.equal(value, start[name])}
    assert not any(".mlp." in name for name in moved)
    assert any(".self_attn." in name for name in moved)


@pytest.mark.parametrize(("flags", "slow"), [({"avx2", "fma"}, 1), ({"avx2", "avx512bw"}, 0), ({"asimd", "bf16"}, 0)])
def test_products_of_16_bits_are_said_to_be_slow_where_they_are(monkeypatch, flags, slow):
    monkeypatch.setattr(training, "cpu_flags", lambda: frozenset(flags))
    narrow, cpu = Train(precision="bfloat16"), torch.device("cpu")
    assert len(training.slow_products(narrow, cpu)) == slow
    assert not training.slow_products(narrow, torch.device("cuda"))
    assert not training.slow_products(Train(), cpu)


@every("options", [{"minutes": 1.0}, {"steps": 3}, {"minutes": 1.0, "precision": "full"}])
def test_time_is_spent_on_products_of_16_bits_where_these_are_faster(folder, monkeypatch, options):
    monkeypatch.setattr(training, "cpu_flags", lambda: frozenset({"avx2", "avx512_bf16"}))
    found = training.learn_stage(Train(**options), Comm(), torch.device("cpu"))
    assert found.options.precision == ("bfloat16" if options == {"minutes": 1.0} else "full")
    monkeypatch.setattr(training, "cpu_flags", lambda: frozenset({"avx2", "avx512bw"}))
    assert not training.has_fast_bfloat16(torch.device("cpu"))


def test_activations_are_computed_again_without_dropout():
    """Blocks of OPT drop out by their own flag, which is also what makes transformers compute again."""
    sizes = {"vocab_size": 96, "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    original = OPTForCausalLM(OPTConfig(**sizes, word_embed_proj_dim=32, dropout=0.5)).eval()
    told = []
    for again in (False, True):
        model, calls = copy.deepcopy(original), []
        model.model.decoder.layers[0].fc1.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        few = Train(steps=2, rows=32, learning_rate=1e-3, held_out=0.0, task=1.0, checkpointing=again)
        (history,) = compress.quantize(model, [TWO_BITS, few], **{**DATA, "batch_size": 32}).record.training
        told.append(([line["loss"] for line in history["steps"]], len(calls)))
        assert not any(module.training for module in model.modules())
    (plain, few_calls), (again, more_calls) = told
    assert again == pytest.approx(plain, rel=1e-6)
    assert more_calls == few_calls + 2


class StopAfter(Silent):
    """Interrupts a run after a step of training, or after a block that is finished later."""

    def __init__(self, what: str) -> None:
        self.what = what

    def step(self, done: int, total: int, what: str) -> None:
        if what.startswith(self.what):
            self.what = "nothing"
            raise KeyboardInterrupt


@pytest.mark.full
@every("stops", [["step 3"], ["step 5", "after training, model.layers.0"]])
def test_a_run_that_was_stopped_goes_on_and_ends_the_same(folder, tmp_path_factory, stops):
    place = tmp_path_factory.mktemp("out")
    passes = [TWO_BITS, Train(**FEW, save_every=2)]
    common = {"verify": False, **DATA}
    compress.quantize(folder / "model", passes, output=place / "whole", **common)
    for i, stop in enumerate(stops):
        reporter = StopAfter(stop)
        with pytest.raises(KeyboardInterrupt):
            compress.quantize(folder / "model", passes, output=place / "out", resume=i > 0, reporter=reporter, **common)
    assert (place / "out.partial").exists()
    result = compress.quantize(folder / "model", passes, output=place / "out", resume=True, **common)
    same(place / "whole", place / "out")
    assert result.record.training[0]["resumed"] in (2, 4, 6)
    assert not (place / "out.partial").exists()
    texts = [(place / out / "training.jsonl").read_text() for out in ("whole", "out")]
    kept = [[json.loads(line) for line in text.splitlines()] for text in texts]
    for lines in kept:  # what was measured, once, whatever was stopped
        assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
        assert [line["step"] for line in lines if "held_out" in line][:1] == [0]
    assert [line["loss"] for line in kept[0] if "loss" in line] == [line["loss"] for line in kept[1] if "loss" in line]
    outcome = command("inspect", place / "out", "--training", "--json", place / "l.json")
    assert outcome.code == 0, outcome.err
    (curve,) = json.loads((place / "l.json").read_text())["trainings"]
    assert len(curve["steps"]) == 6


def test_what_fails_leaves_the_model_as_it_was():
    model = strong()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CompressError, match=r"the loss of step . is .*; give a lower learning_rate"):
        compress.quantize(model, [TWO_BITS, Train(**{**FEW, "learning_rate": 1e30, "clip_norm": 1e30})], **DATA)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {type(m).__name__ for m in model.modules()} == {type(m).__name__ for m in strong().modules()}
    assert all(p.requires_grad for p in model.parameters())
