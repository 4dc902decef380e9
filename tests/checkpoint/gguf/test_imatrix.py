"""Importance matrices: what llama-quantize is to read of a layer's inputs, under llama.cpp's names."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from commands import Desk, command, last_line, save
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import compress

TOKENS = torch.randint(2048, (4, 16), generator=torch.Generator().manual_seed(1))


def read(path: Path) -> tuple[gguf.GGUFReader, dict[str, np.ndarray]]:
    reader = gguf.GGUFReader(path)
    return reader, {tensor.name: tensor.data for tensor in reader.tensors}


def test_it_has_the_squares_of_inputs_of_the_original_model(llama: Path, tmp_path: Path) -> None:
    torch.save(TOKENS, tmp_path / "tokens.pt")
    words = ("--method", "rtn", "--calibration", tmp_path / "tokens.pt", "--output", tmp_path / "out")
    done = command("quantize", llama, *words, "--no-verify", "--imatrix", tmp_path / "imatrix.gguf", "--quiet")
    assert done.code == 0, done
    reader, found = read(tmp_path / "imatrix.gguf")
    keys = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert keys == {
        "general.type": "imatrix",
        "imatrix.datasets": ["tokens.pt"],
        "imatrix.chunk_count": 4,
        "imatrix.chunk_size": 16,
    }
    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()
    seen: dict[str, torch.Tensor] = {}
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        module = model.get_submodule(f"model.layers.1.{name}")
        module.register_forward_pre_hook(lambda _, given, name=name: seen.update({name: given[0].detach().double()}))
    model(TOKENS)
    for theirs, ours in (("attn_output", "self_attn.o_proj"), ("ffn_down", "mlp.down_proj")):
        expected = seen[ours].flatten(0, 1).square().sum(0)
        np.testing.assert_allclose(found[f"blk.1.{theirs}.weight.in_sum2"][0], expected.numpy(), rtol=1e-4)
    assert {float(found[name].item()) for name in found if name.endswith(".counts")} == {64.0}
    assert len(found) == 2 * 14
    again = compress.imatrix(llama, tmp_path / "imatrix.gguf", TOKENS[:2])  # replaces one of its kind
    assert (again.layers, again.tokens) == (14, 32)


REFUSED = {
    "no data": ("--method rtn --imatrix i.gguf", "give --calibration"),
    "no folder": ("--calibration demo --imatrix nowhere/i.gguf", "give a file in a directory that exists"),
    "another file": ("--calibration demo --imatrix {model}/config.json", "exists and is no imatrix"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_written_is_one_line(what: str, desk: Desk) -> None:
    words, says = REFUSED[what]
    outcome = command("quantize", desk.model, *words.format(model=desk.model).split(), "--output", desk.output)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1), outcome
    assert says in outcome.err
    assert not list(desk.here.glob("output*"))


def test_a_family_without_names_is_one_line(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=2048, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    model = save(GPT2LMHeadModel(config), tmp_path / "model")
    words = ("--method", "rtn", "--calibration", "demo", "--imatrix", tmp_path / "i.gguf", "--output", tmp_path / "out")
    outcome = command("quantize", model, *words)
    assert outcome.code == 2
    assert "is a GPT2LMHeadModel; an imatrix has llama.cpp's names, known here for Llama" in last_line(outcome)
