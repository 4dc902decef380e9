"""Two and three levels: scales that nothing beats, GPTQ in loops, and checkpoints of them."""

import json
from dataclasses import replace
from itertools import product

import pytest
import torch
from combinations import every
from commands import StopAfterOne, command, make_llama, save
from hypothesis import given, settings
from hypothesis import strategies as st
from published import mean_square, realistic_layer
from torch import Tensor

import compress
from compress.base.errors import CheckpointError, InputError
from compress.checkpoint.read.compressed_layers import stored_in, weight_of
from compress.checkpoint.read.source import find_source
from compress.inference.layers.compressed_layers import compressed_layers
from compress.inference.layers.linear import QuantLinear
from compress.inference.layers.ternary import FewLevelsLinear
from compress.solvers.binary import signs
from compress.solvers.gptq import gptq
from compress.weights.formats.codes import Codes, Packed
from compress.weights.formats.ternary import BinaryCodes, TernaryCodes
from compress.weights.grid import Grid, Quantized, fit, quantize
from compress.weights.scheme import parts_of, scheme_of
from compress.weights.ternary_scale import sign_scale, ternary_scale

examples = settings(max_examples=25, deadline=None, derandomize=True)
MEMBERS = 6
THREE = Grid(bits=2, narrow=True, granularity="group", group_size=16, range_choice="mse")
TWO = signs(16)

# --- the best scale --------------------------------------------------------------------------------------------------


def least(x: Tensor, weight: Tensor, levels: tuple[int, ...]) -> float:
    """The least weighted squared error over all codes, each with the scale that is best for it."""
    codes = torch.tensor(list(product(levels, repeat=len(x))), dtype=x.dtype)
    curvature = (weight * codes * codes).sum(1)
    scale = (weight * codes * x).sum(1) / curvature.clamp(min=1e-300)
    return float((weight * (x - scale[:, None] * codes) ** 2).sum(1).min())


def achieved(x: Tensor, weight: Tensor, scale: Tensor, levels: tuple[int, ...]) -> float:
    """The error of a scale with the nearest codes."""
    values = scale * torch.tensor(levels, dtype=x.dtype)
    return float((weight * ((x[:, None] - values) ** 2).amin(1)).sum())


NUMBERS = st.lists(st.floats(-4, 4, width=16), min_size=MEMBERS, max_size=MEMBERS)
WEIGHTS = st.lists(st.sampled_from([0.0, 0.01, 0.5, 1.0, 30.0]), min_size=MEMBERS, max_size=MEMBERS).filter(any)


@examples
@given(NUMBERS, WEIGHTS)
def test_no_codes_and_no_scale_have_a_smaller_error(numbers, weights):
    x, weight = torch.tensor(numbers, dtype=torch.float64), torch.tensor(weights, dtype=torch.float64)
    for levels, find in (((-1, 0, 1), ternary_scale), ((-1, 1), sign_scale)):
        best = least(x, weight, levels)
        assert achieved(x, weight, find(x, weight), levels) <= best + 1e-9 * (1 + best)


@every("grid", [THREE, TWO])
def test_fitting_rounds_the_best_scale_and_needs_no_weight_above_zero(grid):
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    find = sign_scale if grid.signs else ternary_scale
    ones, zeros = torch.ones(16, dtype=torch.float64), torch.zeros(16, dtype=torch.float64)
    for weight in (None, ones, zeros):
        scale, zero = fit(x, grid, torch.bfloat16, weight)
        assert torch.equal(scale, find(x, ones).bfloat16().double())
        assert not zero.any()


def test_signs_of_nothing_are_worth_nothing():
    quantized = quantize(torch.zeros(2, 16), TWO, torch.float16)
    assert set(quantized.codes.unique().tolist()) <= {-1, 1}
    assert not quantized.scale.any()


@every("options", [{"bits": 2}, {"symmetric": False}, {"narrow": True}, {"signed_scale": True}])
def test_signs_have_no_other_options(options):
    with pytest.raises(InputError, match="signs have 1 bit and are symmetric"):
        Grid(**{"bits": 1, "type": "sign", **options})


