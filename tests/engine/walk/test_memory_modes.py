"""Runs that take less of their device's memory: the same codes, and a peak that the forecast tells."""

import pytest
import torch
import transformers
from live_memory import LiveMemory, allow
from mixtures import made
from models import build, tokens

import compress
from compress.engine.plan.plan import plan
from compress.engine.walk.forward import suspended_forward
from compress.engine.walk.state import MemoryMode
from compress.jobs.forecast import peak_memory
from compress.jobs.forecast.peak_memory import TokenCounts, peak_of

HIDDEN, WIDE, SAMPLES, LENGTH, BATCH = 128, 448, 16, 64, 4
WAYS = {
    "kept": MemoryMode(),
    "repeated": MemoryMode(repeats=True),
    "offloaded": MemoryMode(repeats=True, offloads=True),
    "split": MemoryMode(repeats=True, offloads=True, at_once=1),
}


@pytest.mark.first
@pytest.mark.parametrize(
    ("make", "p"),
    [
        (lambda: build("llama"), compress.GPTQ(group_size=16, statistics="float64")),
        (lambda: build("llama"), compress.SmoothQuant()),
        (lambda: made("deepseek-v3"), compress.GPTQ(group_size=16, statistics="float64")),
        (lambda: build("t5"), compress.GPTQ(group_size=16, statistics="float64")),
    ],
    ids=["drift", "folded, inputs rounded", "experts", "two stacks"],
)
def test_a_run_that_offloads_and_splits_gives_the_same_codes(make, p, monkeypatch):
    kept, lean = make(), make()
    asked = {"calibration": tokens(6), "batch_size": 4}
    before = compress.quantize(kept, p, **asked).record
    allow(monkeypatch, WAYS["split"])
    monkeypatch.setattr("compress.passes.options.second_order.AT_ONCE", 2**9)
    after = compress.quantize(lean, p, **asked).record
    assert after.block_forwards > 6 * before.block_forwards
    assert all(torch.equal(a, b) for a, b in zip(kept.parameters(), lean.parameters(), strict=True))


@pytest.mark.first
@pytest.mark.parametrize("way", ["split", "offloaded", "repeated", "kept"])
def test_the_forecast_is_the_peak_of_what_lives_on_the_device(way, monkeypatch):
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": WIDE, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=64)).eval()
    allow(monkeypatch, WAYS[way])
    gptq = compress.GPTQ(group_size=32)
    told = peak_of(plan(model, [gptq], valued=False), TokenCounts(SAMPLES, LENGTH, BATCH), 4, 0, own=True)
    live, solving, apply = LiveMemory(model, monkeypatch), set[int](), compress.GPTQ.apply

    def watched(self, site):
        live.most = live.alive.copy()
        made = apply(self, site)
        solving.add(live.most[WIDE * WIDE * 4])
        return made

    monkeypatch.setattr(compress.GPTQ, "apply", watched)
    with live:
        compress.quantize(model, gptq, calibration=torch.randint(64, (SAMPLES, LENGTH)), batch_size=BATCH)
    first = sum(p.nbytes for p in model.model.layers[0].parameters())  # a block that is done is the host's
    in_use = told.block + told.activations + told.statistics + told.solving
    assert 0.85 < in_use / (live.peak - first) < 1.15
    if told.mode.offloads:
        assert max(solving) <= 3


def test_a_run_whose_memory_runs_out_begins_again_in_a_leaner_mode(monkeypatch):
    """Of a device that has room for one sample, which no forecast knew."""
    enough, short = build("llama"), build("llama")
    asked = {"calibration": tokens(6), "batch_size": 3}
    gptq = compress.GPTQ(group_size=16, statistics="float64")
    compress.quantize(enough, gptq, **asked)

    def forward(block, calls, *how):
        if len(calls[0].hidden) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return suspended_forward(block, calls, *how)

    monkeypatch.setattr("compress.engine.walk.block.suspended_forward", forward)
    monkeypatch.setattr(peak_memory, "has_own_memory", lambda device: True)
    notes = compress.quantize(short, gptq, **asked).record.notes
    assert sum("has too little after all: forwards are repeated" in note for note in notes) == 4
    assert any(note.endswith("at most 1 samples run at once") for note in notes)
    assert all(torch.equal(a, b) for a, b in zip(enough.parameters(), short.parameters(), strict=True))
