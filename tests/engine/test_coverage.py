"""How much of a model is compressed is said before the work and after it, of all its parameters."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from commands import command, make_llama
from models import GATED
from safetensors.torch import load_file

import compress
from compress.checkpoint.write.coverage import OTHERS, count, percent
from compress.engine.plan.plan import plan, planned_coverage
from compress.model.split_experts import split_experts


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


SMALL_RESNET = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], layer_type="basic")
DENSE = "Conv2d of compressed values, stored dense"


def test_a_model_that_stays_mostly_dense_says_so_before_the_work_and_after(tmp_path):
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**GATED, num_local_experts=8, num_experts_per_tok=2)
    cases = {
        "resnet": (transformers.ResNetForImageClassification(SMALL_RESNET), 0, DENSE),
        "mixtral": (transformers.MixtralForCausalLM(config), 2 * (2 * 32 * 32 + 2 * 32 * 16 + 8 * 3 * 32 * 64), None),
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
        words = ("--method", "rtn", "--group-size", 16 if why is None else -1, "--output", output)
        ran = command("quantize", tmp_path / name, *words)
        record = json.loads((output / "compress.json").read_text())
        found, size = record["coverage"], record["bytes"]
        assert ran.code == (0 if why is None else 1), ran.err
        before, after = (
            sum(tensor.nbytes for file in folder.glob("*.safetensors") for tensor in load_file(file).values())
            for folder in (tmp_path / name, output)
        )
        assert size == {"before": before, "after": after}
        codes = 0 if why == DENSE else compressed
        # From 32 bits to 4 and a float32 scale of 16 weights; a layer says its shape in 16 bytes.
        layers = len(record["layers"]) if codes else 0
        assert size["before"] - size["after"] == codes * (32 - 6) // 8 - 16 * layers
        head = ran.out.partition("\n")[0]
        assert head.startswith(f"{tmp_path / name} -> {output}: {before / 2**20:.2f} "), head
        if why is not None:
            end = ran.err.splitlines()[-1]
            assert end.startswith(
                f"compress: {output} saves {1 - after / before:.1%} of the model's bytes, less than 5%"
            )
            assert why in end
            assert "complete and kept; --allow-little" in end
            allowed = command("quantize", tmp_path / name, *words, "--quiet", "--overwrite", "--allow-little")
            assert (allowed.code, allowed.err) == (0, "")
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


# Rows of docs/models.md -> a model without values, of the size that transformers makes by default.
MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "Llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig()),
    "Qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config()),
    "OPT": lambda: transformers.OPTForCausalLM(transformers.OPTConfig()),
    "BERT": lambda: transformers.BertModel(transformers.BertConfig()),
    "T5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config()),
    "ViT": lambda: transformers.ViTForImageClassification(transformers.ViTConfig()),
    "ConvNeXt": lambda: transformers.ConvNextForImageClassification(transformers.ConvNextConfig()),
    "GPT-2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config()),
    "ResNet": lambda: transformers.ResNetForImageClassification(transformers.ResNetConfig()),
    "Mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig()),
    "Qwen3-MoE": lambda: transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig()),
}
# How the page calls what stays as it is, by how the reason begins.
CALLED = {
    "embedding": "embedding",
    "output head": "output head",
    "Conv": "convolutions",
    "convolution": "convolutions",
}
LEAST = 0.006  # of the parameters, that the page names


def rows_of_the_page() -> dict[str, tuple[str, str]]:
    """{model: (share that is stored smaller, what stays as it is)}, of the table of docs/models.md."""
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    table = text.partition("| model | stored smaller | stays as it is |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {name.partition(" (")[0]: (share, rest) for name, share, rest in rows}


def test_the_page_says_what_of_each_family_is_stored_smaller():
    assert rows_of_the_page().keys() == MODELS.keys()
    for name, row in rows_of_the_page().items():
        with torch.device("meta"):
            model = MODELS[name]()
        split_experts(model)
        found = planned_coverage(model, plan(model, [compress.RTN(group_size=-1)], valued=False), True, ())
        rest = [
            (why, count / found.parameters) for why, count in found.rest.items() if count / found.parameters > LEAST
        ]
        called = [(next(word for start, word in CALLED.items() if why.startswith(start)), share) for why, share in rest]
        assert row == (percent(found.share), ", ".join(f"{word} {percent(share)}" for word, share in called)), name
