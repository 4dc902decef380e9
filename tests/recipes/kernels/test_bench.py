"""The benchmark of kernels on the CPU, tiny: what is refused, what is written, and that what is wrong is not timed."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Outcome, program
from planar import spoil

from compress.evaluation.report import wording
from compress.evaluation.report.content import Picture, ReportTable, Words
from compress.evaluation.report.page import as_html
from compress.recipes.studies.kernels import bench, ceilings, plot, products, tables

CPU = torch.device("cpu")
LINEARS = ("--device", "cpu", "--shapes", "64x256,96x128", "--tokens", "1,5", "--rounds", 2)
NOT_MINE = "exists and is not what compress writes there; give another file, or --overwrite"


def measured(*words: object) -> Outcome:
    return program(bench.bench, "bench", *words)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few copies of weights, and ceilings of small tensors in few rounds: figures that nobody may quote."""
    monkeypatch.setattr(products, "CACHE_BYTES", 1)
    monkeypatch.setattr(ceilings, "COPY_BYTES", {"cpu": 2**16})
    monkeypatch.setattr(ceilings, "SIDE", {"cpu": 32})
    monkeypatch.setattr(ceilings, "MAX_ROUNDS", 20)


def written(path: Path) -> dict:
    assert not path.with_name(path.name + ".partial").exists()
    return json.loads(path.read_text(encoding="utf-8"))


