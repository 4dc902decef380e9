"""Families with tensors or keys of their own: gguf-py reads what transformers computes with. llama.cpp itself is run by
`recipes/studies/engines/gguf_check.py`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from commands import command, configured, last_line

import compress
from compress.recipes.studies.engines import random_models


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], Path]:
    """Makes a random model of a family, of two layers."""
    monkeypatch.setitem(random_models.SIZES, "num_hidden_layers", 2)
    return lambda family: random_models.made(family, tmp_path / "model")


def exported(model: Path, name: str, *words: str) -> tuple[gguf.GGUFReader, dict[str, torch.Tensor]]:
    """An export by the command line, read: the file, and {tensor: its values}."""
    done = command("export", model, "--to", "gguf", "--output", model.parent / name, *words)
    assert done.code == 0, done.err
    reader = gguf.GGUFReader(model.parent / name / "model.gguf")
    values = {t.name: torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).copy()) for t in reader.tensors}
    return reader, values


def key(reader: gguf.GGUFReader, name: str) -> Any:
    return reader.fields[name].contents()


def test_experts_lie_in_one_tensor_with_their_biases(small: Callable[[str], Path]) -> None:
    model = small("gpt-oss")
    refused = command("export", model, "--to", "gguf", "--output", model.parent / "no")
    assert refused.code == 2
    assert "experts.down_proj holds all experts; quantize them, which takes them apart" in last_line(refused)
    compress.quantize(model, compress.RTN(group_size=32), output=model.parent / "out", verify=False)
    reader, values = exported(model.parent / "out", "there")
    dense = compress.load(model.parent / "out", dequantize=True).state_dict()
    held = {name: dense[f"model.layers.1.mlp.experts.{name}"] for name in ("gate_up_proj", "gate_up_proj_bias")}
    for first, leaf in enumerate(("gate", "up")):
        weight, bias = values[f"blk.1.ffn_{leaf}_exps.weight"], values[f"blk.1.ffn_{leaf}_exps.bias"]
        assert torch.equal(weight.half(), held["gate_up_proj"][..., first::2].transpose(1, 2))
        assert torch.equal(bias.half(), held["gate_up_proj_bias"][:, first::2])
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["blk.0.ffn_gate_exps.weight"] == "Q4_0"
    assert kinds["blk.0.ffn_gate_inp.weight"] == kinds["blk.0.ffn_gate_exps.bias"] == "F32"
    assert torch.equal(values["blk.0.attn_sinks.weight"].half(), dense["model.layers.0.self_attn.sinks"])
    assert (key(reader, "gpt-oss.expert_count"), key(reader, "gpt-oss.rope.scaling.type")) == (4, "yarn")


def test_transposed_weights_are_turned_round_whether_they_are_compressed_or_not(small: Callable[[str], Path]) -> None:
    model = small("gpt2")
    passes = compress.RTN(group_size=32)
    compress.quantize(model, passes, output=model.parent / "out", ignore=["*.c_attn"], verify=False)
    reader, values = exported(model.parent / "out", "there", "--name", "My GPT")
    dense = compress.load(model.parent / "out", dequantize=True).state_dict()
    for name, module in {"attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj", "ffn_down": "mlp.c_proj"}.items():
        assert torch.equal(values[f"blk.0.{name}.weight"].half(), dense[f"transformer.h.0.{module}.weight"].t())
    assert torch.equal(values["position_embd.weight"].half(), dense["transformer.wpe.weight"])
    assert key(reader, "general.name") == "My GPT"
    assert not [name for name in reader.fields if ".rope." in name]


def test_longrope_has_its_factors_and_a_note(small: Callable[[str], Path]) -> None:
    model = small("phi3")
    compress.quantize(model, compress.RTN(group_size=32), output=model.parent / "out", verify=False)
    done = command("export", model.parent / "out", "--to", "gguf", "--output", model.parent / "there")
    assert "rotary factors of long texts once its context (-c) is above 384 tokens" in done.err
    assert f"next: ollama create there -f {model.parent}/there/Modelfile && ollama run there" in done.out
    reader, values = exported(model.parent / "out", "again")
    assert values["rope_factors_long.weight"].tolist() == random_models.LONGROPE["long_factor"]
    assert key(reader, "phi3.rope.dimension_count") == 24
    assert key(reader, "phi3.rope.scaling.attn_factor") == pytest.approx((1 + 0.28768 / 5.95064) ** 0.5, rel=1e-4)


@pytest.mark.parametrize(
    ("family", "change", "says"),
    [
        (
            "qwen3-moe",
            {"norm_topk_prob": False},
            "its norm_topk_prob is False; llama.cpp's qwen3moe computes with True",
        ),
        ("qwen2-moe", {"mlp_only_layers": [1]}, "its mlp_only_layers is [1]"),
        ("olmo2", {"hidden_act": "gelu"}, "its activation is gelu; llama.cpp computes silu for olmo2"),
        ("glm4", {"rope_parameters": random_models.YARN}, "scaled by 'yarn'; written without --template for glm4: def"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_one_line(
    family: str, change: dict[str, Any], says: str, small: Callable[[str], Path]
) -> None:
    configured(**change)((model := small(family)) / "config.json")
    refused = command("export", model, "--to", "gguf", "--output", model.parent / "no")
    assert refused.code == 2
    assert says in last_line(refused)
