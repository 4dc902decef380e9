"""Sweeps: many recipes, one of which fails; what is done stays, what changed is made anew."""

import json
from collections import Counter

import pytest
import torch
from commands import VOCABULARY, command, fast_gptq, make_llama, save

import compress
import compress.search.trial as trial
from compress.base.errors import InputError
from compress.evaluation.evaluation_file import read_evaluation
from compress.evaluation.quality import reference_states
from compress.evaluation.speed import side_by_side
from compress.evaluation.tasks import evaluate as asked_of
from compress.search.sweep_rows import SweepRow, rank
from compress.search.texts import Texts

TEXT = ["--text", "demo", "--text-samples", "4"]


@pytest.fixture
def desk(tmp_path):
    save(make_llama(), tmp_path / "model")
    for name, line in {
        "w8": "rtn: {scheme: w8a16, group_size: 32}",
        "w3": "rtn: {scheme: w3a16, group_size: 32}",
        "odd": "rtn: {scheme: w4a16, group_size: 48}",
    }.items():
        (tmp_path / f"{name}.yaml").write_text(f"passes:\n  - {line}\n")
    return tmp_path


def swept(desk, *recipes, more=()):
    files = [desk / f"{name}.yaml" for name in recipes]
    return command("sweep", desk / "model", *files, *TEXT, "--output", desk / "out", *more)


def test_recipes_are_ranked_and_one_that_fails_ends_nothing(desk):
    made = swept(desk, "w8", "odd", "w3")
    assert made.code == 1
    assert "recipe odd failed: group size 48 does not divide" in made.err
    index = json.loads((desk / "out" / "sweep.json").read_text())
    assert [row["name"] for row in index["rows"]] == ["w3", "w8", "odd"]
    small, large, failed = index["rows"]
    assert small["bytes"] < large["bytes"]
    assert small["kl_mean"] > large["kl_mean"]
    assert small["front"]
    assert failed["kl_mean"] is None
    assert "48" in failed["problem"]
    found = read_evaluation(desk / "out" / small["evaluation"])
    assert (found.kl_mean, found.bytes) == (small["kl_mean"], small["bytes"])
    assert (desk / "out" / "report.html").read_text("utf-8").startswith("<!doctype html>")
    text = (desk / "out" / "report.md").read_text("utf-8")
    assert "w3" in text
    assert "w8" in text


def test_one_group_size_for_every_recipe_that_has_groups(desk):
    (desk / "whole.yaml").write_text("passes:\n  - rtn: {scheme: w8a16, group_size: -1}\n")
    made = swept(desk, "odd", "whole", more=["--group-size", "16", "--json", "-"])
    assert made.code == 0, made.err
    assert "note: group size 16 instead of what the recipes give; without groups, and as they are: whole\n" in made.err
    sizes = {row["name"]: row["recipe"]["passes"][0]["rtn"]["group_size"] for row in made.json()["rows"]}
    assert sizes == {"odd": 16, "whole": -1}
    record = json.loads((desk / "out" / "odd" / "model" / "compress.json").read_text())
    assert {layer["group_size"] for layer in record["layers"]} == {16}


def test_what_is_done_stays_and_what_changed_is_made_anew(desk, monkeypatch):
    assert swept(desk, "w8", "w3", more=["--discard"]).code == 0
    assert not (desk / "out" / "w3" / "model").exists()
    ran = []
    quantize = trial.quantize
    monkeypatch.setattr(trial, "quantize", lambda *a, **k: (ran.append(k["output"].parent.name), quantize(*a, **k)))
    (desk / "w3.yaml").write_text("passes:\n  - rtn: {scheme: w2a16, group_size: 32}\n")
    made = swept(desk, "w8", "w3", more=["--json", "-"])
    assert made.code == 0
    assert ran == ["w3"]
    assert "w8: done before" in made.err
    assert made.json()["rows"][0]["bits_per_weight"] == pytest.approx(3.03, abs=0.01)
    (desk / "out" / "w8" / "evaluation.json").write_text("{")  # nobody's
    assert "recipe w8 failed" in swept(desk, "w8").err


