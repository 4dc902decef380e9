"""Quantized token embeddings and output heads: tied or not, scaled or not, in memory, on disk, as loaded, as run."""

import copy
import itertools
import json
import pickle
from dataclasses import replace

import pytest
import torch
import transformers
from commands import DRIFT_GPTQ, PLAIN_GPTQ, Largest, StopAfterOne, command
from models import build, tokens
from packaging.version import Version
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AlbertConfig, AlbertModel, AutoModel, AutoModelForCausalLM, BertConfig, BertForMaskedLM

import compress
from compress.base.errors import CheckpointError, InputError
from compress.checkpoint.read.source import find_source
from compress.evaluation.cost.routes import kernel_rows
from compress.evaluation.cost.size import inspect_checkpoint, measure_size
from compress.inference.layers.compressed_layers import compressed_layers
from compress.inference.layers.embedding import QuantEmbedding, TiedLinear, take_over
from compress.jobs.verify import outputs, probe
from compress.passes.protocol.recipe import describe, make_pass, parse_recipe
from compress.weights.grid import Grid, quantize

GPTQ = compress.GPTQ(group_size=16, **DRIFT_GPTQ)
PACKED = {"scheme": "w4a16", "group_size": 16}


def maker(kind):
    if kind != "masked":
        return build(kind)
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = BertForMaskedLM(BertConfig(**sizes, intermediate_size=64, max_position_embeddings=64)).eval()
    torch.nn.init.normal_(model.cls.predictions.bias)
    return model


def run(kind, out, *passes, **more):
    """(the model in memory, the result) of a run that writes `out`."""
    model = maker(kind)
    calibration = tokens() if any(p.calibrated for p in passes) else None
    return model, compress.quantize(model, passes, calibration=calibration, output=out, verify=False, **more)


