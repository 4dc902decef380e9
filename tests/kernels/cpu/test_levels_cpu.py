"""Codes of a table of 16 levels in strips: the products against dequantized operands, the operator, the layers."""

import copy

import pytest
import torch
from combinations import every
from commands import command, make_llama, save
from emulated import Emulated
from planar import TABLES, inputs, table_of

import compress
from compress.inference.layers.compressed_layers import lay_in_strips
from compress.inference.layers.linear import QuantLinear, TableLinear
from compress.kernels import reference
from compress.kernels.cpu import gemm as cpu_gemm
from compress.kernels.cpu.layouts import why_not_levels
from compress.kernels.operators.words import words_linear

TOKENS = (1, 2, 3, 4, 7, 17, 63)
GROUPS = ((32, 32), (64, 16), (96, 32), (200, -1), (256, 64), (640, 16), (1088, 544))
SCHEMES = ["mxfp4a16", "nvfp4a16", "nf4a16", "iq4_nl"]


@every("table", [*TABLES])
@every("dtype", [torch.bfloat16, torch.float16, torch.float32])
@every(("K", "group"), GROUPS)
def test_exact_inputs(library, K, group, dtype, table):
    for N in (16, 80):
        laid, values = table_of(N, K, group, table, dtype)
        for M in TOKENS:
            x, bias = inputs(M, K, N, dtype)
            out = cpu_gemm.words(x, laid, bias)
            assert out.dtype == dtype
            truth = x.double() @ values.t() + bias.double()
            bound = reference.tolerance(x.double(), values, truth, dtype)
            # Slabs beside entries aside, values are not rounded before they are scaled.
            assert ((out.double() - truth).abs() <= bound).all(), (M, N)


@every("dtype", [torch.bfloat16, torch.float32])
def test_slabs_side_by_side_and_blocks_of_tokens(library, dtype):
    N, K, M = 1040, 544, 300
    laid, values = table_of(N, K, 32, "whole numbers", dtype)
    x, bias = inputs(M, K, N, dtype)
    truth = x.double() @ values.t() + bias.double()
    out = cpu_gemm.words(x, laid, bias).double()
    assert ((out - truth).abs() <= reference.tolerance(x.double(), values, truth, dtype)).all()


def test_a_token_has_the_same_result_in_any_company_where_that_is_asked_for(library):
    laid, _ = table_of(48, 256, 32, "fractions", torch.float32)
    x, bias = inputs(40, 256, 48, torch.float32)
    many = cpu_gemm.words(x, laid, bias, batch_invariant=True)
    for m in (0, 13, 39):
        assert torch.equal(cpu_gemm.words(x[m : m + 1], laid, bias, batch_invariant=True)[0], many[m])


def test_what_no_loop_takes_is_said():
    assert "40 outputs" in why_not_levels(40, 64, 32)[0]
    assert "group size 8" in why_not_levels(48, 64, 8)[0]
    assert "48 columns in groups of 16" in why_not_levels(48, 48, 16)[0]


