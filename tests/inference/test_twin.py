"""The twin of a compressed model: right layers are within what is allowed, slightly wrong ones are not."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from models import build, tokens
from torch import Tensor

from compress import RTN, load, quantize
from compress.inference.check.dense_twin import compare_layers, error, plain, round_input
from compress.inference.layers.compressed_layers import compressed_layers
from compress.inference.layers.linear import QuantLinear
from compress.weights.grid import Grid
from compress.weights.grid import quantize as rounded_to
from compress.weights.matrix import Weight
from compress.weights.rounding import ActivationCodes
from compress.weights.terms import FLOATS, Format, Part

SCHEMES = ("w2a16", "w4a16", "w8a16", "w4a8", "w8a8", "fp8")
FORMER = 0.05  # of an output's standard deviation: what no layer in float32 may be off by


def layer_of(scheme: str, dtype: torch.dtype, inputs: int = 64, bias: bool = True) -> QuantLinear:
    torch.manual_seed(inputs)
    return QuantLinear.from_linear(torch.nn.Linear(inputs, 48, bias=bias).to(dtype), scheme)


@torch.no_grad()
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_layer_is_within_what_is_allowed_and_one_that_is_slightly_off_is_not(scheme: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for inputs in (32, 96, 512):
            layer = layer_of(scheme, dtype, inputs, bias=inputs != 96)
            x = torch.randn(17, inputs).to(dtype)
            out = layer(x)
            for given in (out, plain(layer, x)):
                assert error(layer, x, given) <= 1, (dtype, inputs)
            assert error(layer, x, out * 1.1) > 1, (dtype, inputs)
            wrong = out.clone()
            wrong[3, 5] += FORMER * out.float().std()
            assert dtype != torch.float32 or error(layer, x, wrong) > 1, inputs


@torch.no_grad()
@pytest.mark.parametrize("options", [{"scheme": "w8a8", "activation_grid": "asymmetric"}, {"scheme": "fp8"}])
def test_an_output_may_be_one_of_its_codes_and_nothing_between(options: dict[str, str], tmp_path) -> None:
    method = RTN(activations="static", outputs="static", **options)
    quantize(build("llama"), method, calibration=tokens(), output=tmp_path / "out", verify=False)
    model = load(tmp_path / "out", torch.float32)
    with compare_layers(model) as worst:
        model(tokens(2, 7))
    assert len(worst) == 14
    assert max(worst.values()) <= 1
    layer = next(layer for _, layer in compressed_layers(model))
    x = torch.randn(3, layer.in_features)
    out = layer(x)
    assert error(layer, x, out) <= 1
    for wrong in (out + out.std() * 1e-3, out + torch.eye(3, out.shape[1]) * out.std()):
        assert error(layer, x, wrong) > 1


@dataclass(frozen=True, kw_only=True)
class Stated(Format):
    """Values as they are, multiplied with a share of the product missing."""

    kind: ClassVar[str] = "stated"
    missing: float

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        return {"values": Part((rows, columns), FLOATS, by_row=True)}

    def values(self, parts: Mapping[str, Tensor]) -> Tensor:
        return parts["values"]

    def product(self, x: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        return super().product(x, parts) * (1 - self.missing)


@torch.no_grad()
@pytest.mark.parametrize(
    ("dtype", "missing"), [(torch.float32, (1e-2, 1)), (torch.bfloat16, (1,)), (torch.float16, (1e-1, 1))]
)
def test_a_term_without_a_kernel_is_found_where_its_product_is_off(
    dtype: torch.dtype, missing: tuple[float, ...]
) -> None:
    for inputs in (64, 576):
        weight_NK = torch.randn(48, inputs).to(dtype)
        codes = rounded_to(weight_NK, Grid(bits=3, granularity="group", group_size=32), dtype)
        rest, x = weight_NK - codes.dequantize(), torch.randn(17, inputs).to(dtype)
        for share in (0, *missing):
            weight = Weight((codes, Stated(missing=share).read({"values": rest}, *rest.shape)))
            layer = QuantLinear.from_quantized(weight)
            assert (error(layer, x, layer(x)) <= 1) == (share == 0), (inputs, share)


def test_only_a_value_whose_last_places_decide_may_have_either_code() -> None:
    fixed = ActivationCodes(Grid(bits=8, granularity="tensor"), torch.tensor([[0.5]]))
    eps = torch.finfo(torch.float32).eps
    x = torch.tensor([[0.25, 0.25 * (1 + eps), 0.26, 0.75, -1.0, 200.0, 0.0]])
    values, apart = round_input(fixed, x)
    assert values.tolist() == [[0.0, 0.5, 0.5, 1.0, -1.0, 63.5, 0.0]]
    assert apart.tolist() == [[0.5, 0.5, 0.0, 0.5, 0.0, 0.0, 0.0]]


@torch.no_grad()
def test_the_other_code_of_a_tie_is_right_and_of_any_other_value_wrong() -> None:
    layer = layer_of("w8a8", torch.float32)
    codes = layer.rounding("input")
    assert codes is not None
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 1] = 127.5, 0.5  # a step of 1
    for tie, allowed in ((0.5, True), (0.6, False)):
        x[0, 1] = tie
        other = x.clone()
        other[0, 1] = 0.499 if tie > 0.5 else 0.501
        assert (error(layer, x, layer(other)) <= 1) == allowed, tie
