"""Checkpoints of DeepSeek-V3's layout: float8 in blocks, shared experts, a head that predicts a second token."""

import json

import pytest
import torch
import transformers
from mixtures import LATENT, SIZES, MadeDense, to_float8, tokens
from safetensors.torch import load_file

import compress
from compress.checkpoint.read.source import find_source
from compress.inference.load import dense_model
from compress.inference.load.dense_model import load_as_original

WIDE = {"hidden_size": 136, "intermediate_size": 160, "moe_intermediate_size": 144}  # 128 divides none of them
EXPERTS = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_shared_experts": 1}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """(Folder, values of its second head's matrices)."""
    folder = tmp_path_factory.mktemp("deepseek") / "model"
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(**{**SIZES, **LATENT, **WIDE, **EXPERTS}, num_nextn_predict_layers=1)
    transformers.DeepseekV3ForCausalLM(config).bfloat16().save_pretrained(folder)
    dense = load_file(folder / "model.safetensors")
    dense |= {name.replace(".1.", ".2.", 1): t.clone() for name, t in dense.items() if ".layers.1." in name}
    dense["model.layers.2.eh_proj.weight"] = torch.randn(136, 272).bfloat16()
    values = to_float8(folder, dense)
    return folder, {name: value for name, value in values.items() if ".layers.2." in name}


def test_its_layers_are_quantized_and_its_second_head_is_kept(checkpoint, tmp_path):
    folder, head = checkpoint
    result = compress.quantize(folder, compress.RTN(scheme="w4a16", group_size=-1), output=tmp_path / "out")
    assert len(result.record.layers) == 28
    assert result.verification["layers"] == 28
    assert any("kept dense: multi-token-prediction head" in note for note in result.record.notes)
    written = load_file(tmp_path / "out" / "model.safetensors")
    given = {name for name in load_file(folder / "model.safetensors") if ".layers.2." in name}
    assert {name for name in given if not name.endswith("_scale_inv")} <= written.keys()
    assert len(head) == 20
    for name, value in head.items():
        assert torch.equal(written[name], value), name
    figures = compress.evaluate(tmp_path / "out", text=tokens(8), reference=folder)
    assert figures.perplexity > 0


@pytest.mark.parametrize("method", [compress.GPTQ, compress.AWQ])
def test_a_run_makes_the_weights_of_one_layer_dense_at_a_time(checkpoint, method, tmp_path, monkeypatch):
    folder, _ = checkpoint
    load_as_original(find_source(str(folder)), []).save_pretrained(tmp_path / "dense")
    how = {"calibration": tokens(4), "verify": False}
    compress.quantize(tmp_path / "dense", method(group_size=-1), output=tmp_path / "one", **how)
    monkeypatch.setattr(dense_model, "_values", made := MadeDense())
    compress.quantize(folder, method(group_size=-1), output=tmp_path / "other", **how)
    assert 1 <= made.most <= 2  # what has been copied, and the next
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "other"))
    assert one.keys() == {name for name in other if ".layers.2." not in name}
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_it_runs_on_its_codes(checkpoint):
    folder, _ = checkpoint
    with torch.no_grad():
        logits = compress.load(folder)(tokens(2)).logits
    assert logits.isfinite().all()


def test_a_type_that_transformers_does_not_know_is_read_as_its_architecture(checkpoint, tmp_path):
    """Kimi-K2's, which names code of its own."""
    folder, _ = checkpoint
    said = json.loads((folder / "config.json").read_text())
    said |= {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with torch.no_grad():
        assert torch.equal(compress.load(tmp_path)(tokens(2)).logits, compress.load(folder)(tokens(2)).logits)
