"""`compress export --to sparse24`: layers that are 2:4, written without their zeros, verified, loaded and evaluated."""

import json
from pathlib import Path

import pytest
import torch
from commands import StopAfterOne, command, fast_gptq, last_line, make_llama, save
from halved import TwoOfFour
from models import build
from pruning import Largest
from safetensors.torch import load_file, save_file

import compress
from compress.base.errors import CheckpointError, CompressError, InputError
from compress.checkpoint.files import OWN_WHOLE, RECORD
from compress.checkpoint.read.compressed_layers import stored_in
from compress.checkpoint.read.source import find_source
from compress.inference.check.dense_twin import compare_layers
from compress.inference.layers.linear import PackedSparse24Linear, Sparse24Linear, SumLinear
from compress.passes.protocol.base import only

TOKENS = torch.randint(2048, (6, 16), generator=torch.Generator().manual_seed(1))
LAYERS = 14
# What is run -> the passes, and the layer that computes on what an export makes of it.
RUNS = {
    "numbers": ([TwoOfFour()], Sparse24Linear),
    "4 bits": ([TwoOfFour(), fast_gptq(scheme="w4a16", group_size=32)], PackedSparse24Linear),
    "8 bits, asymmetric": (
        [TwoOfFour(), fast_gptq(scheme="w8a16", group_size=32, grid="asymmetric")],
        PackedSparse24Linear,
    ),
    "static int8 inputs": ([TwoOfFour(), fast_gptq(scheme="w8a8", activations="static")], SumLinear),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_llama().bfloat16(), tmp_path_factory.mktemp("model") / "model")


@pytest.mark.first
@pytest.mark.parametrize("name", RUNS)
def test_the_same_values_in_less_room(name: str, model: Path, tmp_path: Path) -> None:
    passes, kind = RUNS[name]
    out, target = tmp_path / "out", tmp_path / "sparse"
    compress.quantize(model, passes, calibration=TOKENS, output=out, verify=False)
    made = compress.export(out, target, "sparse24")
    assert (made.output, made.layers, made.lost) == (target, LAYERS, ())
    assert json.loads((target / "config.json").read_text())["quantization_config"]["quant_method"] == "compress"
    smaller = sum(tensor.nbytes for tensor in load_file(target / OWN_WHOLE).values())
    assert smaller < sum(tensor.nbytes for tensor in load_file(out / "model.safetensors").values())
    assert made.bytes == (target / OWN_WHOLE).stat().st_size
    assert compress.verify(target)["transformers"] != "compared"
    ours = compress.load(target)
    layers = [module for module in ours.modules() if isinstance(module, kind)]
    assert len(layers) == LAYERS
    theirs = compress.load(out)
    for key, layer in theirs.named_modules():
        if hasattr(layer, "scheme") or type(layer).__name__ == "Linear":
            assert torch.equal(ours.get_submodule(key).weight, layer.weight), key
    with compare_layers(ours) as errors, torch.no_grad():
        ours(TOKENS)
    assert max(errors.values()) <= 1
    saved = {key: value for key, value in ours.state_dict().items() if key in find_source(str(target)).headers}
    stored = load_file(target / OWN_WHOLE)
    assert saved.keys() >= {key for key in stored if "proj" in key}
    assert all(torch.equal(saved[key], stored[key]) for key in saved)
    assert compress.evaluate(target, text=TOKENS).perplexity == pytest.approx(
        compress.evaluate(out, text=TOKENS).perplexity, rel=1e-2
    )


def test_what_is_not_2_4_stays_as_it_is_and_is_named(model: Path, tmp_path: Path) -> None:
    out, target = tmp_path / "out", tmp_path / "sparse"
    passes = [only(TwoOfFour(), "*.mlp.*"), compress.RTN(scheme="w4a16", group_size=32)]
    compress.quantize(model, passes, output=out, verify=False)
    outcome = command("export", out, "--to", "sparse24", "--output", target, "--json", "-")
    made = json.loads(outcome.out)
    # The embedding and the head are most of this model: the export is whole, and says that it saves little.
    saved = 1 - made["bytes"] / made["bytes_before"]
    assert 0 < saved < 0.05
    assert outcome.code == 1
    assert f"{target} saves {saved:.1%} of the model's bytes, less than 5%: 6 layers are 2:4" in outcome.err
    assert (made["layers"], len(made["lost"])) == (6, 8)
    line = next(line for line in made["lost"] if line.startswith("model.layers.0.self_attn.q_proj"))
    assert "stays as it is stored: not 2:4: row 0 keeps" in line
    assert set(made["lost"]) <= set(json.loads((target / RECORD).read_text())["notes"])
    kinds = {name: layer.scheme.terms[0].kind for name, layer in stored_in(find_source(str(target))).layers.items()}
    assert {kind for name, kind in kinds.items() if "mlp" in name} == {"pack-sparse-24"}
    assert {kind for name, kind in kinds.items() if "attn" in name} == {"pack-quantized"}
    compress.verify(target)
    shown = command("inspect", target, "--kernels")
    assert shown.code == 0, shown.err
    again = command("export", target, "--to", "sparse24", "--output", tmp_path / "again")
    assert again.code == 2
    assert "no layer that is stored smaller as 2:4, like" in last_line(again)
    dense = compress.export(target, tmp_path / "dense")
    assert dense.layers == LAYERS
    assert compress.verify(tmp_path / "dense")["transformers"] == "compared"


