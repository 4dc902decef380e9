"""GPTQ checkpoints as other tools write them: act-order, format 2, widths by layer, biases that nobody needs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import command, last_line, make_llama, save
from safetensors.torch import load_file, save_file
from transcribed import gptq_weight, layers_of

import compress
from compress.base.errors import CheckpointError
from compress.kernels.layouts.words import pack_rows, unpack_rows
from compress.passes.protocol.recipe import make_pass

TOKENS = torch.randint(2048, (2, 16), generator=torch.Generator().manual_seed(1))
Tensors = dict[str, torch.Tensor]
DOWN = "model.layers.0.mlp.down_proj"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPTQ checkpoint of 4 bits in groups of 32."""
    here = tmp_path_factory.mktemp("gptq")
    model = save(make_llama().half(), here / "model")
    compress.quantize(model, make_pass("rtn", {"group_size": 32}), output=here / "out", verify=False)
    return compress.export(here / "out", here / "gptq", "gptq").output


@pytest.fixture
def edited(exported: Path, copy_of: Callable[..., Path]) -> Callable[..., Path]:
    """(Change of the tensors, keys of the quantization_config to set) -> a copy of the checkpoint with both."""

    def edit(change: Callable[[Tensors], object] = lambda tensors: None, **words: object) -> Path:
        folder = copy_of(exported)
        (folder / "compress.json").unlink()
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] |= words
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return edit


def weights_of(folder: Path) -> Tensors:
    """The weights of GPTQ's layers, by a reader that shares no code with ours."""
    return {name: gptq_weight(parts, 4) for name, parts in layers_of(folder).items()}


def in_another_order(tensors: Tensors) -> None:
    """Give inputs to groups as act-order does: any, and each group the same number."""
    draw = torch.Generator().manual_seed(2)
    for name in [name for name in tensors if name.endswith("g_idx")]:
        tensors[name] = tensors[name][torch.randperm(len(tensors[name]), generator=draw)]


def test_act_order_is_read_and_runs_on_codes(edited: Callable[..., Path]) -> None:
    folder = edited(in_another_order, desc_act=True)
    model, dense = compress.load(folder), compress.load(folder, dequantize=True)
    for name, weight in weights_of(folder).items():
        assert torch.equal(dense.get_submodule(name).weight, weight.half()), name
        assert torch.equal(model.get_submodule(name).dequantize(), weight.half()), name
        assert type(model.get_submodule(name)).__name__ == "ActOrderLinear"
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, dense(TOKENS).logits, rtol=1e-2, atol=1e-2)
    shown = command("inspect", folder)
    assert shown.code == 0
    refused = command("export", folder, "--to", "awq", "--output", folder.parent / "awq")
    assert refused.code == 2
    assert "groups in any order; `--to dense` takes it" in last_line(refused)


def test_format_2_has_zero_points_as_they_are(edited: Callable[..., Path]) -> None:
    def asymmetric(tensors: Tensors) -> None:
        draw = torch.Generator().manual_seed(3)
        for name in [name for name in tensors if name.endswith("qzeros")]:
            groups, words = tensors[name].shape
            zeros = torch.randint(16, (groups, words * 8), dtype=torch.uint8, generator=draw)
            tensors[name] = pack_rows(zeros, 4, signed=False)

    folder = edited(asymmetric, checkpoint_format="gptq_v2", sym=False)
    dense = compress.load(folder, dequantize=True).state_dict()
    for name, parts in layers_of(folder).items():
        zeros = unpack_rows(parts["qzeros"], 4, parts["scales"].shape[1], signed=False)
        off = gptq_weight(parts, 4) + parts["scales"][parts["g_idx"]].t().float()  # without format 1's one
        assert torch.equal(dense[f"{name}.weight"], off.half()), name
        assert int(zeros.min()) == 0