def stored(out):
    return {name: tensor for path in sorted(out.glob("*.safetensors")) for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("options", [{}, PACKED, {"grid": "asymmetric", "group_size": 16}], ids=str)
@pytest.mark.parametrize("kind", ["llama", "gemma", "gpt2", "bert", "masked", "t5"])
def test_memory_checkpoint_and_everything_that_loads_it_agree(kind, options, tmp_path):
    """Packed tables before GPTQ in the blocks, the others alone; T5 is calibrated on pairs, and alone."""
    first = (GPTQ,) if options == PACKED and kind != "t5" else ()
    model, result = run(kind, tmp_path / "out", *first, compress.Embeddings(**options))
    expected = outputs(model, probe(96))
    dense, low = compress.load(tmp_path / "out", dequantize=True), compress.load(tmp_path / "out")
    assert torch.equal(outputs(dense, probe(96)), expected)
    torch.testing.assert_close(outputs(low, probe(96)), expected, rtol=1e-4, atol=1e-5)
    found = compress.verify(tmp_path / "out")
    if kind == "gpt2" and first:  # codes of a Conv1D
        assert "cannot load a Conv1D" in found["transformers"]
    elif options == PACKED and Version(transformers.__version__) < Version("5.23"):
        assert "initialization reads weights" in found["transformers"]
    else:
        assert (found["transformers"], found["logits_max_difference"]) == ("compared", 0)
        # Packed codes under an embedding are what transformers loads by its second way only, and it says so.
        assert found["loader"] == ("dequantize=True" if options == PACKED else "default")
        assert any("a packed embedding" in note for note in result.record.notes) == (options == PACKED)
    low.tie_weights()
    again = low.state_dict()  # with a head's bias under both of its names
    low.save_pretrained(tmp_path / "again")
    files, back = stored(tmp_path / "out"), stored(tmp_path / "again")
    assert set(files) == set(back) <= set(again)
    assert all(torch.equal(files[name], back[name]) and torch.equal(files[name], again[name]) for name in files)


@pytest.mark.parametrize("kind", ["gemma", "gpt2", "masked"])
def test_a_tied_head_has_the_codes_of_the_embedding_once(kind, tmp_path):
    model, result = run(kind, tmp_path / "out", compress.Embeddings(**PACKED))
    (record,) = result.record.layers
    head = record.figures["shared_with"]
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert not {record.name, head} & set(result.record.left_alone)
    assert sum("weight_packed" in name for name in stored(tmp_path / "out")) == 1
    low = compress.load(tmp_path / "out")
    embedding, tied = low.get_input_embeddings(), low.get_output_embeddings()
    assert isinstance(embedding, QuantEmbedding)
    assert isinstance(tied, TiedLinear)
    torch.nn.Module.half(low)
    assert tied.words.data_ptr() == embedding.table.words.data_ptr()
    assert tied.scale.data_ptr() == embedding.table.scale.data_ptr()
    assert [name for name, _ in compressed_layers(low)] == [head]


def test_int8_rows_of_a_tied_pair_are_stored_and_counted_once(tmp_path):
    model, _ = run("gemma", tmp_path / "out", compress.Embeddings())
    files = stored(tmp_path / "out")
    assert files["model.embed_tokens.weight"].dtype == torch.int8
    assert "lm_head.weight" not in files
    assert torch.equal(files["lm_head.weight_scale"], files["model.embed_tokens.weight_scale"])
    rows, size = inspect_checkpoint(str(tmp_path / "out"))
    remarks = {row.name: row.remark for row in rows}
    assert remarks["lm_head"] == "shares the codes of model.embed_tokens"
    assert size == measure_size(find_source(str(tmp_path / "out")))
    assert size.compressed_weights == 96 * 32
    assert size.parameters == sum(p.numel() for p in model.parameters())
    assert size.bits_per_weight == pytest.approx(8 + 2 * 32 / 32)  # float32 scales, one per row, twice
    kernels = {row.name: set(row.kernels.values()) for row in kernel_rows(str(tmp_path / "out"), torch.device("cpu"))}
    assert kernels["model.embed_tokens"] == {"rows looked up"}
    assert kernels["lm_head"] != {"rows looked up"}


def test_codes_without_rows_of_another_are_missing_codes(tmp_path):
    run("llama", tmp_path / "out", compress.Embeddings())
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    del tensors["lm_head.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        compress.load(tmp_path / "out")


def test_a_head_of_its_own_can_be_left_alone(tmp_path):
    _, result = run("llama", tmp_path / "out", compress.Embeddings(head=False), GPTQ)
    assert result.record.left_alone["lm_head"] == "output head"
    assert "model.embed_tokens" not in result.record.left_alone
    assert stored(tmp_path / "out")["lm_head.weight"].dtype == torch.float32
    _, result = run("bert", tmp_path / "bert", compress.Embeddings())
    assert result.record.left_alone["embeddings.position_embeddings"] == "embedding"


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_blocks_are_calibrated_on_the_rounded_embedding(kind, tmp_path):
    """Rounding the table first, by hand, and quantizing the blocks then gives the same blocks."""
    plain = compress.GPTQ(group_size=16, **PLAIN_GPTQ)  # with drift the reference is the model before either
    both, one = build(kind), build(kind)
    compress.quantize(both, [plain, compress.Embeddings(**PACKED)], calibration=tokens())
    compress.quantize(one, compress.Embeddings(**PACKED))
    compress.quantize(one, plain, calibration=tokens())
    for name, value in both.state_dict().items():
        assert torch.equal(value, one.state_dict()[name]), name


def test_the_reference_of_drift_is_the_original_embedding(monkeypatch):
    seen = {}
    original = compress.GPTQ.apply

    def apply(self, site):
        seen.setdefault(id(self), site.stats)
        return original(self, site)

    monkeypatch.setattr(compress.GPTQ, "apply", apply)
    crude = compress.Embeddings(scheme="w2a16")
    passes = [replace(GPTQ), replace(GPTQ)]
    compress.quantize(build("llama"), [passes[0], crude], calibration=tokens())
    compress.quantize(rounded := build("llama"), crude)
    compress.quantize(rounded, passes[1], calibration=tokens())
    first, second = (seen[id(p)] for p in passes)
    assert set(first) == set(second)
    flat = [[t for v in s.values() for t in (v if isinstance(v, tuple) else (v,))] for s in (first, second)]
    same = [a is b or (isinstance(a, torch.Tensor) and torch.equal(a, b)) for a, b in zip(*flat, strict=True)]
    assert not all(same)


def test_a_source_that_is_written_keeps_its_embedding_rounded_for_the_blocks(tmp_path):
    build("llama").save_pretrained(tmp_path / "model")
    passes, more = [GPTQ, compress.Embeddings(**PACKED)], {"calibration": tokens(), "verify": False}
    compress.quantize(tmp_path / "model", passes, output=tmp_path / "out", **more)
    compress.quantize(build("llama"), passes, output=tmp_path / "memory", **more)
    one, other = stored(tmp_path / "out"), stored(tmp_path / "memory")
    assert set(one) == set(other)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_stopped_run_resumes(tmp_path):
    passes, more = (GPTQ, compress.Embeddings()), {"output": tmp_path / "out", "verify": False}
    with pytest.raises(KeyboardInterrupt):
        compress.quantize(build("gemma"), passes, calibration=tokens(), reporter=StopAfterOne(), **more)
    again = compress.quantize(build("gemma"), passes, calibration=tokens(), resume=True, **more)
    _, whole = run("gemma", tmp_path / "whole", *passes)
    one, other = stored(tmp_path / "out"), stored(tmp_path / "whole")
    assert set(one) == set(other)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert {r.name for r in again.record.layers} == {r.name for r in whole.record.layers}
    assert again.record.left_alone == whole.record.left_alone


def test_blocks_that_form_no_chain_get_the_same_embedding():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    model = AlbertModel(AlbertConfig(vocab_size=96, embedding_size=16, num_hidden_layers=2, **sizes)).eval()
    table = quantize(model.get_input_embeddings().weight.detach(), compress.Embeddings(**PACKED).weight_grid())
    record = compress.quantize(model, [GPTQ, compress.Embeddings(**PACKED)], calibration=tokens()).record
    assert any("not a simple chain" in note for note in record.notes)
    assert torch.equal(model.get_input_embeddings().weight, table.dequantize())
    assert [r.name for r in record.layers].count("embeddings.word_embeddings") == 1
    assert "embeddings.word_embeddings" not in record.left_alone


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("options", [{}, PACKED], ids=str)
def test_transformers_loads_our_layers_with_the_head_and_without(options, tmp_path):
    model, _ = run("gemma", tmp_path / "out", compress.Embeddings(**options))
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(outputs(whole, probe(96)), outputs(model, probe(96)), rtol=1e-4, atol=1e-5)
    assert isinstance(whole.get_output_embeddings(), TiedLinear)
    base = AutoModel.from_pretrained(tmp_path / "out")
    assert isinstance(base.get_input_embeddings(), QuantEmbedding)
    torch.testing.assert_close(outputs(base, probe(96)), outputs(model.model, probe(96)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("one_block", [False, True])
def test_one_block_holds_the_tables_once(one_block, tmp_path):
    _, result = run("llama", tmp_path / "out", GPTQ, compress.Embeddings(), one_block=one_block)
    assert len(result.record.layers) == 16
    assert compress.verify(tmp_path / "out")["logits_max_difference"] == 0


GRIDS = [
    Grid(bits=bits, symmetric=symmetric, signed_scale=symmetric, granularity=granularity, group_size=size)
    for bits, symmetric, (granularity, size) in itertools.product(
        range(2, 9), (True, False), (("channel", None), ("group", 8), ("group", 32))
    )
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grid", GRIDS, ids=lambda g: f"w{g.bits}-{g.symmetric}-{g.group_size}")
def test_rows_are_those_of_the_dequantized_table(grid, dtype):
    table = torch.randn(37, 64, generator=torch.Generator().manual_seed(grid.bits)).to(dtype)
    codes = quantize(table, grid)
    embedding = QuantEmbedding.from_quantized(codes)
    ids = torch.tensor([[0, 36, 5], [5, 5, 17]])
    for chosen in (ids, ids[0].int(), ids[:0], torch.tensor(3)):
        assert torch.equal(embedding(chosen), functional.embedding(chosen, codes.dequantize()))
    assert torch.equal(embedding.weight, codes.dequantize())
    other = QuantEmbedding.from_quantized(quantize(table.flip(0), grid))
    other.load_state_dict(embedding.state_dict())
    assert torch.equal(other(ids), embedding(ids))
    assert torch.equal(copy.deepcopy(embedding)(ids), embedding(ids))
    for wrong in (-1, 37):
        with pytest.raises(IndexError):
            embedding(torch.tensor([wrong]))


def test_a_lookup_makes_no_dense_table():
    codes = quantize(torch.randn(4096, 64), Grid(bits=4))
    embedding = QuantEmbedding.from_quantized(codes)
    with Largest() as seen:
        embedding(torch.arange(8))
    assert seen.elements <= 4096 * 64 // 4


class Scaled(torch.nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * torch.tensor(3.0, dtype=self.weight.dtype)


class Normed(torch.nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) / self.weight.norm()


def test_subclasses_go_on_with_their_rows_or_are_refused():
    codes = quantize(torch.randn(12, 32), Grid(bits=4))
    table = QuantEmbedding.from_quantized(codes).table
    ids = torch.tensor([1, 11])
    scaled = take_over(Scaled(12, 32), table)
    assert isinstance(scaled, Scaled)
    assert torch.equal(scaled(ids), codes.dequantize()[ids] * 3)
    for other in (copy.deepcopy(scaled), pickle.loads(pickle.dumps(scaled))):
        assert type(other) is type(scaled)
        assert torch.equal(other(ids), scaled(ids))
    with pytest.raises(CheckpointError, match="a Normed does something else with its weight"):
        take_over(Normed(12, 32), table)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "w8a8"}, "rounds inputs, and an embedding is given token ids; allowed: w2a16"),
        ({"scheme": "fp8"}, "rounds inputs"),
    ],
)
def test_what_an_embedding_cannot_have_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        compress.Embeddings(**options)


def test_an_embedding_has_no_options_of_inputs():
    for option in ("activations", "activation_grid", "outputs", "per_channel_inputs", "calibrator", "histograms"):
        with pytest.raises(InputError, match=f"unknown option of embeddings '{option}'"):
            make_pass("embeddings", {option: "static"})


def test_plans_that_cannot_work_are_refused():
    tables = compress.Embeddings()
    with pytest.raises(InputError, match="2 passes are about the embeddings"):
        compress.quantize(build("llama"), [tables, compress.only(tables, "lm_head")])
    with pytest.raises(InputError, match="Linear has no token embedding"):
        compress.quantize(torch.nn.Linear(4, 4), tables)
    with pytest.raises(InputError, match=r"is left without a table; the embedding is called 'model\.embed_tokens'"):
        compress.quantize(build("llama"), compress.only(tables, "*.mlp.*"))
    with pytest.raises(InputError, match=r"group size 48 does not divide the 32 inputs of model\.embed_tokens"):
        compress.quantize(build("llama"), compress.Embeddings(group_size=48))


def test_only_but_and_ignore():
    def treated(kind, p, **more):
        record = compress.quantize(build(kind), [compress.RTN(group_size=16), p], **more).record
        return {r.name for r in record.layers if r.method == "embeddings"}, record.left_alone

    both = {"model.embed_tokens", "lm_head"}
    tables = compress.Embeddings()
    assert treated("llama", tables)[0] == both
    assert treated("llama", compress.only(tables, "lm_head"))[0] == {"lm_head"}
    assert treated("llama", compress.but(tables, "lm_head"))[0] == {"model.embed_tokens"}
    assert treated("gemma", compress.only(tables, "*embed_tokens"))[0] == {"model.embed_tokens"}
    names, alone = treated("llama", tables, ignore=["lm_head"])
    assert (names, alone["lm_head"]) == ({"model.embed_tokens"}, "ignored by 'lm_head'")


def test_a_recipe_holds_it():
    passes = (GPTQ, compress.only(compress.Embeddings(scheme="w4a16", head=False), "*embed*"))
    assert parse_recipe(describe(passes), "recipe") == passes
    assert parse_recipe({"passes": [{"embeddings": {"scheme": "w6a16"}}]}, "recipe") == (
        compress.Embeddings(scheme="w6a16"),
    )


def test_the_command_line(llama, token_file, tmp_path):
    words = ("quantize", llama, "--output", tmp_path / "out", "--quiet")
    done = command(*words, "--method", "rtn", "--group-size", 32, "--embeddings", "w8a16")
    assert (done.code, done.err) == (0, "")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    targets = {tuple(g["targets"]): g["format"] for g in config["config_groups"].values()}
    assert targets["lm_head", "model.embed_tokens"] == "int-quantized"
    assert config["ignore"] == []
    done = command("generate", tmp_path / "out", "--prompt", "import", "--tokens", 2, "--device", "cpu")
    assert done.code == 0, done.err
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("passes:\n- rtn: {group_size: 32}\n- embeddings: {scheme: w8a16}\n")
    done = command("quantize", llama, "--output", tmp_path / "recipe", "--recipe", recipe, "--quiet")
    assert done.code == 0, done.err
    one, other = stored(tmp_path / "out"), stored(tmp_path / "recipe")
    assert all(torch.equal(one[name], other[name]) for name in one)
    done = command(*words[:-1], "--overwrite", "--recipe", recipe, "--embeddings", "w8a16")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "drop embeddings" in done.err
    done = command(*words[:-1], "--overwrite", "--method", "rtn", "--embeddings", "w8a8")
    assert (done.code, done.err.count("\n")) == (2, 1)
