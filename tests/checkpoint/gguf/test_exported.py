"""GGUF files: gguf-py reads the decided values, under llama.cpp's names, with what llama.cpp asks for beside them."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from commands import command, last_line, make_llama, save
from mixtures import made
from safetensors.torch import load_file

import compress
from compress.base.errors import CheckpointError, CompressError
from compress.checkpoint.export.gguf.readback import read_back
from compress.checkpoint.files import RECORD
from compress.passes.protocol.base import but, only
from compress.passes.protocol.recipe import make_pass

TOKENS = torch.randint(2048, (4, 16), generator=torch.Generator().manual_seed(1))
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}


def quantized(tmp_path: Path, method: str = "rtn", dtype: torch.dtype = torch.float16, **options: Any) -> Path:
    model = save(make_llama(**options.pop("model", {})).to(dtype), tmp_path / "model")
    passes = [make_pass(method, {k: v for k, v in options.items() if k != "embeddings"})]
    if "embeddings" in options:
        passes.append(make_pass("embeddings", options["embeddings"]))
    compress.quantize(model, passes, calibration=TOKENS, output=tmp_path / "out", verify=False)
    return tmp_path / "out"


def read(folder: Path) -> gguf.GGUFReader:
    return gguf.GGUFReader(folder / "model.gguf")


def values_of(reader: gguf.GGUFReader) -> dict[str, torch.Tensor]:
    """{name: float32 values, rows first}."""
    found = {}
    for tensor in reader.tensors:
        found[tensor.name] = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
    return found


def types_of(reader: gguf.GGUFReader) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}


def key(reader: gguf.GGUFReader, name: str) -> Any:
    return reader.fields[name].contents()


def in_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of each head in ggml's order: i and i + d / 2 beside each other."""
    size = len(weight) // heads
    order = [h * size + i // 2 + (i % 2) * (size // 2) for h in range(heads) for i in range(size)]
    return weight[order]


@pytest.mark.first
@pytest.mark.parametrize(
    ("method", "dtype", "kind", "options"),
    [
        ("gptq", torch.float16, "Q4_0", {"scheme": "w4a16", "group_size": 32}),
        ("rtn", torch.bfloat16, "Q8_0", {"scheme": "w8a16", "group_size": 32}),
        ("rtn", torch.float16, "Q4_0", {"scheme": "w3a16", "grid": "asymmetric", "group_size": 32}),
        ("rtn", torch.bfloat16, "Q4_0", {"scheme": "w4a16", "group_size": -1}),
        ("ternary", torch.float16, "TQ2_0", {"group_size": 256, "model": WIDE}),
        ("rtn", torch.bfloat16, "Q4_K", {"scheme": "q4_k", "model": WIDE}),
        ("rtn", torch.float16, "Q6_K", {"scheme": "q6_k", "model": WIDE}),
        ("rtn", torch.float32, "IQ4_XS", {"scheme": "iq4_xs", "model": WIDE}),
        ("k-quants", torch.float16, "IQ4_NL", {"scheme": "iq4_xs"}),
        ("gptq", torch.float32, "Q4_0", {"scheme": "w4a16", "group_size": 32, "scales": "float16"}),
        ("ternary", torch.float32, "TQ2_0", {"group_size": 256, "model": WIDE, "scales": "float16"}),
        ("k-quants", torch.float32, "Q5_0", {"scheme": "q4_k"}),
        ("gptq", torch.bfloat16, "MXFP4", {"scheme": "mxfp4a16"}),
        ("gptq", torch.float16, "IQ4_NL", {"scheme": "iq4_nl"}),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_gguf_py_reads_what_was_decided(method, dtype, kind, options, tmp_path):
    out = quantized(tmp_path, method, dtype, **options)
    written = compress.export(out, tmp_path / "there", "gguf")
    dense = compress.load(out, dequantize=True).state_dict()
    reader = read(written.output)
    found, types = values_of(reader), types_of(reader)
    layer = "model.layers.0"
    assert key(reader, "general.name") == "model"  # the one that was quantized, not the folder of its checkpoint
    assert types["blk.0.attn_q.weight"] == types["blk.0.ffn_down.weight"] == kind
    assert torch.equal(found["blk.0.ffn_down.weight"].to(dtype), dense[f"{layer}.mlp.down_proj.weight"])
    assert torch.equal(found["blk.0.attn_q.weight"].to(dtype), in_pairs(dense[f"{layer}.self_attn.q_proj.weight"], 4))
    assert torch.equal(found["blk.0.attn_k.weight"].to(dtype), in_pairs(dense[f"{layer}.self_attn.k_proj.weight"], 2))
    assert torch.equal(found["blk.0.attn_v.weight"].to(dtype), dense[f"{layer}.self_attn.v_proj.weight"])
    assert torch.equal(found["token_embd.weight"].to(dtype), dense["model.embed_tokens.weight"])
    assert torch.equal(found["output.weight"].to(dtype), dense["lm_head.weight"])
    assert types["blk.0.ffn_norm.weight"] == "F32"
    record = json.loads((written.output / RECORD).read_text())
    assert record["verification"]["reader"].startswith("gguf ")
    assert record["verification"]["tensors"] == len(reader.tensors)


@pytest.mark.full
def test_nvfp4_has_its_global_scale_beside_it(tmp_path):
    out = quantized(tmp_path, "gptq", torch.bfloat16, scheme="nvfp4a16", model=WIDE)
    found = values_of(reader := read(compress.export(out, tmp_path / "there", "gguf").output))
    dense = compress.load(out, dequantize=True).state_dict()
    for name, ours in {"ffn_down": "mlp.down_proj", "attn_v": "self_attn.v_proj"}.items():
        assert types_of(reader)[f"blk.0.{name}.weight"] == "NVFP4"
        factor = found[f"blk.0.{name}.scale"]
        assert factor.shape == (1,)
        values = (found[f"blk.0.{name}.weight"] * factor).to(torch.bfloat16)
        assert torch.equal(values, dense[f"model.layers.0.{ours}.weight"])
    assert torch.equal(found["blk.0.attn_q.scale"], found["blk.0.attn_v.scale"])


def test_what_gguf_py_cannot_read_is_said(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("signs", np.zeros((2, 18), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q1_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    signs = {"type": "Q1_0", "dtype": "float16", "sha256": ""}
    found = read_back(tmp_path, {"file": "model.gguf", "layers": 1, "tensors": {"signs": signs}})
    assert (found["layers"], found["tensors"], found["unread"]) == (0, 0, {"Q1_0": 1})
    assert found["remarks"][0].startswith("1 tensors of Q1_0 are not read back: gguf ")


def test_asymmetric_codes_of_4_bits_keep_every_value(tmp_path):
    """Q4_1 where float16 has the minima, Q5_0 where not; both with the decided values."""
    out = quantized(tmp_path, "rtn", torch.bfloat16, scheme="w4a16", grid="asymmetric", group_size=32)
    written = compress.export(out, tmp_path / "there", "gguf")
    dense = compress.load(out, dequantize=True).state_dict()
    found, types = values_of(read(written.output)), types_of(read(written.output))
    for name, module in (("ffn_up", "mlp.up_proj"), ("attn_v", "self_attn.v_proj"), ("ffn_down", "mlp.down_proj")):
        assert types[f"blk.1.{name}.weight"] in ("Q4_1", "Q5_0")
        assert torch.equal(found[f"blk.1.{name}.weight"].bfloat16(), dense[f"model.layers.1.{module}.weight"])


def test_llama_cpp_finds_its_keys_and_the_tokenizer(tmp_path):
    out = quantized(tmp_path, scheme="w4a16", group_size=32)
    reader = read(compress.export(out, tmp_path / "there", "gguf", verify=False).output)
    assert key(reader, "general.architecture") == "llama"
    assert key(reader, "general.file_type") == gguf.LlamaFileType.MOSTLY_Q4_0
    assert [key(reader, f"llama.{name}") for name in ("block_count", "attention.head_count_kv")] == [2, 2]
    assert key(reader, "llama.attention.layer_norm_rms_epsilon") == pytest.approx(1e-6)
    assert key(reader, "tokenizer.ggml.model") == "gpt2"
    assert key(reader, "tokenizer.ggml.pre") == "gpt-2"
    tokens = key(reader, "tokenizer.ggml.tokens")
    held = json.loads((out / "tokenizer.json").read_text(encoding="utf-8"))
    assert {word: i for i, word in enumerate(tokens)} == held["model"]["vocab"]
    assert key(reader, "tokenizer.ggml.token_type")[:2] == [gguf.TokenType.CONTROL, gguf.TokenType.NORMAL]
    assert key(reader, "tokenizer.ggml.merges")[0] == " ".join(held["model"]["merges"][0])
    assert key(reader, "tokenizer.ggml.eos_token_id") == 0
    assert key(reader, "tokenizer.ggml.add_bos_token") is False


def test_a_tied_head_is_not_written_again(tmp_path):
    options = {"scheme": "w4a16", "group_size": 32, "embeddings": {"scheme": "w8a16"}}
    out = quantized(tmp_path, model={"tie_word_embeddings": True}, **options)
    types = types_of(read(compress.export(out, tmp_path / "there", "gguf").output))
    assert types["token_embd.weight"] == "Q8_0"
    assert "output.weight" not in types


def test_llama_3_positions_are_factors_of_frequencies(tmp_path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    out = quantized(tmp_path, scheme="w4a16", group_size=32, model={"rope_parameters": rope})
    found = values_of(read(compress.export(out, tmp_path / "there", "gguf").output))["rope_freqs.weight"]
    waves = 2 * np.pi * 10000.0 ** (np.arange(0, 16, 2) / 16)
    smooth = (32 / waves - 1) / 3
    between = 1 / ((1 - smooth) / 8 + smooth)
    assert np.allclose(found, np.where(waves < 8, 1, np.where(waves > 32, 8, between)), rtol=1e-5)


def test_an_edited_file_is_found_out(tmp_path):
    out = quantized(tmp_path, scheme="w4a16", group_size=32)
    there = compress.export(out, tmp_path / "there", "gguf", verify=False).output
    assert compress.verify(there)["layers"] == 14
    file = there / "model.gguf"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 64]))
    with pytest.raises(CheckpointError, match=r"as gguf .* reads it, is not what was decided"):
        compress.verify(there)
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="cannot be read by gguf"):
        compress.verify(there)


def test_an_output_that_reads_otherwise_is_not_kept(tmp_path, monkeypatch):
    out = quantized(tmp_path, scheme="w4a16", group_size=32)
    monkeypatch.setattr("compress.checkpoint.export.gguf.file.checksum", lambda tensor: "0" * 64)
    with pytest.raises(CompressError, match="the output is not what was decided"):
        compress.export(out, tmp_path / "there", "gguf")
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"scheme": "w4a16", "group_size": 16}, "has groups of 16; Q4_0 takes multiples of 32: quantize with --group"),
        (
            {"scheme": "w4a16", "group_size": 32, "dtype": torch.float32},
            "float16 has not; quantize with scales=float16",
        ),
        (
            {
                "scheme": "w4a16",
                "group_size": 32,
                "model": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            },
            "positions are scaled by 'dynamic'",
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_what_gguf_cannot_hold_is_refused_in_a_line(options, says, tmp_path):
    out = quantized(tmp_path, **options)
    refused = command("export", out, "--to", "gguf", "--output", tmp_path / "there")
    assert refused.code == 2
    assert says in last_line(refused)
    assert not (tmp_path / "there").exists()


def test_without_the_package_a_line_says_so(llama, tmp_path, monkeypatch):
    monkeypatch.setattr("compress.checkpoint.gguf.library.find_spec", lambda name: None)
    refused = command("export", llama, "--to", "gguf", "--output", tmp_path / "there")
    assert refused.code == 2
    assert "the package gguf" in last_line(refused)
    assert "pip install -e '.[gguf]'" in last_line(refused)


def test_a_template_gets_the_codes_of_its_layers(tmp_path):
    """A file that somebody else's converter made of the dense export: the same blocks in the same order of rows."""
    out = quantized(tmp_path, scheme="w4a16", group_size=32)
    own = read(compress.export(out, tmp_path / "own", "gguf", verify=False).output)
    dense = compress.export(out, tmp_path / "dense").output
    template = compress.export(dense, tmp_path / "template", "gguf", verify=False).output / "model.gguf"
    words = ("export", out, "--to", "gguf", "--template", template, "--output", tmp_path / "there")
    done = command(*words)
    assert done.code == 0, done.err
    found = {tensor.name: tensor for tensor in read(tmp_path / "there").tensors}
    for tensor in own.tensors:
        assert found[tensor.name].tensor_type == tensor.tensor_type
        assert np.array_equal(found[tensor.name].data, tensor.data)
    fields = read(tmp_path / "there").fields
    assert fields.keys() == own.fields.keys()
    assert key(read(tmp_path / "there"), "general.file_type") == gguf.LlamaFileType.MOSTLY_Q4_0
    other = compress.export(tmp_path / "model", tmp_path / "other", "gguf", verify=False).output / "model.gguf"
    refused = command(*words[:5], other, *words[6:-1], tmp_path / "no")
    assert refused.code == 2
    assert "the template has no tensor of the rows of model.layers.0" in last_line(refused)
    assert not (tmp_path / "no").exists()


def template_of(dense, path, arch):
    """A file of a mixture's dense weights as llama.cpp's converter lays it out: experts in one tensor for each matrix,
    in another order of rows."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], 2)
    tensors = load_file(dense / "model.safetensors")
    stacks: dict[str, list[torch.Tensor]] = {}
    for name in sorted(tensors, key=lambda n: [int(part) if part.isdecimal() else part for part in n.split(".")]):
        block, _, rest = name.partition(".experts.")
        number, _, leaf = rest.partition(".")
        stacks.setdefault(f"{block}.experts.{leaf}" if number.isdecimal() else name, []).append(tensors[name])
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(2)
    for name, held in stacks.items():
        whole = held[0] if ".experts." not in name else torch.stack(held).flip(1)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), whole.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_experts_go_into_one_tensor_of_a_template(tmp_path):
    wide = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 5}
    made("qwen3-moe", **wide).half().save_pretrained(tmp_path / "model")
    out = compress.quantize(
        tmp_path / "model", compress.RTN(scheme="w4a16", group_size=32), output=tmp_path / "out", verify=False
    ).output
    dense = compress.export(out, tmp_path / "dense").output
    template_of(dense, tmp_path / "t.gguf", "qwen3moe")
    words = ("export", out, "--to", "gguf", "--template", tmp_path / "t.gguf", "--output")
    done = command(*words, tmp_path / "there")
    assert done.code == 0, done.err
    found = {tensor.name: tensor for tensor in read(tmp_path / "there").tensors}
    weights = load_file(dense / "model.safetensors")
    for i in range(2):
        for leaf in ("gate", "up", "down"):
            tensor = found[f"blk.{i}.ffn_{leaf}_exps.weight"]
            assert tensor.tensor_type.name == "Q4_0"
            each = [weights[f"model.layers.{i}.mlp.experts.{e}.{leaf}_proj.weight"] for e in range(5)]
            values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
            assert torch.equal(values.half(), torch.stack(each).flip(1))
        assert found[f"blk.{i}.ffn_gate_inp.weight"].tensor_type.name == "F16"
    assert compress.verify(tmp_path / "there")["layers"] == 2 * (4 + 3 * 5)
    # Experts that are not all compressed, or not alike, cannot lie in one tensor.
    for name, passes, why in (
        ("some", but(compress.RTN(group_size=32), "*.experts.3.up_proj"), "number 3 is not compressed"),
        (
            "unlike",
            [
                only(compress.RTN(scheme="w8a16", group_size=32), "*.experts.3.*"),
                but(compress.RTN(group_size=32), "*.experts.3.*"),
            ],
            "have blocks of Q4_0 and Q8_0",
        ),
    ):
        other = compress.quantize(tmp_path / "model", passes, output=tmp_path / name, verify=False).output
        template_of(compress.export(other, tmp_path / f"{name}-dense").output, tmp_path / f"{name}.gguf", "qwen3moe")
        given = ("export", other, "--to", "gguf", "--template", tmp_path / f"{name}.gguf", "--output", tmp_path / "no")
        refused = command(*given)
        assert refused.code == 2
        assert why in last_line(refused), refused.err