def test_other_files_in_a_folder_are_other_data(tmp_path):
    (tmp_path / "a.txt").write_text("one")
    before = Texts(str(tmp_path), "demo").content()
    assert Texts(tmp_path, "demo").content() == before
    (tmp_path / "a.txt").write_text("two")
    assert Texts(str(tmp_path), "demo").content() != before


def test_a_recipe_that_fails_has_no_figures_of_the_one_before_it(desk):
    assert swept(desk, "w8").code == 0
    (desk / "w8.yaml").write_text((desk / "odd.yaml").read_text())
    for _ in range(2):
        assert "recipe w8 failed: group size 48 does not divide" in swept(desk, "w8").err
    assert json.loads((desk / "out" / "sweep.json").read_text())["rows"][0]["kl_mean"] is None
    assert not (desk / "out" / "report.html").exists()


@pytest.mark.full
def test_a_sweep_that_was_stopped_goes_on(desk, monkeypatch):
    evaluate = trial.evaluate

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trial, "evaluate", stop)
    assert swept(desk, "w8", "w3").code == 130
    monkeypatch.setattr(trial, "evaluate", evaluate)
    ran = []
    quantize = trial.quantize
    monkeypatch.setattr(trial, "quantize", lambda *a, **k: (ran.append(k["output"].parent.name), quantize(*a, **k)))
    assert swept(desk, "w8", "w3").code == 0
    assert ran == ["w3"]  # w8 was quantized, and only evaluated now


@pytest.fixture
def counted(monkeypatch):
    """How often models were asked questions and timed, and the original about a text."""
    found = Counter()

    def count(owner, name, what):
        inner = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: (found.update([what]), inner(*a, **k))[1])

    count(asked_of, "likelihoods", "asked")
    count(side_by_side, "_timing", "timed")
    count(reference_states.StatesWriter, "finish", "original")
    return found


@pytest.mark.full
def test_tasks_and_speed_of_each_recipe_and_of_the_original_once(desk, monkeypatch, counted):
    monkeypatch.setattr(reference_states, "cache_directory", lambda: desk / "cache")
    questions = [{"goal": f"{word} is", "sol1": "one", "sol2": "two of it", "label": 0} for word in ("he", "it", "who")]
    (desk / "task.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions))
    assert swept(desk, "w8", "w3").code == 0
    assert counted == {"original": 1}
    checkpoint = desk / "out" / "w8" / "model" / "model.safetensors"
    before = checkpoint.stat().st_mtime_ns
    both = ["--task", desk / "task.jsonl", "--questions", 2, "--speed"]
    made = swept(desk, "w8", "w3", more=[*both, "--json", "-"])
    assert made.code == 0, made.err
    assert counted == {"original": 1, "asked": 3, "timed": 3}  # two recipes, and the original
    assert checkpoint.stat().st_mtime_ns == before  # evaluated again, no more
    speeds = []
    for row in made.json()["rows"]:
        found = read_evaluation(desk / "out" / row["evaluation"])
        (task,) = found.tasks
        assert (task.questions, task.available, task.interval is None) == (2, 3, False)
        accuracy = {"accuracy": task.accuracy.value, "difference": task.difference.value}
        assert (row["tasks"], row["decode"]) == ({"task": accuracy}, found.speed.model.decode.value)
        assert not found.speed.in_turns
        speeds.append(found.speed.reference)
    assert speeds[0] == speeds[1] is not None
    text = (desk / "out" / "report.md").read_text("utf-8")
    assert "Task task" in text
    assert "decoding, tokens/s" in text
    assert swept(desk, "w8", "w3", more=both).code == 0
    assert swept(desk, "w8", "w3", "odd").code == 1  # less than was asked: there already
    assert counted == {"original": 1, "asked": 3, "timed": 3}
    (desk / "out" / "original.json").write_text("{}")  # nobody's
    assert swept(desk, "w8", more=["--task", desk / "task.jsonl", "--speed"]).code == 0
    assert counted == {"original": 1, "asked": 5, "timed": 5}


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--questions", 2], "questions are for tasks"),
        (["--task", "no.jsonl"], "task 'no.jsonl' is no file"),
        (["--text-length", 1], "length"),
        (["--text", "no.txt"], "no.txt"),
        (["--group-size", -2], "recipe 'w8': group size -2; allowed"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_work(desk, more, says):
    outcome = swept(desk, "w8", more=more)
    assert outcome.code == 2
    assert says in outcome.err
    assert not (desk / "out").exists()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--calibration", "no.txt"], "text file 'no.txt' does not exist"),
        (["--calibration", "demo", "--samples", 0], "samples 0; allowed: 1 or more"),
        (["--calibration", "demo", "--training", "no.txt"], "text file 'no.txt' does not exist"),
        (["--calibration", "demo", "--batch-size", 0], "batch size 0; allowed"),
    ],
)
def test_data_that_cannot_be_used_is_refused_before_work(desk, more, says):
    (desk / "train.yaml").write_text("passes:\n  - gptq: {group_size: 32}\n  - train: {steps: 1}\n")
    outcome = swept(desk, "w8", "train", more=more)
    assert outcome.code == 2
    assert says in outcome.err
    assert not (desk / "out").exists()