# --- GPTQ ------------------------------------------------------------------------------------------------------------


def in_loops(weight: Tensor, hessian: Tensor, grid: Grid, damp: float = 0.01) -> Tensor:
    """GPTQ as published, to the nearest of two or three levels whose scale is the best of all; one number at a time."""
    rows, columns = weight.shape
    levels = (-1.0, 1.0) if grid.signs else (-1.0, 0.0, 1.0)
    stiff = hessian + damp * hessian.diagonal().mean() * torch.eye(columns, dtype=hessian.dtype)
    upper = torch.linalg.cholesky(torch.linalg.inv(stiff), upper=True)
    work, values = weight.clone(), torch.zeros_like(weight)
    size = grid.group_size or columns
    for n in range(rows):
        for j in range(columns):
            if j % size == 0:
                group, h = work[n, j : j + size].abs(), hessian.diagonal()[j : j + size]
                if grid.signs:
                    scale = float((h * group).sum() / h.sum())
                else:
                    errors = {}
                    for threshold in group.tolist():
                        inside = group >= threshold
                        s = float((h * group)[inside].sum() / h[inside].sum())
                        errors[float((h * (group - s * inside) ** 2).sum())] = s
                    scale = errors[min(errors)]
            value = min((scale * level for level in levels), key=lambda v: abs(float(work[n, j]) - v))
            values[n, j] = value
            work[n, j:] -= (work[n, j] - value) / upper[j, j] * upper[j, j:]
    return values


@every("grid", [THREE, TWO, replace(THREE, granularity="channel", group_size=None), signs(None)])
def test_the_sweep_is_gptq_with_the_best_scale_of_each_group(grid):
    weight, x = realistic_layer(5, 48, seed=3)
    hessian = mean_square(x)
    solved = gptq(weight, hessian, grid=grid, scale_dtype=torch.float64)
    assert torch.allclose(solved.weight.dequantize(), in_loops(weight, hessian, grid), rtol=1e-9, atol=1e-12)
    better = gptq(weight, hessian, grid=grid, scale_dtype=torch.float64, refit=2, sweeps=2)
    assert better.loss_N.sum() < solved.loss_N.sum()


# --- checkpoints -----------------------------------------------------------------------------------------------------

METHODS = {
    "ternary": ({"refit": 0, "sweeps": 0, "drift": 0.0, "group_size": 32}, "ternary g32"),
    "binary": ({"refit": 0, "sweeps": 0, "drift": 0.0, "group_size": 32}, "binary g32"),
}


@pytest.mark.first
@pytest.mark.parametrize("name", METHODS)
def test_a_run_is_stopped_resumed_verified_and_loaded(name, tmp_path):
    """K of the down projections is 96: no multiple of 5."""
    options, words = METHODS[name]
    method = {"ternary": compress.Ternary, "binary": compress.Binary}[name](**options)
    llama = save(make_llama().half(), tmp_path / "llama")
    tokens = torch.randint(2048, (8, 32), generator=torch.Generator().manual_seed(1))
    out, whole = tmp_path / "out", tmp_path / "whole"
    with pytest.raises(KeyboardInterrupt):
        compress.quantize(llama, method, calibration=tokens, output=out, reporter=StopAfterOne())
    compress.quantize(llama, method, calibration=tokens, output=out, resume=True, verify=False)
    compress.quantize(llama, method, calibration=tokens, output=whole, verify=False)
    (files,) = out.glob("*.safetensors")
    assert files.read_bytes() == (whole / files.name).read_bytes()
    record = json.loads((out / "compress.json").read_text())
    assert compress.verify(str(out))["layers"] == len(record["layers"]) == 14
    assert {layer["scheme"] for layer in record["layers"]} == {name}
    stored = stored_in(find_source(str(out))).layers
    assert all(str(layer.scheme).startswith(words) for layer in stored.values())

    model = compress.load(out)
    kinds = {type(layer) for _, layer in compressed_layers(model)}
    assert kinds == {FewLevelsLinear}
    state = model.state_dict()
    source = find_source(str(out))
    assert all(torch.equal(state[key], source.weights.tensor(key)) for key in source.weights)
    for layer, module in compressed_layers(model):
        assert torch.equal(module.dequantize(), weight_of(source, layer).dequantize())
    if name == "ternary":
        fused = compress.load(out, fuse=True)
        assert torch.equal(fused(tokens).logits, model(tokens).logits)
        assert all(torch.equal(part, state[key]) for key, part in fused.state_dict().items())
        rounding = compress.load(out, int8_activations=True)(tokens).logits
        assert 0 < (rounding - model(tokens).logits).abs().mean() < 0.1 * model(tokens).logits.std()
    shown = command("inspect", out, "--kernels").out
    assert name in shown
    assert "cpu" in shown or "torch" in shown


