"""`recipes/studies/cost/solver_time.py`: turns, what a library that fails leaves, and the models that it writes."""

import json
import sys
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from compress.recipes.studies.cost import solver_time, solver_worker


def asked(random):
    return SimpleNamespace(gptqmodel_python="theirs", llmcompressor_python=None, turns=2, random=random)


def test_libraries_take_turns_and_one_that_fails_is_left_with_its_reason(monkeypatch, tmp_path):
    runs, kept = [], []

    def quantized(case, python, folder, arguments):
        runs.append((case.library, case.title, python))
        if case.library == "gptqmodel":
            return {"error": "no such thing"}
        return {"import": 1.0, "work": float(len(runs)), "versions": {}, "spent": {"solve": 0.5}}

    monkeypatch.setattr(solver_time, "quantized", quantized)
    monkeypatch.setattr(solver_time, "figures", lambda folder: {"kl_mean": 0.1})
    default, plain, trellis, theirs = solver_time.rows_of(asked(random=None), tmp_path, kept.append)
    titles = ("defaults", "as the paper has it", "trellis codes, defaults")
    ours = [("compress", title, sys.executable) for title in titles]
    assert runs == [*ours, ("gptqmodel", "defaults", "theirs"), *ours]
    assert default["work"] == [1.0, 5.0]
    assert plain["work"] == [2.0, 6.0]
    assert trellis["work"] == [3.0, 7.0]
    assert plain["options"]["drift"] == 0
    assert theirs["error"] == "no such thing"
    assert theirs["work"] == []
    assert all(rows[3] is theirs for rows in kept)
    assert default["kl_mean"] == plain["kl_mean"] == 0.1
    assert all("kl_mean" not in row for row in solver_time.rows_of(asked(random=128), tmp_path, kept.append))


def test_a_worker_whose_library_is_missing_says_so(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "gptqmodel", None)
    job = {"library": "gptqmodel", "threads": 1, "tokens": "", "group_size": 32, "options": {}}
    (tmp_path / "job.json").write_text(json.dumps(job))
    solver_worker.main(str(tmp_path / "job.json"), str(tmp_path / "result.json"))
    assert "gptqmodel" in json.loads((tmp_path / "result.json").read_text())["error"]


def test_the_random_model_and_the_first_blocks_of_one_are_read_like_any_other(tmp_path):
    solver_time.write_random(tmp_path / "whole", 128, 2)
    solver_time.write_first(tmp_path / "first", str(tmp_path / "whole"), 1)
    whole, first = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("whole", "first"))
    assert len(whole.model.layers) == 2
    assert len(first.model.layers) == 1
    assert first.dtype == torch.float32
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, whole.state_dict()[name])
    assert AutoTokenizer.from_pretrained(tmp_path / "first").pad_token == "<pad>"