@pytest.mark.full
def test_passes_and_token_ids_from_python_go_on_where_they_were(desk):
    ids = [torch.randint(VOCABULARY, (3, 16), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    recipes = {"rtn": compress.RTN(group_size=32), "gptq": [fast_gptq(group_size=32)]}
    how = {"calibration": ids[0], "output": desk / "out"}
    made = compress.sweep(desk / "model", recipes, text=ids[1], **how)
    assert [row.problem for row in made.rows] == [None, None]
    evaluation = desk / "out" / "gptq" / "evaluation.json"
    before = evaluation.stat().st_mtime_ns
    assert compress.sweep(desk / "model", recipes, text=ids[1].clone(), **how) == made
    assert evaluation.stat().st_mtime_ns == before
    other = compress.sweep(desk / "model", {"gptq": recipes["gptq"]}, text=ids[1].flip(0)[:2], **how)
    assert other.rows[0].kl_mean != {row.name: row for row in made.rows}["gptq"].kl_mean
    for wrong, says in (({}, "no recipe given"), ({"a/b": compress.RTN()}, "without slashes"), ("w8.yaml", "is one")):
        with pytest.raises(InputError, match=says):
            compress.sweep(desk / "model", wrong, text=ids[1], **how)


def test_windows_of_training_data_are_as_asked_for(desk, monkeypatch):
    """Of recipes that calibrate nothing, too."""
    asked = []

    def quantize(*_, **words):
        asked.append((words["calibration"], words["training"], words["length"], words["bos"]))
        raise InputError("no more")

    monkeypatch.setattr(trial, "quantize", quantize)
    recipes = {"train": compress.Train(steps=1), "rtn": compress.RTN(group_size=32)}
    how = {"training": "demo", "length": 16, "bos": "window", "output": desk / "out"}
    compress.sweep(desk / "model", recipes, text="demo", text_samples=2, **how)
    assert asked == [(None, "demo", 16, "window"), (None, None, None, None)]


def test_the_front_is_what_nothing_beats():
    figures = {"a": (1, 9.0), "b": (2, 5.0), "c": (3, 6.0), "d": (4, 5.0), "e": (2, 5.0)}
    rows = [SweepRow(name, {}, bytes=size, kl_mean=kl) for name, (size, kl) in figures.items()]
    found = rank([*rows, SweepRow("x", {}, problem="why")])
    assert [row.name for row in found if row.front] == ["a", "b", "e"]
    assert found[-1].name == "x"
