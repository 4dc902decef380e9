"""The promises of recipes/README.md on real models: each method against rounding, and against what others reach."""

from functools import cache

import pytest
import torch

import compress

pytestmark = pytest.mark.full

MODELS = [("babyllama-105", 32), ("ts-llama-3.7m", 128)]  # and the group size that divides its widths
ROWS = 8  # of 255 tokens: enough to tell two methods apart
CALIBRATION = 16


def crossed(*values):
    """By default the smaller model with the first value; the other combinations are slow ones."""
    return [
        pytest.param(model, value, marks=[pytest.mark.slow] if i or j else [], id=f"{model[0]}-{value}")
        for i, model in enumerate(MODELS)
        for j, value in enumerate(values)
    ]


@cache
def figures(folder, name, p, rows=None, reference=False, samples=None):
    """Evaluation of the model after a pass, on its own held-out tokens (the first rows of them)."""
    path = folder / "models" / name
    model = compress.load(path)
    calibration = torch.load(folder / "tokens" / f"{name}.calib.pt", weights_only=True)
    held_out = torch.load(folder / "tokens" / f"{name}.eval.pt", weights_only=True)
    compress.quantize(model, p, calibration=calibration[:samples] if p.calibrated else None)
    return compress.evaluate(model, reference=path if reference else None, text=held_out[:rows])


# Perplexity 2.1513 uncompressed; what AutoRound reaches in 200 iterations on the same work is 2.1721 (symmetric).
@pytest.mark.slow
@pytest.mark.parametrize(("grid", "limit"), [("signed-scale", 2.175), ("asymmetric", 2.172)])
def test_babyllama_at_four_bits_meets_its_goal(real_data, grid, limit):
    found = figures(real_data, "babyllama-105", compress.GPTQ(group_size=32, grid=grid))
    assert found.tokens == 500 * 255
    assert 2.1513 < found.perplexity <= limit


@pytest.mark.parametrize(("model", "given"), crossed(("w4a16", 0.75), ("w3a16", 0.5)))
def test_gptq_diverges_less_than_rounding(real_data, model, given):
    (name, group_size), (scheme, share) = model, given
    options = {"scheme": scheme, "group_size": group_size}
    rtn = figures(real_data, name, compress.RTN(**options), rows=ROWS, reference=True, samples=CALIBRATION)
    gptq = figures(real_data, name, compress.GPTQ(**options), rows=ROWS, reference=True, samples=CALIBRATION)
    assert gptq.kl_mean < share * rtn.kl_mean
    assert gptq.perplexity < rtn.perplexity


@pytest.mark.parametrize(("model", "scheme"), crossed("w4a16", "w3a16"))
def test_awq_diverges_less_than_rounding(real_data, model, scheme):
    name, group_size = model
    options = {"scheme": scheme, "group_size": group_size}
    rtn = figures(real_data, name, compress.RTN(**options), rows=ROWS, reference=True, samples=CALIBRATION)
    awq = figures(real_data, name, compress.AWQ(**options), rows=ROWS, reference=True, samples=CALIBRATION)
    assert awq.kl_mean < rtn.kl_mean


@pytest.mark.parametrize(("model", "activations"), crossed("dynamic", "static"))
def test_smoothquant_diverges_no_more_than_rounding(real_data, model, activations):
    name, _ = model
    options = {"scheme": "w8a8", "activations": activations}
    rtn = figures(real_data, name, compress.RTN(**options), rows=ROWS, reference=True, samples=CALIBRATION)
    smooth = figures(real_data, name, compress.SmoothQuant(**options), rows=ROWS, reference=True, samples=CALIBRATION)
    assert smooth.kl_mean <= rtn.kl_mean


def inject_outliers(model, factor):
    """Scale a few channels of every norm up and what reads them down: the same function, harder to round."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for block in model.model.layers:
            for norm, readers in (
                (block.input_layernorm, [getattr(block.self_attn, f"{n}_proj") for n in "qkv"]),
                (block.post_attention_layernorm, [block.mlp.gate_proj, block.mlp.up_proj]),
            ):
                s = torch.ones_like(norm.weight)
                s[torch.randperm(len(s), generator=generator)[:3]] = factor
                norm.weight.mul_(s)
                for reader in readers:
                    reader.weight.div_(s)
    return model


@pytest.mark.parametrize(("model", "factor"), crossed(50.0, 100.0))
def test_smoothquant_takes_injected_outliers_away(real_data, model, factor):
    path, name = real_data / "models" / model[0], model[0]
    calibration = torch.load(real_data / "tokens" / f"{name}.calib.pt", weights_only=True)[:16]
    held_out = torch.load(real_data / "tokens" / f"{name}.eval.pt", weights_only=True)[:ROWS]

    def divergence(method, injected):
        model = compress.load(path, torch.float32)
        if injected:
            inject_outliers(model, factor)
        compress.quantize(model, method, calibration=calibration if method.calibrated else None)
        return compress.evaluate(model, reference=path, text=held_out).kl_mean

    plain, hurt = (divergence(compress.RTN(scheme="w8a8"), injected) for injected in (False, True))
    repaired = divergence(compress.SmoothQuant(), injected=True)
    assert hurt > 5 * plain
    assert repaired <= plain + 0.1 * (hurt - plain)