def test_ternary_codes_in_words_are_those_of_w2a16_that_others_read(tmp_path):
    method = compress.Ternary(packing="words", group_size=32, refit=0, sweeps=0, drift=0.0)
    tokens = torch.randint(2048, (8, 32), generator=torch.Generator().manual_seed(1))
    compress.quantize(make_llama(), method, calibration=tokens, output=tmp_path / "out", verify=False)
    assert compress.verify(str(tmp_path / "out"))["transformers"] == "compared"
    stored = stored_in(find_source(str(tmp_path / "out"))).layers
    assert all(isinstance(layer.scheme.terms[0], Packed) for layer in stored.values())
    weight = weight_of(find_source(str(tmp_path / "out")), next(iter(stored))).dequantize()
    assert all(len(row.view(-1, 32)[0].unique()) <= 3 for row in weight)


# --- formats ---------------------------------------------------------------------------------------------------------


def ternary_layer(columns: int) -> tuple[Codes, dict[str, Tensor]]:
    quantized = quantize(torch.randn(4, columns, generator=torch.Generator().manual_seed(2)), Grid(bits=2, narrow=True))
    term = TernaryCodes(grid=quantized.grid).term(quantized)
    return term, parts_of(term)


def test_bytes_that_are_no_five_codes_are_refused():
    for columns, byte in ((10, 243), (12, 9)):
        term, parts = ternary_layer(columns)
        scheme = scheme_of(term)
        scheme.check(parts, 4, columns)
        parts["weight_packed"][2, -1] = byte
        with pytest.raises(CheckpointError, match=r"^weight_packed holds bytes up to \d+; .* at most 242"):
            scheme.check(parts, 4, columns)


def test_groups_that_do_not_divide_are_refused():
    assert "groups of 16 do not fit" in str(TernaryCodes(grid=THREE).problem(4, 40))
    assert "groups of 16 do not fit" in str(BinaryCodes(grid=TWO).problem(4, 40))
    with pytest.raises(InputError, match="ternary codes are on the narrow"):
        TernaryCodes(grid=Grid(bits=2))
    with pytest.raises(InputError, match="binary codes are on the grid of signs"):
        BinaryCodes(grid=Grid(bits=2, narrow=True))


def test_a_layer_holds_four_bits_a_weight_and_no_dense_copy():
    term, parts = ternary_layer(256)
    layer = QuantLinear.from_parts(parts, scheme_of(term), term.shape)
    held = {name: b for name, b in layer.named_buffers() if b is not None}
    assert sum(b.numel() * b.element_size() for n, b in held.items() if n == "words") == 4 * 256 // 2
    assert not any(b.is_floating_point() and b.numel() >= 4 * 256 for b in held.values())


def test_values_of_a_quantized_matrix_are_what_is_stored():
    quantized = quantize(torch.randn(4, 16), TWO, torch.bfloat16)
    assert isinstance(quantized, Quantized)
    assert scheme_of(quantized).terms == (BinaryCodes(grid=TWO),)
