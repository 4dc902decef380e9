"""What `--for vllm` leaves, computed as vLLM does once it has made one layer of q, k and v, of gate and up, and of an
expert's two: equal to what `compress.load` computes."""

from pathlib import Path

import mixtures
import pytest
import torch
from combinations import each
from commands import command, fast_gptq, make_llama, save
from models import tokens
from safetensors.torch import load_file, save_file
from stacked import stacked

import compress
from compress.checkpoint.read.compressed_layers import stored_in
from compress.checkpoint.read.fused import fused_groups
from compress.checkpoint.read.pretrained import names_in
from compress.checkpoint.read.source import find_source
from compress.inference.layers.compressed_layers import compressed_layers
from compress.jobs.target_engines import ENGINES
from compress.passes.protocol.base import Pass

SCHEMES = ENGINES["vllm"].schemes
GPTQ = fast_gptq(scheme="nvfp4a16")
# Every other way to NVFP4: by statistics, behind folds and pruning, in two passes, trained, in a rotated basis.
METHODS: dict[str, list[Pass]] = {
    "gptq": [GPTQ],
    "awq": [compress.AWQ(scheme="nvfp4a16")],
    "smoothquant": [compress.SmoothQuant(scheme="nvfp4")],
    "pruned": [compress.Wanda(pattern="2:4"), compress.RTN(scheme="nvfp4a16")],
    "one by gptq": [
        compress.only(GPTQ, "*.q_proj", "*.up_proj"),
        compress.but(compress.RTN(scheme="nvfp4a16"), "*.q_proj", "*.up_proj"),
    ],
    "trained": [compress.RTN(scheme="nvfp4a16"), compress.Train(steps=1, rows=2, held_out=0.0)],
    "rotated": [compress.Rotation(), compress.RTN(scheme="nvfp4a16")],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Llama and a Mixtral, float32, whose fused parts have ranges far apart."""
    folder = tmp_path_factory.mktemp("fused")
    llama = make_llama(hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_key_value_heads=4)
    mixture = mixtures.made("mixtral", hidden_size=128, intermediate_size=128, num_hidden_layers=1)
    with torch.no_grad():
        for model in (llama, mixture):
            model.model.layers[0].self_attn.v_proj.weight.mul_(0.1)
        llama.model.layers[0].mlp.up_proj.weight.mul_(0.1)
        mixture.model.layers[0].mlp.experts.gate_up_proj[:, 128:].mul_(0.1)
    mixture.save_pretrained(folder / "mixture")
    return {"dense": save(llama, folder / "dense"), "mixture": folder / "mixture"}


def check(out: Path, kind: str) -> None:
    loaded = dict(compressed_layers(compress.load(out, torch.float32)))
    source = find_source(str(out))
    groups = fused_groups(stored_in(source).layers)
    assert len(groups) == {"dense": 2, "mixture": 5}[kind]
    for group in groups:
        ours = torch.cat([loaded[names_in(source).in_model(name)].dequantize() for name in group])
        assert torch.equal(stacked(out, group, expert="experts" in group[0]), ours), group


@pytest.mark.parametrize(("scheme", "kind"), [(scheme, kind) for scheme in SCHEMES for kind in ("dense", "mixture")])
def test_what_vllm_multiplies_by_is_what_was_decided(scheme, kind, models, tmp_path):
    calibration = tokens() if scheme == "nvfp4" else None
    out, how = tmp_path / "out", {"calibration": calibration, "verify": False}
    compress.quantize_for("vllm", models[kind], compress.RTN(scheme=scheme), output=out, **how)
    check(out, kind)


@pytest.mark.first
@pytest.mark.parametrize(("method", "kind"), each([*METHODS], ["dense", "mixture"]))
def test_every_way_to_nvfp4_shares_its_global_scale(method, kind, models, tmp_path):
    how = {"calibration": tokens(12), "verify": False}
    compress.quantize_for("vllm", models[kind], METHODS[method], output=tmp_path / "out", **how)
    check(tmp_path / "out", kind)


def test_a_checkpoint_of_several_global_scales_is_named(models, tmp_path):
    """Those of earlier versions: what `compress.load` reads from them is right."""
    out, said = tmp_path / "out", "vLLM computes something else: it takes one weight_global_scale for model.layers.0."
    compress.quantize(models["dense"], compress.RTN(scheme="nvfp4a16"), output=out, verify=False)
    assert "vLLM" not in command("inspect", out).out
    held = load_file(out / "model.safetensors")
    for name in ("self_attn.v_proj", "mlp.up_proj"):
        held[f"model.layers.0.{name}.weight_global_scale"] *= 8
    save_file(held, out / "model.safetensors", {"format": "pt"})
    shown = command("inspect", out).out
    assert f"{said}mlp.gate_proj and up_proj, which differ (2 such groups, by up to 8 times)" in shown
