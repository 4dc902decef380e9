"""How much of a model is compressed is said before the work and after it, of all its parameters."""

import json

import torch
import transformers
from commands import command, make_llama
from models import GATED, build

from compress.checkpoint.coverage import OTHERS, count, percent


def test_every_parameter_is_compressed_or_counted_by_its_reason():
    sizes = {"a.weight": (60, 120), "a.bias": (6, 12), "b.weight": (30, 120), "c.bank": (4, 8), "d.weight": (0, 0)}
    found = count(sizes, ["a"], {"b": "output head", "c.bank": "fused experts: not a linear layer"})
    assert (found.parameters, found.bytes) == (100, 260)
    assert (found.compressed_parameters, found.compressed_bytes) == (60, 120)
    assert found.rest == {"output head": 30, OTHERS: 6, "fused experts": 4}
    assert str(found) == (
        "60% of the parameters, 46% of the bytes; the rest: 30% output head, 6.0% norms and biases, 4.0% fused experts"
    )
    assert count({}, [], {}).share == 0


def test_a_model_that_stays_mostly_dense_says_so_before_the_work_and_after(tmp_path):
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**GATED, num_local_experts=8, num_experts_per_tok=2)
    cases = {
        "gpt2": (build("gpt2"), 0, "Conv1D of compressed values, stored dense"),
        "mixtral": (transformers.MixtralForCausalLM(config), 2 * (2 * 32 * 32 + 2 * 32 * 16), "fused experts"),
        # Embeddings are left alone unless asked for: no warning, however large they are.
        "llama": (
            make_llama(hidden_size=32, intermediate_size=64),
            2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64),
            None,
        ),
    }
    for name, (model, compressed, why) in cases.items():
        model.save_pretrained(tmp_path / name)
        output = tmp_path / f"{name}-out"
        options = ("--method", "rtn", "--group-size", 16, "--output", output)
        ran = command("quantize", tmp_path / name, *options)
        assert ran.code == 0, ran.err
        found = json.loads((output / "compress.json").read_text())["coverage"]
        assert found["parameters"] == sum(p.numel() for p in model.parameters())
        assert (found["compressed_parameters"], found["compressed_bytes"]) == (compressed, 4 * compressed)
        assert sum(found["rest"].values()) == found["parameters"] - compressed
        assert f"compressed: {percent(compressed / found['parameters'])} of the parameters, " in ran.out
        said = ran.err.find("little of the model will be compressed")
        if why is None:
            assert said == -1
        else:
            assert 0 <= said < ran.err.find("1/2")
            assert next(iter(found["rest"])) == why
            assert why in " ".join(ran.out.split())