def test_4_bits_in_groups_of_128_take_at_most_3_3_bits(tmp_path: Path) -> None:
    model = save(make_llama(hidden_size=128, intermediate_size=256).bfloat16(), tmp_path / "model")
    out, target = tmp_path / "out", tmp_path / "sparse"
    compress.quantize(model, [TwoOfFour(), compress.RTN(scheme="w4a16", group_size=128)], output=out, verify=False)
    compress.export(out, target, "sparse24")
    source = find_source(str(target))
    layers = stored_in(source).layers.values()
    held = sum(part.nbytes for layer in layers for part in layer.read(source).values())
    assert 3.125 <= 8 * held / sum(layer.shape[0] * layer.shape[1] for layer in layers) <= 3.3


@pytest.mark.parametrize("passes", [[Largest()], [TwoOfFour(), compress.RTN(scheme="fp8")]], ids=["half", "float8"])
def test_there_is_nothing_to_store(passes: list, model: Path, tmp_path: Path) -> None:
    compress.quantize(model, passes, output=tmp_path / "out", verify=False)
    outcome = command("export", tmp_path / "out", "--to", "sparse24", "--output", tmp_path / "sparse")
    assert outcome.code == 2
    says = "not 2:4: row" if len(passes) == 1 else "2:4 codes are signed integers"
    assert f"no layer that is stored smaller as 2:4, like model.layers.0.self_attn.q_proj: {says}" in last_line(outcome)
    assert not (tmp_path / "sparse").exists()


def test_a_damaged_checkpoint_names_the_part(model: Path, tmp_path: Path) -> None:
    compress.quantize(model, TwoOfFour(), output=tmp_path / "out", verify=False)
    compress.export(tmp_path / "out", tmp_path / "sparse", "sparse24")
    path = tmp_path / "sparse" / OWN_WHOLE
    held = load_file(path)
    held["model.layers.0.mlp.up_proj.position"][3, 1] = 0
    save_file(held, path)
    for read in (compress.load, compress.verify):
        with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.up_proj\.position"):
            read(tmp_path / "sparse")
    with pytest.raises(CheckpointError, match=r"holds .0, 0. for inputs 32 to 35 of row 3"):
        compress.load(tmp_path / "sparse", dequantize=True)


def test_a_model_without_a_record_is_refused(model: Path, tmp_path: Path) -> None:
    outcome = command("export", model, "--to", "sparse24", "--output", tmp_path / "sparse")
    assert outcome.code == 2
    assert "holds no compress.json, which names the layers that are pruned" in last_line(outcome)


@pytest.mark.first
@pytest.mark.parametrize("name", ["numbers", "static int8 inputs"])
def test_a_run_writes_what_an_export_of_its_output_would(name: str, model: Path, tmp_path: Path) -> None:
    passes, _ = RUNS[name]
    out, store = tmp_path / "out", {"calibration": TOKENS, "store": "2:4"}
    compress.quantize(model, passes, calibration=TOKENS, output=out, verify=False)
    compress.export(out, tmp_path / "exported", "sparse24")
    with pytest.raises(KeyboardInterrupt):
        compress.quantize(model, passes, output=tmp_path / "stored", reporter=StopAfterOne(), **store)
    made = compress.quantize(model, passes, output=tmp_path / "stored", resume=True, verify=False, **store)
    compress.verify(tmp_path / "stored")
    assert not any("stored dense" in note for note in made.record.notes)
    for each in ("stored", "exported"):  # for who asks transformers alone
        assert "compress.register()" in (tmp_path / each / "README.md").read_text(encoding="utf-8")
    files = [tmp_path / each / OWN_WHOLE for each in ("stored", "exported")]
    one, other = (load_file(file) for file in files)
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[key]) for key, tensor in one.items())


def test_a_pass_says_which_layers_are_stored_so(model: Path, tmp_path: Path) -> None:
    pruning = compress.Magnitude(pattern="2:4", store="2:4")
    passes = [only(pruning, "*.mlp.*"), compress.RTN(scheme="w4a16", group_size=32)]
    made = compress.quantize(model, passes, output=tmp_path / "some", verify=False)
    assert not any("stored dense" in note for note in made.record.notes)
    compress.verify(tmp_path / "some")
    stored = stored_in(find_source(str(tmp_path / "some"))).layers
    kinds = {name: layer.scheme.terms[0].kind for name, layer in stored.items()}
    assert {name for name, kind in kinds.items() if kind == "pack-sparse-24"} == {n for n in kinds if ".mlp." in n}
    compress.quantize(model, pruning, output=tmp_path / "all", verify=False)
    plain = compress.Magnitude(pattern="2:4")
    compress.quantize(model, plain, output=tmp_path / "other", store="2:4", verify=False)
    one, other = (load_file(tmp_path / each / OWN_WHOLE) for each in ("all", "other"))
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[key]) for key, tensor in one.items())


def test_a_pass_stores_so_what_it_prunes_so(tmp_path: Path) -> None:
    for options, says in (
        ({"store": "2 of 4", "pattern": "2:4"}, "store '2 of 4'; allowed: 2:4, or nothing"),
        ({"store": "2:4"}, "store 2:4 is of layers that are pruned so; give pattern 2:4"),
        ({"store": "2:4", "pattern": "4:8"}, "give pattern 2:4"),
    ):
        with pytest.raises(InputError, match=says):
            compress.Magnitude(**options)
    pruned = compress.Magnitude(pattern="2:4", store="2:4")
    compress.quantize(build("gpt2"), pruned, output=tmp_path / "out", verify=False)


def test_a_run_stops_at_the_first_layer_that_is_not_2_4(model: Path, tmp_path: Path) -> None:
    says = r"model\.layers\.0\.\S+ cannot be stored as 2:4: not 2:4: row 0 keeps . of columns"
    with pytest.raises(CompressError, match=says):
        compress.quantize(model, Largest(), output=tmp_path / "out", store="2:4")
    assert not list(tmp_path.iterdir())
