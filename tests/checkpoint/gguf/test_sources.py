"""GGUF files as models: what transformers reads from the checkpoint, `compress.load` reads from the file."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from commands import command, last_line, make_llama, save
from safetensors.torch import load_file

import compress
from compress.checkpoint.gguf.blocks import Q2_0, Q4_0, Q5_0, Q8_0
from compress.checkpoint.gguf.library import read_file
from compress.checkpoint.read.compressed_layers import stored_in
from compress.checkpoint.read.pretrained import load_tokenizer
from compress.checkpoint.read.source import find_source
from compress.passes.protocol.recipe import make_pass
from compress.recipes.studies.engines import random_models

TEXT = "def add(a, b):\n    return a + b  # 1234 and\tmore\n\n\u00e9t\u00e9 \u4f60"
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
HALF = {"scheme": "w4a16", "group_size": 32, "scales": "float16"}


def exported(source: Path) -> Path:
    """The file of a model or a checkpoint."""
    return compress.export(source, source.parent / f"{source.name}-file", "gguf", verify=False).output / "model.gguf"


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """True where all tensors of two models have the same bits."""
    held, wanted = one.state_dict(), other.state_dict()
    return held.keys() == wanted.keys() and all(torch.equal(held[name], wanted[name]) for name in wanted)


@pytest.mark.first
@pytest.mark.parametrize("family", sorted(random_models.FAMILIES, key=lambda name: name != "llama3"))
def test_every_family_is_read_as_it_was(family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(random_models.SIZES, "num_hidden_layers", 2)
    if family == "gpt-oss":  # whose files have no key for it
        monkeypatch.setitem(random_models.YARN, "truncate", False)
    model = random_models.made(family, tmp_path / "model")
    if family == "gpt-oss":  # which joins experts until they are quantized
        compress.quantize(model, compress.RTN(**HALF), output=tmp_path / "out", verify=False)
        model = tmp_path / "out"
    file = exported(model)
    found, original = (
        compress.load(file, dequantize=family == "gpt-oss"),
        compress.load(model, dequantize=family == "gpt-oss"),
    )
    assert found.dtype == torch.float16
    assert equal(found, original)
    tokenizers = [load_tokenizer(find_source(str(each))) for each in (file, model)]
    ids, wanted = (each(TEXT)["input_ids"] for each in tokenizers)
    assert ids == wanted
    assert tokenizers[0].decode(ids) == tokenizers[1].decode(ids)
    with torch.no_grad():
        assert torch.equal(found(torch.tensor([ids])).logits, original(torch.tensor([ids])).logits)


def test_a_file_is_evaluated_and_distilled(tmp_path: Path) -> None:
    model = save(make_llama(num_hidden_layers=2).half(), tmp_path / "model")
    file, ids, student = exported(model), tmp_path / "ids.pt", tmp_path / "student"
    torch.save(torch.randint(2048, (4, 32), generator=torch.Generator().manual_seed(0)), ids)
    found = command("evaluate", file, "--reference", model, "--text", ids, "--json", "-").json()
    assert found["texts"][0]["figures"]["kl_mean"]["value"] == 0
    words = ("--student-layers", 1, "--training", ids, "--steps", 1, "--batch-size", 2, "--no-verify")
    made = command("distill", file, *words, "--output", student)
    assert made.code == 0, made
    assert compress.load(student).config.num_hidden_layers == 1


@pytest.mark.first
@pytest.mark.parametrize(
    ("method", "options", "scheme"),
    [
        ("rtn", HALF, "w4a16 g32 symmetric"),
        ("rtn", {**HALF, "scheme": "w2a16", "group_size": 64}, "w2a16 g64 symmetric"),
        ("rtn", {**HALF, "scheme": "w5a16"}, "w5a16 g32 symmetric"),
        ("rtn", {**HALF, "scheme": "w8a16"}, "w8a16 g32 symmetric"),
        ("k-quants", {"scheme": "q3_k"}, "q3_k"),
        ("k-quants", {"scheme": "q6_k"}, "q6_k"),
        ("k-quants", {"scheme": "iq4_xs"}, "iq4_xs"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_codes_are_kept(method: str, options: dict[str, Any], scheme: str, tmp_path: Path) -> None:
    model = save(make_llama(**WIDE, tie_word_embeddings=True).half(), tmp_path / "model")
    passes = [make_pass(method, options), compress.Embeddings(scheme="w8a16", group_size=32, scales="float16")]
    tokens = torch.randint(2048, (2, 16), generator=torch.Generator().manual_seed(1))
    compress.quantize(model, passes, calibration=tokens, output=tmp_path / "out", verify=False)
    file, notes = exported(tmp_path / "out"), list[str]()
    held = {name: str(layer.scheme) for name, layer in stored_in(find_source(str(file))).layers.items()}
    assert held.pop("model.embed_tokens") == "w8a16 g32 symmetric"
    assert set(held.values()) == {scheme}
    assert len(held) == 7
    found, wanted = (compress.load(each, torch.float32, notes=notes) for each in (file, tmp_path / "out"))
    assert notes == []
    with torch.no_grad():
        assert torch.equal(found(tokens).logits, wanted(tokens).logits)
    # A run that begins with the file writes the same bytes again.
    again = compress.export(file, tmp_path / "again", "gguf", verify=False).output / "model.gguf"
    tensors = {each.name: each.data for each in read_file(file).tensors}
    assert all(np.array_equal(each.data, tensors[each.name]) for each in read_file(again).tensors)


@pytest.mark.parametrize("block", [Q4_0, Q5_0, Q8_0, Q2_0], ids=lambda block: block.name)
def test_unpacking_is_the_inverse_of_packing(block: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(block.least, block.most + 1, (3, 128), generator=generator, dtype=torch.int16)
    scale = torch.randn(3, 128 // block.size, generator=generator).half()
    found, scales = block.codes(block.pack(codes, scale))
    assert torch.equal(found.to(torch.int16), codes)
    assert torch.equal(scales, scale)


@pytest.fixture
def rewritten(tmp_path: Path) -> Callable[..., Path]:
    """Writes the file of a small model anew: keys and tensors changed, or without them where the value is None."""
    model = save(make_llama(**WIDE).half(), tmp_path / "model")

    def write(keys: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None) -> Path:
        held, keys, tensors = read_file(exported(model)), keys or {}, tensors or {}
        path = tmp_path / "changed.gguf"
        writer = gguf.GGUFWriter(path, keys.pop("general.architecture", "llama"))
        for name, field in held.fields.items():
            if not name.startswith(("GGUF.", "general.architecture")) and name not in keys:
                writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])
        for name, value in keys.items():
            if value is not None:
                (writer.add_string if isinstance(value, str) else writer.add_uint32)(name, value)
        for each in held.tensors:
            if tensors.get(each.name, 0) is not None:
                kind = tensors.get(each.name, each.tensor_type)
                data = gguf.quants.quantize(gguf.quants.dequantize(each.data, each.tensor_type), kind)
                writer.add_tensor(each.name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def test_other_types_are_dequantized_and_that_is_said(rewritten: Callable[..., Path], tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q4_1
    file = rewritten(tensors={"blk.0.ffn_up.weight": kind, "blk.0.attn_v.weight": kind, "output.weight": kind})
    values = {each.name: gguf.quants.dequantize(each.data, each.tensor_type) for each in read_file(file).tensors}
    found = compress.load(file, notes=(notes := list[str]())).state_dict()
    assert found["model.layers.0.mlp.up_proj.weight"].dtype == torch.float32
    assert np.array_equal(found["model.layers.0.mlp.up_proj.weight"].numpy(), values["blk.0.ffn_up.weight"])
    assert notes == ["dequantized, as no layer computes on these codes: tensors 3 of Q4_1 of changed.gguf"]
    done = command(
        "quantize", file, "--method", "rtn", "--group-size", 32, "--allow-little", "--output", tmp_path / "out"
    )
    assert done.code == 0, done.err
    assert notes[0] in done.err
    assert load_file(tmp_path / "out" / "model.safetensors")["lm_head.weight"].dtype == torch.float32


@pytest.mark.parametrize(
    ("keys", "tensors", "says"),
    [
        ({"general.architecture": "mamba"}, {}, "is of the family 'mamba'; readable: cohere2, command-r,"),
        ({"llama.logit_scale": 2}, {}, "its key llama.logit_scale is not known here"),
        ({"llama.attention.head_count": None}, {}, "lacks the key llama.attention.head_count"),
        ({"llama.attention.head_count_kv": 4}, {}, "holds blk.0.attn_k.weight of the shape [128, 256]"),
        ({"llama.rope.scaling.type": "yarn"}, {}, 'describes no LlamaForCausalLM ("Missing required keys'),
        ({"tokenizer.ggml.pre": "viking"}, {}, "has a tokenizer that splits text like 'viking'; readable: gpt-2"),
        ({"tokenizer.ggml.model": "bert"}, {}, "has a tokenizer of the kind 'bert'; readable: 'gpt2', 'llama'"),
        ({"split.count": 3}, {}, "holds a part of a model; join the parts first: llama-gguf-split --merge"),
        ({}, {"blk.0.ffn_up.weight": None}, "lacks the tensor blk.0.ffn_up.weight"),
        ({"llama.block_count": 0}, {}, "holds blk.0.attn_k.weight, which a LlamaForCausalLM has no place for"),
    ],
    ids=lambda given: "",
)
def test_what_cannot_be_read_is_one_line(
    keys: dict[str, Any], tensors: dict[str, Any], says: str, rewritten: Callable[..., Path]
) -> None:
    done = command("inspect", rewritten(keys, tensors))
    assert done.code == 2
    assert says in last_line(done)
    assert "changed.gguf" in last_line(done)
