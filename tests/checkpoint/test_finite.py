"""Numbers that are not finite: no run writes them, and nothing is verified by comparing them."""

import math

import pytest
import torch
from combinations import every
from commands import make_llama, save
from models import build, tokens

import compress
from compress.base.errors import CompressError
from compress.weights.scale_numbers import round_scale

UP = "model.layers.0.mlp.up_proj"
STATIC = compress.RTN(scheme="w8a8", activations="static", activation_grid="asymmetric")
BEYOND = 200.0  # e^200 is more than float32 holds


@every("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_scale_that_is_not_finite_does_not_become_the_largest_number(dtype):
    scale = torch.tensor([math.inf, -math.inf, math.nan])
    torch.testing.assert_close(round_scale(scale, dtype), scale, equal_nan=True)


@every(
    ("part", "parameter", "value"),
    [
        ("weight_quantizer", "log_factor", math.inf),
        ("weight_quantizer", "log_factor", math.nan),
        ("weight_quantizer", "log_factor", BEYOND),
        ("input_quantizer", "log_factor", BEYOND),
        ("input_quantizer", "zero_point", math.nan),
    ],
)
def test_what_training_made_infinite_is_not_written(tmp_path, part, parameter, value):
    model = build("llama")
    prepared = compress.prepare_qat(model, STATIC, calibration=tokens())
    layer = model.get_submodule(UP)
    with torch.no_grad():
        layer.get_submodule(part).get_parameter(parameter).flatten()[0] = value
    with pytest.raises(CompressError, match=rf"{UP}.*not .*finite"):
        prepared.convert(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_a_buffer_may_hold_infinities_and_nothing_else_that_is_not_finite(tmp_path, value):
    model = build("llama")
    model.register_buffer("mask", torch.tensor([0.0, value]))
    model.model.layers[1].register_buffer("mask", torch.tensor([0.0, value]))
    passes, output = compress.RTN(group_size=16), tmp_path / "out"
    if math.isnan(value):
        with pytest.raises(CompressError, match=r"^mask has non-finite weights"):
            compress.quantize(model, passes, output=output, verify=False)
        assert not output.exists()
        return
    compress.quantize(model, passes, output=output, verify=False)
    assert (output / "compress.json").exists()


@pytest.mark.parametrize("passes", [compress.RTN(group_size=32), compress.LowRank(rank=4)], ids=["codes", "a sum"])
def test_logits_that_are_not_finite_do_not_verify(tmp_path, passes):
    """A head is given numbers so large that its products overflow."""
    model = make_llama()
    model.model.norm.weight.data.fill_(torch.finfo(torch.float32).max)
    ids = torch.randint(2048, (4, 16), generator=torch.Generator().manual_seed(0))
    compress.quantize(save(model, tmp_path / "in"), passes, calibration=ids, output=tmp_path / "out", verify=False)
    with pytest.raises(CompressError, match="computes logits that are not finite numbers, in float32"):
        compress.verify(tmp_path / "out")
