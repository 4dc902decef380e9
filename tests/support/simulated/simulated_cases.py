"""Runs on a simulated CUDA device, beside runs on the CPU: `pytest -p simulated_cuda`.

Sums have another order there: they are torch's, and on the CPU those of loops in C++.
"""

import pytest
import torch
from commands import make_llama
from live_memory import allow
from mixtures import made
from models import build, tokens

import compress
from compress.engine.walk.state import MemoryMode
from compress.jobs.forecast import peak_memory
from compress.jobs.verify import outputs

FAST = {"group_size": 16, "refit": 0, "sweeps": 0}
GIVEN = {"calibration": tokens(24), "batch_size": 8, "verify": False}
IDS = tokens(2, seed=3)
K_QUANTS = compress.only(compress.KQuants(scheme="q4_k", refit=0, sweeps=0), "*.0.self_attn.q_proj")
METHODS = {
    "training": [compress.RTN(scheme="w2a16", group_size=16), compress.Train(steps=3, learning_rate=1e-3)],
    "nvfp4": compress.RTN(scheme="nvfp4"),
    "static w8a8": compress.SmoothQuant(activations="static"),
    "awq": compress.AWQ(scheme="w4a16", group_size=16),
    "gptq for the loss": compress.GPTQ(objective="loss", **FAST),
    "spqr": compress.SpQR(group_size=8, tile_rows=12, outliers=0.02, sweeps=0),
    "k-quants": K_QUANTS,
    "trellis, rotated": [compress.Rotation(online=True), compress.Trellis(scheme="w2a16")],
    "2:4, refit": compress.SparseGPT(pattern="2:4"),
    "low-rank": compress.LowRank(share=0.6),
    "cache": [compress.RTN(scheme="w4a16", group_size=16), compress.KVCache()],
    "structure": compress.Structure(heads=0.5, channels=0.25),
    "wanda": compress.Wanda(pattern="2:4"),
    "taylor": compress.Taylor(sparsity=0.5),
    "lqs": compress.LQS(scheme="w2a16", rank=3, iterations=1, **FAST),
    "ternary": compress.Ternary(),
    "tables": [compress.RTN(scheme="w4a8", group_size=16), compress.Embeddings(scheme="w8a16")],
    "float8": compress.GPTQ(scheme="fp8"),
    "trained to zeros": [compress.RTN(scheme="w4a16"), compress.Train(steps=2, pattern="2:4")],
    "reconstruct": [compress.RTN(scheme="w2a16", group_size=16), compress.Reconstruct(steps=4)],
}
MODES = {
    "split": MemoryMode(repeats=True, offloads=True, at_once=1),
    "kept": MemoryMode(),
    "repeated": MemoryMode(repeats=True),
}
# Passes that decide about each expert by itself: for others, experts are opened together anyway.
EXPERTS = {"gptq": compress.GPTQ(**FAST), "static w8a8": compress.RTN(scheme="w8a8", activations="static")}


def logits_on(device, passes, folder):
    """Logits of the model in `folder`, compressed and run on a device, and the names of its tensors."""
    trains = isinstance(passes, list) and isinstance(passes[-1], compress.Train)
    data = GIVEN | ({"training": tokens(8, seed=2)} if trains else {})
    compress.quantize(folder / "model", passes, output=folder / device, device=device, **data)
    model = compress.load(folder / device, torch.float32, device=device)
    held = model.state_dict()
    assert {tensor.device.type for tensor in held.values()} == {device}
    with torch.no_grad():
        return outputs(model, IDS.to(device)).cpu(), held.keys()


def check(passes, folder):
    """Codes are others where sums were, and as good."""
    (there, names), (here, same_names) = (logits_on(device, passes, folder) for device in ("cuda", "cpu"))
    with torch.no_grad():
        exact = outputs(compress.load(folder / "model", torch.float32), IDS)
    assert names == same_names
    assert 0.8 < (there - exact).norm() / (here - exact).norm() < 1.25


@pytest.mark.first
@pytest.mark.parametrize("passes", METHODS.values(), ids=METHODS)
def test_a_method_is_as_good_as_on_the_cpu(passes, tmp_path):
    model = make_llama(hidden_size=256, intermediate_size=256) if passes is K_QUANTS else build("llama")
    model.bfloat16().save_pretrained(tmp_path / "model")
    check(passes, tmp_path)


@pytest.mark.first
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("passes", EXPERTS.values(), ids=EXPERTS)
def test_experts_are_opened_there_in_every_mode(passes, mode, tmp_path, monkeypatch):
    """One by one where the device has no room for a block, and then all at once, with the same codes."""
    made("deepseek-v3").save_pretrained(tmp_path / "model")
    allow(monkeypatch, mode)
    monkeypatch.setattr(peak_memory, "OPEN_AT_ONCE", 2**30)
    check(passes, tmp_path)
    monkeypatch.setattr(peak_memory, "OPEN_AT_ONCE", 1)
    (one_by_one,) = (tmp_path / "cuda").glob("*.safetensors")
    compress.quantize(tmp_path / "model", passes, output=tmp_path / "at once", device="cuda", **GIVEN)
    assert (tmp_path / "at once" / one_by_one.name).read_bytes() == one_by_one.read_bytes()


@pytest.mark.full
def test_figures_and_answers_are_those_of_the_cpu(tmp_path):
    build("llama").save_pretrained(tmp_path / "model")
    compress.quantize(tmp_path / "model", compress.RTN(), output=tmp_path / "out", verify=False)
    figures, answers = [], []
    for device in ("cuda", "cpu"):
        told = compress.evaluate(tmp_path / "out", text=IDS, reference=tmp_path / "model", device=device)
        figures.append(told.kl_mean)
        model = compress.load(tmp_path / "out", device=device)
        answers.append(model.generate(IDS[:1].to(device), max_new_tokens=8, do_sample=False, pad_token_id=0).cpu())
    assert figures[0] == pytest.approx(figures[1], rel=1e-3)
    assert torch.equal(*answers)