REFUSED = {
    "a shape of one size": (("--shapes", "4096"), "outputs x inputs"),
    "a shape of words": (("--shapes", "axb"), "outputs x inputs"),
    "an empty shape": (("--shapes", "64x128,"), "outputs x inputs"),
    "a shape of no outputs": (("--shapes", "0x128"), "outputs x inputs"),
    "inputs that no group divides": (("--shapes", "64x100"), "multiple of 128"),
    "no tokens": (("--tokens", "0"), "positive numbers"),
    "tokens of words": (("--tokens", "1,two"), "positive numbers"),
    "no rounds": (("--rounds", "0"), "at least 1"),
    "an unknown dtype": (("--dtype", "int3"), "bfloat16, float16, float32"),
    "an unknown device": (("--device", "gpu"), "usable here: cpu"),
    "tuning without a GPU": (("--device", "cpu", "--tune"), "on a GPU; the device is cpu"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_ends_with_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("work has begun")

    monkeypatch.setattr(bench, "measure_ceilings", never)
    words, part = REFUSED[name]
    found = measured(*words, "--json", tmp_path / "speed.json")
    assert (found.code, found.out) == (2, ""), found
    assert found.err.startswith("compress: ")
    assert found.err.count("\n") == 1
    assert part in found.err
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_file_is_refused_before_the_work(tmp_path: Path) -> None:
    assert measured(*LINEARS, "--json", tmp_path / "no" / "file").code == 2
    assert program(plot.plot, "plot", tmp_path / "speed.json", tmp_path / "no" / "file").code == 2


def test_a_file_of_somebody_else_is_not_replaced_unasked(tmp_path: Path) -> None:
    for name, text in (("mine.json", "{}"), ("mine.html", "<!doctype html><title>mine</title>")):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        words = (bench.bench, "bench", "--json", path) if name == "mine.json" else (plot.plot, "plot", "a.json", path)
        outcome = program(*words)
        assert outcome.code == 2
        assert f"{path} {NOT_MINE}" in outcome.err
        assert path.read_text(encoding="utf-8") == text


def check_facts(found: dict) -> None:
    assert (found["format"], found["complete"]) == (1, True)
    assert found["command"].startswith("python -m compress.recipes.studies.kernels.bench --device cpu")
    assert {"commit", "modified", "date", "device", "device_type", "threads", "load", "cuda"} <= found.keys()
    assert found["versions"]["torch"] == metadata.version("torch")
    assert found["settings"]["rounds"] == 2
    assert found["settings"]["quoted"] == "minimum"
    assert {"copy", "read", "bfloat16", "float16", "float32", "int8", "uint8"} == found["ceilings"].keys()
    assert all(c.get("per_s", 0) > 0 or c["skipped"] for c in found["ceilings"].values())


def needs_no_network(directory: Path) -> None:
    """The page beside the report is whole."""
    assert {path.name for path in directory.iterdir()} == {"speed.json", "speed.html"}
    page = (directory / "speed.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert not re.search(r"<script|url\(|@import|https?://", page)


def test_linears_end_to_end(tmp_path: Path) -> None:
    outcome = measured(*LINEARS, "--json", tmp_path / "speed.json")
    assert outcome.code == 0, outcome.err
    assert program(plot.plot, "plot", tmp_path / "speed.json", tmp_path / "speed.html").code == 0
    needs_no_network(tmp_path)
    found = written(tmp_path / "speed.json")
    check_facts(found)
    assert found["settings"]["shapes"] == [[64, 256], [96, 128]]
    assert {(e["N"], e["K"], e["M"]) for e in found["results"]} == {
        (64, 256, 1),
        (64, 256, 5),
        (96, 128, 1),
        (96, 128, 5),
    }
    for entry in found["results"]:
        if "skipped" not in entry:
            assert entry["share"] == pytest.approx(entry["limit_ms"] / entry["time_ms"])
            assert entry["bound"] in ("memory", "compute")
            assert entry["rounds"] == 2
    for part in ("ceilings of ", "64 x 256", "w4a16", "not measured: gemlite w4a16 (64x256 M=1, 64x256 M=5, 96x128"):
        assert part in outcome.out


def test_json_on_standard_output_is_all_that_is_there() -> None:
    found = measured("--device", "cpu", "--shapes", "64x128", "--tokens", "1", "--rounds", 1, "--json", "-").json()
    assert found["complete"] is True


def test_a_wrong_kernel_fails_the_command_and_is_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, 1.05)
    outcome = measured(*LINEARS, "--json", tmp_path / "speed.json")
    assert outcome.code == 1
    assert outcome.err.splitlines()[-1].startswith("compress: wrong or failed, and not timed: w4a16 64x256 M=1")
    found = written(tmp_path / "speed.json")
    assert len(found["failures"]) == 8  # w4a16 and w8a16 at two shapes and two numbers of tokens
    assert all("time_ms" not in e for e in found["results"] if e["candidate"] in ("w4a16", "w8a16"))
    assert any("time_ms" in e for e in found["results"] if e["candidate"] == "w8a8")


def test_work_that_fails_leaves_what_it_had_and_no_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = products.measure

    def measure(N: int, *rest: object) -> object:
        if N == 96:
            raise OSError(5, "the machine is on fire")
        return right(N, *rest)

    monkeypatch.setattr(products, "measure", measure)
    assert measured(*LINEARS, "--json", tmp_path / "speed.json").code == 1
    assert [path.name for path in tmp_path.iterdir()] == ["speed.json.partial"]
    left = json.loads((tmp_path / "speed.json.partial").read_text())
    assert left["complete"] is False
    assert {e["N"] for e in left["results"]} == {64}


def test_tuning_is_asked_for_the_products_that_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class TunedProduct:
        op: str
        M: int
        N: int
        K: int
        bits: int
        group_size: int
        dtype: torch.dtype

        def stored(self) -> dict[str, Any]:
            return vars(self)

    def answer(problems: list[TunedProduct], device: torch.device, say: Callable[[str], object]) -> list[TunedProduct]:
        say(f"{len(problems)} on {device}")
        return problems

    monkeypatch.setattr(bench, "TunedProduct", TunedProduct)
    monkeypatch.setattr(bench, "tune", answer)
    wanted = bench.linear_options(shapes="64x128", tokens="1,16", device="cpu")
    said: list[str] = []
    found = bench.tune_products(wanted, said.append)
    assert said == ["6 on cpu"]
    assert [(p["op"], p["M"], p["bits"], p["group_size"]) for p in found] == [
        (op, M, bits, group)
        for M in (1, 16)
        for op, bits, group in (("weight_only", 4, 128), ("weight_only", 8, -1), ("w8a8", 8, -1))
    ]


def test_where_two_of_four_gain_nothing_is_said() -> None:
    where = {"N": 64, "K": 128, "candidate": "2:4 w4a16"}
    found = [{**where, "M": M, "speedup_over": {"dense": 3.0, "w4a16": ratio}} for M, ratio in ((1, 1.2), (8, 0.5))]
    found += [
        {**where, "M": 64, "skipped": "why"},
        {**where, "M": 1, "candidate": "2:4", "speedup_over": {"dense": 2.0}},
    ]
    assert tables.slower(found) == ["2:4 w4a16 is no faster than w4a16: 64x128 M=8: 0.50x"]


# --- the page ------------------------------------------------------------------------------------------------------


def spread(*candidates: dict[str, Any]) -> tables.KernelReport:
    """A report on one shape, of dense and of these."""
    found = tables.KernelReport("linears", CPU, {"shapes": [[64, 128]], "dtype": "float32", "rounds": 2})
    found.notes.clear()  # the machine may be busy
    entry = {"N": 64, "K": 128, "M": 8, "ours": True, "share": 0.5, "time_ms": 1.0, "speedup_over": {}}
    found.results += [{**entry, "candidate": "dense", "ours": False, "M": M} for M in (1, 8)]
    found.results += [{**entry, **each} for each in candidates]
    return found


def boxes(svg: str) -> dict[str, float]:
    """The length of every bar, by the name before it."""
    found = re.findall(r'<rect [^>]*width="([\d.]+)"[^>]*/><text [^>]*>([^<]*)</text>', svg)
    return {name: float(width) for width, name in found}


def test_the_page_holds_what_was_measured() -> None:
    half = {"candidate": "w4a16", "speedup_over": {"dense": 2.0}, "time_ms": 0.5}
    lost = {"N": 64, "K": 128, "M": 1, "candidate": "w4a16", "skipped": "why"}
    alone = {"candidate": "torch._int_mm", "ours": False, "speedup_over": {"dense": float("nan")}}
    report = spread(half, alone)
    report.results.append(lost)
    made = plot.page_of(report.content())
    shape, rest, _ = made.articles[0].sections
    _, one, eight, times = shape.blocks
    assert isinstance(one, Picture)
    assert isinstance(eight, Picture)
    assert isinstance(times, ReportTable)
    assert (one.title, eight.title) == ("1 token", "8 tokens")
    assert boxes(one.svg).keys() == {"dense"}
    lengths = boxes(eight.svg)
    assert lengths["w4a16"] == pytest.approx(2 * lengths["dense"], abs=0.2)
    assert lengths["int_mm"] == 0
    assert "2.00x, 50%" in eight.svg
    assert times.rows[:2] == [("dense", "1,000", "1,000"), ("w4a16", wording.NONE, "500.0")]
    assert rest.blocks == [Words("w4a16 (64x128 M=1): why", "note")]


def test_a_page_of_nothing_that_could_be_measured_says_why() -> None:
    report = tables.KernelReport("linears", CPU, {"shapes": [[64, 128]], "dtype": "float32", "rounds": 2})
    report.results.append({"N": 64, "K": 128, "M": 1, "candidate": "w4a16", "skipped": "<b>why</b>"})
    text = as_html(plot.page_of(report.content()))
    assert "w4a16 (64x128 M=1): &lt;b&gt;why&lt;/b&gt;" in text
    assert "<svg" not in text
