"""Diffusion transformers in memory: timesteps and classes as further inputs, blocks that these modulate."""

import pytest
import torch
from commands import fast_gptq
from diffusion import BLOCKS, dit, noisy
from torch.utils.data import DataLoader, TensorDataset

import compress
from compress.base.errors import InputError
from compress.jobs.verify import ACTIVE_TOLERANCE

OUTSIDE = {"times.0", "times.2", "out"}
METHODS = {
    "gptq": lambda: fast_gptq(group_size=16),
    "awq": lambda: compress.AWQ(group_size=16),
    "smoothquant": lambda: compress.SmoothQuant(activations="static"),
}


@pytest.mark.parametrize("method", METHODS)
def test_every_linear_layer_of_the_blocks_is_calibrated_and_runs_as_decided(method, tmp_path):
    model, original, batch = dit(), dit(), noisy(1, seed=2)[0]
    found = compress.quantize(model, METHODS[method](), calibration=noisy(), output=tmp_path / "out")
    names = {layer.name for layer in found.record.layers}
    assert names == {
        f"blocks.{i}.{n}" for i in range(BLOCKS) for n in ("qkv", "proj", "mlp.0", "mlp.2", "modulation.1")
    }
    assert {n for n, why in found.record.left_alone.items() if why == "outside the blocks"} == OUTSIDE
    assert found.record.block_forwards == (2 if method == "gptq" else 1) * 8 * BLOCKS * (1 if method == "gptq" else 2)
    loaded = compress.load(tmp_path / "out", into=dit())
    with torch.no_grad():
        expected, decided, computed = (each(**batch) for each in (original, model, loaded))
    assert 0 < float((decided - expected).norm()) < 0.1 * float(expected.norm())
    assert float((computed - decided).abs().max()) < ACTIVE_TOLERANCE * float(decided.std())


def test_batches_may_be_tuples_and_come_from_a_loader():
    batches = noisy()
    tuples = [tuple(batch.values()) for batch in batches]
    rows = TensorDataset(*(torch.cat([batch[name] for batch in batches]) for name in batches[0]))
    made = [dit(), dit(), dit()]
    for model, data in zip(made, (batches, tuples, DataLoader(rows, batch_size=8)), strict=True):
        compress.quantize(model, fast_gptq(group_size=16), calibration=data)
    for name, p in made[0].named_parameters():
        assert all(torch.equal(p, dict(other.named_parameters())[name]) for other in made[1:])


def test_a_tuple_of_too_many_values_is_refused():
    batch = (*noisy(1)[0].values(), torch.zeros(8))
    said = "^calibration batch 1 has 4 values for the forward of DiT, which takes latents, timesteps, labels$"
    with pytest.raises(InputError, match=said):
        compress.quantize(dit(), fast_gptq(), calibration=[batch])


def test_a_batch_without_timesteps_is_refused_in_one_line():
    with pytest.raises(InputError, match="missing a required argument: 'timesteps'"):
        compress.quantize(dit(), fast_gptq(), calibration=[(torch.randn(2, 4, 8, 8),)])
