"""The promises of recipes/README.md on real models: GPTQ against rounding, and against what others reach."""

import pytest
import torch

import compress


def figures(folder, name, p, rows=None, reference=False):
    """Evaluation of the model after a pass, on its own held-out tokens (the first rows of them)."""
    path = folder / "models" / name
    model = compress.load(path)
    calibration = torch.load(folder / "tokens" / f"{name}.calib.pt", weights_only=True)
    held_out = torch.load(folder / "tokens" / f"{name}.eval.pt", weights_only=True)
    compress.quantize(model, p, calibration=calibration if p.needs() else None)
    return compress.evaluate(model, reference=path if reference else None, text=held_out[:rows])


# Perplexity 2.1513 uncompressed; what AutoRound reaches in 200 iterations on the same work is 2.1721 (symmetric).
@pytest.mark.parametrize(("grid", "limit"), [("signed-scale", 2.175), ("asymmetric", 2.172)])
def test_babyllama_at_four_bits_meets_its_goal(real_data, grid, limit):
    found = figures(real_data, "babyllama-105", compress.GPTQ(group_size=32, grid=grid))
    assert found.tokens == 500 * 255
    assert 2.1513 < found.perplexity <= limit


@pytest.mark.parametrize(("name", "group_size"), [("babyllama-105", 32), ("ts-llama-3.7m", 128)])
@pytest.mark.parametrize(("scheme", "share"), [("w4a16", 0.75), ("w3a16", 0.5)])
def test_gptq_diverges_less_than_rounding(real_data, name, group_size, scheme, share):
    options = {"scheme": scheme, "group_size": group_size}
    rtn = figures(real_data, name, compress.RTN(**options), rows=60, reference=True)
    gptq = figures(real_data, name, compress.GPTQ(**options), rows=60, reference=True)
    assert gptq.kl_mean < share * rtn.kl_mean
    assert gptq.perplexity < rtn.perplexity