def test_a_layer_of_another_width_is_found_by_its_pattern(edited: Callable[..., Path]) -> None:
    def wider(tensors: Tensors) -> None:
        codes = unpack_rows(tensors[f"{DOWN}.qweight"].t().contiguous(), 4, 96, signed=False)
        tensors[f"{DOWN}.qweight"] = pack_rows(codes, 8, signed=False).t()
        zeros = torch.full((3, 64), 127, dtype=torch.uint8)
        tensors[f"{DOWN}.qzeros"] = pack_rows(zeros, 8, signed=False)

    folder = edited(wider, dynamic={"-:lm_head": {}, r"+:.*\.0\.mlp\.down_proj": {"bits": 8}})
    model = compress.load(folder)
    assert str(model.get_submodule(DOWN).scheme) == "w8a16 g32 symmetric"
    parts = layers_of(folder)[DOWN]
    assert torch.equal(model.get_submodule(DOWN).dequantize(), gptq_weight(parts, 8).half())


@pytest.mark.parametrize("form", ["auto_round:auto_gptq", "auto_round"])
def test_the_words_of_auto_round_are_those_of_gptq(edited: Callable[..., Path], form: str) -> None:
    """One width for a layer by its name, one for others by a pattern, and a name that begins another's."""
    less = {"auto_round:auto_gptq": 1, "auto_round": 0}[form]

    def wider(tensors: Tensors) -> None:
        for name in [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]:
            codes = unpack_rows(
                tensors[f"{name}.qweight"].t().contiguous(), 4, 8 * len(tensors[f"{name}.qweight"]), signed=False
            )
            bits = 8 if name == DOWN or ".1.mlp." in name else 4
            tensors[f"{name}.qweight"] = pack_rows(codes, bits, signed=False).t()
            zeros = torch.full(tensors[f"{name}.scales"].shape, 2 ** (bits - 1) - less, dtype=torch.uint8)
            tensors[f"{name}.qzeros"] = pack_rows(zeros, bits, signed=False)

    own = {DOWN: {"bits": 8}, "model.layers.0.mlp.up": {"bits": 16}, r".*\.1\.mlp\..*": {"bits": 8, "sym": None}}
    words = {"quant_method": "auto-round", "packing_format": form, "checkpoint_format": None, "data_type": "int"}
    folder = edited(wider, **words, act_bits=16, extra_config=own)
    model, read = compress.load(folder), 0
    for name, parts in layers_of(folder).items():
        bits = 8 if name == DOWN or ".1.mlp." in name else 4
        weight = gptq_weight(parts, bits) + (less - 1) * -parts["scales"][parts["g_idx"]].t().float()
        assert torch.equal(model.get_submodule(name).dequantize(), weight.half()), name
        read += 1
    assert read == 14


def test_auto_round_packs_asymmetric_codes_as_awq_does(tmp_path: Path) -> None:
    model = save(make_llama().half(), tmp_path / "model")
    rounding = make_pass("rtn", {"group_size": 32, "grid": "asymmetric"})
    compress.quantize(model, rounding, output=tmp_path / "out", verify=False)
    folder = compress.export(tmp_path / "out", tmp_path / "awq", "awq").output
    (folder / "compress.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    words = {"quant_method": "auto-round", "packing_format": "auto_round:auto_awq", "data_type": "int", "sym": False}
    config["quantization_config"] = {**words, "bits": 4, "group_size": 32}
    (folder / "config.json").write_text(json.dumps(config))
    found, expected = (compress.load(at, dequantize=True).state_dict() for at in (folder, tmp_path / "out"))
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


def test_biases_of_zeros_are_left_out_and_others_are_refused(edited: Callable[..., Path]) -> None:
    def biases(value: float) -> Callable[[Tensors], None]:
        return lambda tensors: tensors.update({f"{DOWN}.bias": torch.full((64,), value, dtype=torch.float16)})

    folder = edited(biases(0.0))
    assert compress.load(folder).get_submodule(DOWN).bias is None
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match=r"holds model\.layers\.0\.mlp\.down_proj\.bias, which is no part of"):
        compress.load(edited(biases(1.0)))
