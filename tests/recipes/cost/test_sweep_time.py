"""`recipes/studies/cost/sweeps.py`: what it runs, and that a sweep has the divergences of separate runs."""

import json
import sys

import pytest
import torch
from commands import command, make_llama, save

from compress.recipes.studies.cost import sweeps


@pytest.mark.slow
def test_a_sweep_and_separate_runs_are_set_beside_each_other(monkeypatch, tmp_path):
    lines = []

    def run(*words):
        lines.append(list(map(str, words)))
        assert command(*words).code == 0
        return float(len(lines))

    save(make_llama(), tmp_path / "model")
    torch.save(torch.randint(2048, (6, 16), generator=torch.Generator().manual_seed(0)), tmp_path / "ids.pt")
    monkeypatch.setattr(sweeps, "cpu_seconds_of", run)
    monkeypatch.setattr("compress.api.job.VERIFY_LIMIT", 0)  # each in a fresh process
    data = ["--calibration", tmp_path / "ids.pt", "--text", tmp_path / "ids.pt", "--text-samples", 2]
    options = ["--bits", 2, 3, "--group-sizes", 32, "--defaults", 16, "--json", tmp_path / "found.json"]
    monkeypatch.setattr(sys, "argv", ["sweeps.py", *map(str, [tmp_path / "model", *data, *options])])
    sweeps.main()
    assert [words[0] for words in lines] == ["sweep", *["quantize", "evaluate"] * 2, "sweep"]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["same_kl"] is True
    assert found["ratio"] == pytest.approx(1 / (2 + 3 + 4 + 5), abs=1e-3)
    assert found["defaults"]["kl"].keys() == {"w2-g16", "w3-g16"}
