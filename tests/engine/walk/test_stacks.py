"""Blocks that are no chain are found before work, and the model is run as one block."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AlbertConfig, AlbertModel

import compress
from compress.base.progress import Silent

GPTQ = compress.GPTQ(drift=0.0, clip=False, refit=0, sweeps=0)


class Shifted(nn.Module):
    """Two blocks, between which the model moves the hidden state where it is given a shift."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)) for _ in range(2))

    def forward(self, x: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        """[B, T, 16] of as many."""
        x = self.layers[0](x)
        return self.layers[1](x if shift is None else x + shift)


@pytest.mark.parametrize(("kinds", "broken"), [("x", False), ("xs", True), ("sx", True)])
def test_a_batch_of_each_kind_is_tried(kinds: str, broken: bool) -> None:
    torch.manual_seed(0)
    batches = [{"x": torch.randn(2, 8, 16)} | ({"shift": torch.ones(1)} if kind == "s" else {}) for kind in kinds]
    record = compress.quantize(Shifted().eval(), GPTQ, calibration=batches).record
    assert any("the hidden state changes between two blocks" in note for note in record.notes) == broken
    assert len({layer.name for layer in record.layers}) == 4


class Noting(Silent):
    """Keeps remarks."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        """Keep it."""
        self.notes.append(message)


def test_a_complete_run_of_one_block_is_found_complete(tmp_path: Path) -> None:
    """Its recipe has other group sizes than one of a chain."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
    config = AlbertConfig(vocab_size=96, embedding_size=16, num_hidden_layers=2, **sizes)
    AlbertModel(config).save_pretrained(tmp_path / "model")
    ids, reporter = torch.randint(96, (4, 16)), Noting()
    more = {"calibration": ids, "output": tmp_path / "out", "verify": False}
    compress.quantize(tmp_path / "model", GPTQ, **more)
    compress.quantize(tmp_path / "model", GPTQ, **more, resume=True, reporter=reporter)
    assert any("is complete" in note for note in reporter.notes)