@every("scheme", SCHEMES)
@every("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_layers_compute_in_strips_what_they_do_in_rows(looped, scheme, dtype):
    if isinstance(looped, Emulated):
        pytest.skip("layers multiply by operators, which are linked to torch")
    torch.manual_seed(0)
    rows = QuantLinear.from_linear(torch.nn.Linear(192, 64, dtype=dtype), scheme)
    assert rows.dtype == dtype
    laid = copy.deepcopy(rows)
    lay_in_strips(torch.nn.Sequential(laid))
    assert laid.in_strips
    assert laid.words.nbytes == 64 * 192 // 2  # 4 bits of each weight
    stored = rows.state_dict()
    assert stored.keys() == laid.state_dict().keys()
    assert all(torch.equal(value, stored[name]) for name, value in laid.state_dict().items())
    assert torch.equal(laid.values(), rows.values())
    for M in (1, 5, 40):
        x = torch.randn(M, 192).to(dtype).requires_grad_(M == 5)
        expected = x.double() @ rows.values().double().t() + rows.bias.double()
        bound = reference.tolerance(x.double(), rows.values().double(), expected, dtype) + laid.slack(x.double())
        found = laid(x)
        assert ((found.double() - expected).abs() <= bound).all()
        if M == 5:
            found.float().square().sum().backward()
            exact = 2 * found.detach().double() @ rows.values().double()
            torch.testing.assert_close(x.grad.double(), exact, rtol=0.02, atol=0.02 * float(exact.abs().max()))
    laid.lay_in_rows()
    assert torch.equal(laid.words, rows.words)
    assert torch.equal(laid.scale, rows.scale)


@every("scheme", SCHEMES)
def test_another_dtype_and_loading_again(scheme):
    torch.manual_seed(0)
    layer = QuantLinear.from_linear(torch.nn.Linear(128, 32), scheme)
    other = QuantLinear.from_linear(torch.nn.Linear(128, 32), scheme)
    for each in (layer, other):
        lay_in_strips(torch.nn.Sequential(each))
    x = torch.randn(3, 128)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    half = copy.deepcopy(layer).to(torch.bfloat16)
    assert half(x.bfloat16()).dtype == torch.bfloat16
    error = (half(x.bfloat16()).float() - layer(x)).norm() / layer(x).norm()
    assert error < 0.01
    if scheme not in ("nf4a16", "iq4_nl"):  # whose scales are the model's
        assert torch.equal(half.values(), layer.values())


def test_the_operator_is_one(library):
    laid, _ = table_of(48, 64, 32, "fractions", torch.float32)
    x, bias = inputs(2, 64, 48, torch.float32)
    arguments = (x.requires_grad_(), laid.words, laid.scale, None, bias, 4, 32, None, False, laid.table.values)
    torch.library.opcheck(words_linear.registered, arguments, test_utils=("test_schema", "test_faketensor"))


def test_global_scales_that_are_no_power_of_two_are_multiplied_exactly(looped):
    layer = QuantLinear.from_linear(torch.nn.Linear(64, 32), "nvfp4a16")
    assert isinstance(layer, TableLinear)
    parts = layer.parts(slice(0, 32))
    parts["weight_global_scale"] = torch.tensor([1234.567])
    layer = QuantLinear.from_parts(parts, layer.scheme, (32, 64))
    lay_in_strips(torch.nn.Sequential(layer))
    x = torch.randn(4, 64)
    expected = x.double() @ layer.values().double().t()
    assert ((layer(x).double() - expected).abs() <= 1e-5 * expected.abs().max()).all()
    assert torch.equal(layer.parts(slice(0, 32))["weight_global_scale"], parts["weight_global_scale"])


def test_int8_inputs_bring_planar_words_back(llama, tmp_path):
    compress.quantize(llama, compress.RTN(scheme="mxfp4a16"), output=tmp_path / "out", verify=False)
    exact, rounded = compress.load(tmp_path / "out"), compress.load(tmp_path / "out", int8_activations=True)
    name = "model.layers.0.mlp.up_proj"
    assert exact.get_submodule(name).in_strips
    assert not rounded.get_submodule(name).in_strips
    ids = torch.randint(2048, (2, 16), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        error = (exact(ids).logits - rounded(ids).logits).norm() / exact(ids).logits.norm()
    assert 0 < error < 0.1


@pytest.mark.parametrize("scheme", SCHEMES)
def test_inspect_tells_the_kernel_of_each_layer(scheme, tmp_path):
    model = save(make_llama(num_hidden_layers=1, intermediate_size=128), tmp_path / "model")
    compress.quantize(model, compress.RTN(scheme=scheme), output=tmp_path / "out", verify=False)
    shown = command("inspect", tmp_path / "out", "--kernels", "--device", "cpu")
    assert shown.code == 0, shown.err
    assert "cpu strips" in shown.out
    assert "torch" not in shown.out
