"""Codes of tables of levels in planar words, run as `interpreter_cases` runs the others."""

import pytest
import torch
from combinations import each, pairs
from interpreter_cases import guarded  # noqa: F401  every test here is held to it
from planar import TABLES, inputs, planar_table

from compress.kernels import reference
from compress.kernels.layouts.words import planar_weight
from compress.kernels.operators.words import weight_only_path, why_not_weight_only, words_gradient, words_linear
from compress.kernels.triton import dequantize_gemm, planar_gemm
from compress.kernels.tuning.table import Shape

HALF = [torch.float16, torch.bfloat16]


def check(out, x, weight, bias):
    truth = x.double() @ weight.t() + (0 if bias is None else bias.double())
    allowed = reference.tolerance(x.double(), weight, truth, x.dtype)
    assert out.dtype == x.dtype
    assert ((out.double() - truth).abs() <= allowed).all()


@pytest.mark.parametrize(("table", "group", "dtype"), pairs([*TABLES], [16, 32, 64, 128], HALF))
def test_product(table, group, dtype):
    """The interpreter multiplies float32 levels, which are not rounded."""
    weight, values = planar_table(70, 256, group, table, dtype)
    for M, shape in ((1, Shape(16, 64, split_k=2)), (17, Shape(32, 64)), (5, None)):
        x, bias = inputs(M, 256, 70, dtype)
        assert why_not_weight_only(x, weight) == []
        check(planar_gemm.planar_gemm(x, weight, bias, shape), x, values, bias)


@pytest.mark.parametrize(("table", "K", "group"), each([*TABLES], [96], [16, 32]))
def test_tails(table, K, group):
    weight, values = planar_table(3, K, group, table, torch.bfloat16)
    for M in (1, 33):
        x, _ = inputs(M, K, 3, torch.bfloat16)
        check(planar_gemm.planar_gemm(x, weight), x, values, None)


@pytest.mark.parametrize("dtype", HALF)
def test_float32_scales_beside_narrower_inputs(dtype):
    weight, values = planar_table(70, 128, 64, "fractions", torch.float32)
    for M in (1, 40):  # scaled sums, scaled weights
        x, _ = inputs(M, 128, 70, dtype)
        assert weight_only_path(x, weight)[0] == "triton"
        check(planar_gemm.planar_gemm(x, weight), x, values, None)


@pytest.mark.parametrize(("table", "group", "dtype"), pairs([*TABLES], [8, 16, 32, 64], [torch.float16, torch.float32]))
def test_dense_blocks_are_those_of_torch(table, group, dtype):
    weight, _ = planar_table(40, 192, group, table, dtype)
    out = torch.full((40, 192), float("nan"), dtype=dtype)
    dequantize_gemm.dequantize(weight, 192, range(40), range(192), out)
    assert torch.equal(out, planar_weight(weight, 192))


def test_the_operator_its_gradient_and_what_many_tokens_take():
    for group, scales in ((16, torch.float32), (64, torch.float16)):
        weight, _ = planar_table(40, 192, group, "whole numbers", scales)
        arguments = (weight.words, weight.scale, None)
        how = (4, group, None, False, weight.table.values, True)
        x, bias = inputs(5, 192, 40, scales)
        x.requires_grad_()
        out = words_linear(x, *arguments, bias, *how)
        grad = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)).to(scales)
        out.backward(grad)
        dense = planar_weight(weight, 192).double()
        check(x.grad, grad, dense.t(), None)
        check(words_gradient(grad, x.shape, *arguments, None, *how), grad, dense.t(), None)
    long = torch.zeros(1, 192, dtype=torch.float16).expand(5000, 192)
    assert weight_only_path(long, weight)[0] == "dequantize"


def test_a_token_is_summed_alike_in_any_company_where_that_is_asked_for():
    weight, _ = planar_table(40, 1024, 32, "whole numbers", torch.bfloat16)
    x, bias = inputs(70, 1024, 40, torch.bfloat16)
    arguments = (weight.words, weight.scale, None, bias, 4, 32, None, True, weight.table.values, True)
    whole = words_linear(x, *arguments)
    for M in (1, 5):
        assert torch.equal(words_linear(x[:M], *arguments), whole[:M])
