"""Layouts of GPTQ and AWQ: the decided values, read back by a transcription of the formats that shares no code."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import command, last_line, make_llama, save
from safetensors.torch import load_file

import compress
from compress.errors import InputError
from compress.passes.protocol.recipe import make_pass

TOKENS = torch.randint(2048, (6, 16), generator=torch.Generator().manual_seed(1))
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def bits_of(words: torch.Tensor) -> np.ndarray:
    """The bits of int32 words, lowest first, along the first axis: [W, N] -> [32 W, N]."""
    held = words.numpy().view(np.uint32)
    return ((held[:, None, :] >> np.arange(32, dtype=np.uint32)[None, :, None]) & 1).reshape(-1, held.shape[1])


def numbers(stream: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of so many bits, one after the other along the first axis."""
    return sum(stream[i::bits].astype(np.int32) << i for i in range(bits))


def gptq_weight(parts: dict[str, torch.Tensor], bits: int) -> torch.Tensor:
    """[N, K] float32 as format 1 defines it: zero points are stored less one."""
    codes = numbers(bits_of(parts["qweight"]), bits)
    zeros = numbers(bits_of(parts["qzeros"].t().contiguous()), bits).T + 1
    group = parts["g_idx"].numpy()
    scales = parts["scales"].numpy().astype(np.float32)
    return torch.from_numpy(((codes - zeros[group]).astype(np.float32) * scales[group]).T.copy())


def awq_weight(parts: dict[str, torch.Tensor], group_size: int) -> torch.Tensor:
    """[N, K] float32 as version gemm defines it: nibble i of a word is output AWQ_ORDER[i] of eight."""

    def outputs(words: torch.Tensor) -> np.ndarray:
        held = words.numpy().view(np.uint32)
        found = np.zeros((held.shape[0], held.shape[1] * 8), np.int32)
        for nibble, place in enumerate(AWQ_ORDER):
            found[:, place::8] = held >> np.uint32(4 * nibble) & 15
        return found

    codes, zeros, scales = (
        outputs(parts["qweight"]),
        outputs(parts["qzeros"]),
        parts["scales"].numpy().astype(np.float32),
    )
    group = np.arange(len(codes)) // group_size
    return torch.from_numpy(((codes - zeros[group]).astype(np.float32) * scales[group]).T.copy())


def layers_of(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    held: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        layer, _, part = name.rpartition(".")
        held.setdefault(layer, {})[part] = tensor
    return {layer: parts for layer, parts in held.items() if "qweight" in parts}


def run(tmp_path: Path, method: str = "rtn", dtype: torch.dtype = torch.float16, **options: object) -> Path:
    model = save(make_llama().to(dtype), tmp_path / "model")
    out = tmp_path / "out"
    compress.quantize(model, make_pass(method, options), calibration=TOKENS, output=out, verify=False)
    return out


@pytest.mark.parametrize(
    ("bits", "method", "group", "dtype"),
    [
        (2, "rtn", 32, torch.float16),
        (3, "rtn", 16, torch.bfloat16),
        (4, "gptq", 32, torch.float16),
        (8, "rtn", -1, torch.float16),
    ],
)
def test_gptq_holds_what_was_decided(bits, method, group, dtype, tmp_path):
    out = run(tmp_path, method, dtype, scheme=f"w{bits}a16", group_size=group)
    written = compress.export(out, tmp_path / "there", "gptq")
    dense = compress.load(out, dequantize=True).state_dict()
    layers = layers_of(written.output)
    assert len(layers) == written.layers == 14
    for name, parts in layers.items():
        assert torch.equal(gptq_weight(parts, bits).to(dtype), dense[f"{name}.weight"])
    config = json.loads((written.output / "config.json").read_text())["quantization_config"]
    assert config == json.loads((written.output / "quantize_config.json").read_text())
    assert (config["quant_method"], config["bits"], config["group_size"], config["sym"]) == ("gptq", bits, group, True)


@pytest.mark.parametrize("grid", ["asymmetric", "signed-scale"])
def test_awq_holds_what_was_decided(grid, tmp_path):
    out = run(tmp_path, scheme="w4a16", group_size=32, grid=grid)
    written = compress.export(out, tmp_path / "there", "awq")
    dense = compress.load(out, dequantize=True).state_dict()
    layers = layers_of(written.output)
    assert len(layers) == written.layers == 14
    for name, parts in layers.items():
        assert torch.equal(awq_weight(parts, 32).half(), dense[f"{name}.weight"])
    config = json.loads((written.output / "config.json").read_text())["quantization_config"]
    assert (config["version"], config["modules_to_not_convert"]) == ("gemm", ["lm_head"])


@pytest.mark.parametrize(
    ("to", "method", "options", "says"),
    [
        ("gptq", "rtn", {"scheme": "w4a16", "group_size": 32, "grid": "asymmetric"}, "asymmetric"),
        ("gptq", "rtn", {"scheme": "w5a16", "group_size": 32}, "5 bits; allowed: 2, 3, 4, 8"),
        ("awq", "rtn", {"scheme": "w8a16", "group_size": 32}, "8 bits; allowed: 4"),
        ("awq", "rtn", {"scheme": "w4a16", "group_size": 8}, "groups of 8"),
        ("gptq", "rtn", {"scheme": "w8a8"}, "rounds its input"),
        ("gptq", "spqr", {"group_size": 16}, "--to dense"),
    ],
)
def test_what_a_layout_cannot_hold_is_refused_before_work(to, method, options, says, tmp_path):
    out = run(tmp_path, method, **options)
    with pytest.raises(InputError, match=says):
        compress.export(out, tmp_path / "there", to)
    assert not (tmp_path / "there").exists()


def test_scales_that_float16_has_not_are_refused(tmp_path):
    out = run(tmp_path, dtype=torch.float32, scheme="w4a16", group_size=32)
    with pytest.raises(InputError, match="float16"):
        compress.export(out, tmp_path / "there", "gptq")


def test_the_command_says_what_fits(tmp_path):
    out = run(tmp_path, scheme="w4a16", group_size=32, grid="asymmetric")
    listed = command("export", out, "--list")
    assert listed.code == 0
    refused = command("export", out, "--to", "gptq", "--output", tmp_path / "there")
    assert refused.code == 2
    assert "asymmetric" in last_line(refused)
