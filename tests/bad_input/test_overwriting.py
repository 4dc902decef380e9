"""Files that a command would write to: new, or known by their content as compress's own, or --overwrite was said."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import Desk, Outcome, command

MINE = {
    ".json": '{"model_type": "llama", "layers": 2}',
    ".html": "<!doctype html><title>mine</title>",
    ".md": "# mine\n",
    ".svg": "<svg/>",
    ".yaml": "passes: []\n",
}
WRITERS: dict[str, Callable[[Desk, Path], Outcome]] = {
    "evaluate --json": lambda d, p: command("evaluate", d.model, "--text", d.tokens, "--json", p),
    "inspect --json": lambda d, p: command("inspect", d.model, "--json", p),
    "verify --json": lambda d, p: command("verify", d.model, "--json", p),
    "quantize --json": lambda d, p: d.rtn(d.model, "--json", p),
    "export --json": lambda d, p: command("export", d.model, "--to", "dense", "--output", d.output, "--json", p),
    "bench --json": lambda d, p: command("bench", "tiny", "--json", p),
    "sweep --json": lambda d, p: command(
        "sweep", d.model, "w8a16-rtn", "--text", d.tokens, "--output", d.output, "--json", p
    ),
    "cache-logits --json": lambda d, p: command(
        *("cache-logits", d.model, "--output", d.here / "said.safetensors", "--calibration", d.tokens, "--json", p)
    ),
    "fit --recipe-only --output .yaml": lambda d, p: command(
        *("fit", d.model, "--bits", 3, "--recipe-only", "--calibration", d.tokens, "--text", d.tokens, "--output", p)
    ),
    "report --output .html": lambda d, p: command("report", "a", "--output", p),
    "report --output .svg": lambda d, p: command("report", "a", "b", "--output", p),
    "report --markdown .md": lambda d, p: command("report", "a", "--markdown", p),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_of_somebody_else_is_not_replaced_unasked(writer: str, desk: Desk) -> None:
    ending = next(word for word in MINE if word[1:] in writer)
    path = desk.file(f"precious{ending}", MINE[ending])
    outcome = WRITERS[writer](desk, path)
    assert outcome.code == 2
    assert f"{path} exists and is not what compress writes there; give another file, or --overwrite" in outcome.err
    assert path.read_text() == MINE[ending]
    assert not desk.output.exists()


def test_weights_are_not_replaced_by_cached_logits(desk: Desk) -> None:
    model = desk.copy()
    before = (model / "model.safetensors").read_bytes()
    words = ["cache-logits", desk.model, "--calibration", desk.tokens, "--quiet", "--output"]
    outcome = command(*words, model / "model.safetensors")
    assert outcome.code == 2
    assert "exists and holds no cached logits; give another file, or --overwrite" in outcome.err
    assert (model / "model.safetensors").read_bytes() == before
    assert command(*words, desk.here / "said.safetensors").code == 0
    assert command(*words, desk.here / "said.safetensors").code == 0, "ours"
    assert command(*words, model / "model.safetensors", "--overwrite").code == 0
    assert (model / "model.safetensors").read_bytes() != before


@pytest.mark.parametrize("name", ["sweep.json", "original.json", "report.html", "report.md", "w8a16-rtn/run.json"])
def test_a_sweep_replaces_no_file_of_somebody_else(name: str, desk: Desk) -> None:
    path = desk.output / name
    path.parent.mkdir(parents=True)
    path.write_text("{}\n" * 2)
    outcome = command("sweep", desk.model, "w8a16-rtn", "--text", desk.tokens, "--output", desk.output)
    assert outcome.code == 2
    assert f"{path} exists and is not what compress writes there; move it" in outcome.err
    assert path.read_text() == "{}\n" * 2


def test_what_commands_wrote_they_replace(desk: Desk, llama_w4: Path) -> None:
    """And what somebody else did where --overwrite is said."""
    output, kept = Path(shutil.copytree(llama_w4, desk.here / "w4")), desk.here / "kept.json"
    evaluated = command("evaluate", output, "--text", desk.tokens, "--json", kept, "--quiet")
    assert evaluated.code == 0, evaluated
    writers: dict[str, list[object]] = {
        "a.json": ["evaluate", output, "--text", desk.tokens, "--json"],
        "b.json": ["inspect", output, "--json"],
        "c.json": ["inspect", output, "--kernels", "--json"],
        "e.json": ["report", output, "--json"],
        "f.json": ["verify", output, "--json"],
        "g.html": ["report", output, "--output"],
        "h.md": ["report", output, "--output"],
        "i.md": ["report", output, "--markdown"],
        "j.svg": ["report", output, kept, "--output"],
        "k.json": ["report", output, "--output"],
    }
    for name, words in writers.items():
        path = desk.here / name
        for again in (False, True):
            outcome = command(*words, path, "--quiet")
            assert outcome.code == 0, (name, again, outcome)
    for name in ("b.json", "g.html"):
        path, ending = desk.here / name, Path(name).suffix
        path.write_text(MINE[ending])
        outcome = command(*writers[name], path, "--overwrite", "--quiet")
        assert outcome.code == 0, (name, outcome)
        assert path.read_text(encoding="utf-8") != MINE[ending]
    record = output / "compress.json"
    before = json.loads(record.read_text())
    assert f"{record} is where a run keeps its record" in command("inspect", output, "--json", record).err
    assert json.loads(record.read_text()) == before
