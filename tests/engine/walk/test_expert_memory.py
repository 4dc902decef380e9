"""Experts of a mixture are opened one by one: a block of them is never in memory."""

import torch
from commands import PLAIN_GPTQ
from live_memory import LiveMemory
from mixtures import made, to_float8
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

import compress
from compress.checkpoint.write.writer import Writer, aside

EXPERTS, WIDTH, SAMPLES, LENGTH = 48, 64, 4, 16


def test_a_run_takes_less_memory_than_a_block_of_experts_has_bytes(tmp_path, monkeypatch):
    sizes = {"hidden_size": WIDTH, "moe_intermediate_size": WIDTH, "n_routed_experts": EXPERTS}
    made("deepseek-v3", **sizes).bfloat16().save_pretrained(tmp_path / "model")
    to_float8(tmp_path / "model")
    live = LiveMemory(nn.Module(), monkeypatch)

    def in_a_file(sink: Writer, decided: compress.Decision) -> compress.Decision:
        with _disable_current_modes():
            kept = aside(sink, decided)
        held = [t.untyped_storage() for term in kept.weight.terms for t in vars(term).values() if isinstance(t, Tensor)]
        live.elsewhere += held
        live.uncounted |= {storage._cdata for storage in held}
        return kept

    monkeypatch.setattr("compress.engine.walk.block.aside", in_a_file)
    gptq = compress.GPTQ(scheme="w4a16", group_size=16, **PLAIN_GPTQ)
    told = compress.plan(tmp_path / "model", gptq, samples=SAMPLES, length=LENGTH, batch_size=2).memory
    tokens = torch.randint(1, 128, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(0))
    with live:
        compress.quantize(
            tmp_path / "model", gptq, output=tmp_path / "out", calibration=tokens, batch_size=2, verify=False
        )
    block = EXPERTS * 3 * WIDTH * WIDTH * torch.bfloat16.itemsize
    assert live.peak < block
    in_use = told.block + told.activations + told.statistics + told.solving
    assert 0.8 < in_use / live.peak < 1.25
