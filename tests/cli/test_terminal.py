"""Whatever a name holds, brackets, emoji or control characters: it is shown as it is; the terminal obeys nothing."""

import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from commands import PLAIN_GPTQ, Outcome, command
from rich.table import Table
from safetensors.torch import load_file, save_file

from compress.base.terminal import PlainConsole, visible
from compress.checkpoint.write.record import RangeRecord
from compress.cli.commands.inspect import kernel_lines, layer_table, size_lines, table_of_groups
from compress.cli.evaluation_tables import show_evaluation, tables_of
from compress.cli.main import main
from compress.cli.progress import Lines, reporting
from compress.evaluation.cost.routes import KernelRow, LibraryRow
from compress.evaluation.cost.size import Size, SizeRow
from compress.evaluation.document import Evaluation, Figure, Named, TaskResult, TextResult
from compress.evaluation.report.calibration import clipping_line, table
from compress.evaluation.report.terminal import show as render
from compress.evaluation.speed.report import SpeedReport
from compress.evaluation.speed.speed_tables import tables

# Closes a tag that nobody opened, opens one, an emoji; a terminal's title, a new line, backwards from here, not UTF-8.
NASTY = "a[/red][bold]:smile:\x1b]0;owned\x07\r\n\u202e\x9b1m\udcff"
SHOWN = r"a[/red][bold]:smile:\x1b]0;owned\x07\r\n\u202e\x9b1m\udcff"


def unwrapped(text: str) -> str:
    return "".join(text.split())


def check(text: str, shown: str = SHOWN) -> None:
    assert unwrapped(shown) in unwrapped(text), text
    assert all(line.isprintable() for line in text.split("\n")), text


def test_what_is_printed_stays_and_everything_else_is_written_out() -> None:
    assert visible("naïve [x] 模型 🙂") == "naïve [x] 模型 🙂"
    assert visible(NASTY) == SHOWN


def evaluation() -> Evaluation:
    figures = {name: Figure(1.0, 0.5) for name in ("perplexity", "reference_perplexity", "kl_mean")}
    text = TextResult(NASTY, NASTY, "held-out", NASTY, 1, 1, 1, 1, figures)
    return Evaluation(Named(NASTY, NASTY, 1, "float32"), [text])


def answers() -> Evaluation:
    return Evaluation(Named(NASTY, NASTY, 1, "float32"), [], tasks=[TaskResult(NASTY, NASTY, NASTY, 1, Figure(1.0))])


def ranges() -> list[RangeRecord]:
    return [RangeRecord(NASTY, "input", NASTY, 0.0, 1.0, 0.0, 1.0, 0.5, 1, also=[NASTY])]


def bench() -> SpeedReport:
    report = SpeedReport(
        "model", torch.device("cpu"), {"model": NASTY, "dtype": "", "prompt": 1, "new": 1, "rounds": 1}
    )
    report.results.append({"variant": NASTY, "batch": 1, "skipped": NASTY})
    report.notes[:] = [NASTY]
    report.facts["device"] = NASTY
    return report


SIZE = Size(1, 1.0, 1.0, 1, 1, NASTY)
ROWS = [SizeRow(NASTY, (1,), NASTY, 1.0, 1, NASTY)]
# Every table and the sentences around it: what prints it, and how often the name is in it.
PRINTED = {
    "evaluations": (lambda: show_evaluation(evaluation(), NASTY, NASTY, details=False), 3),
    "tasks": (lambda: render(*tables_of([(NASTY, answers())], None)), 1),
    "kernels": (
        lambda: render(
            *kernel_lines(
                [KernelRow(NASTY, (1, 1), NASTY, {1: NASTY}, (NASTY,), (NASTY,))],
                NASTY,
                [LibraryRow(NASTY, None, (NASTY,))],
            )
        ),
        9,
    ),
    "calibration": (lambda: render(table(ranges()), clipping_line(ranges())), 4),
    "inspection": (lambda: render(layer_table(ROWS), table_of_groups(ROWS), *size_lines(SIZE)), 4),
    "bench": (lambda: render(*tables(bench())), 6),
}


@pytest.mark.parametrize("name", PRINTED)
def test_a_table_shows_names_as_they_are(
    name: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compress.base.terminal.WIDTH", 1000)  # nothing is cut or wrapped
    act, times = PRINTED[name]
    act()
    out = capsys.readouterr().out
    check(out)
    assert out.count(SHOWN) >= times, out


def test_titles_and_cells_are_text_wherever_they_are_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    table = Table(NASTY, title=NASTY, caption=NASTY)
    table.add_row(NASTY)
    PlainConsole(file=out, width=500).print(table, NASTY)
    check(out.getvalue())
    assert out.getvalue().count(SHOWN) == 5


def shown(table: Table, width: int) -> list[str]:
    """What a terminal of so many columns shows of a table, without the blanks behind its lines."""
    out = io.StringIO()
    PlainConsole(file=out, force_terminal=True, no_color=True, width=width).print(table)
    plain = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())
    return [line.rstrip() for line in plain.splitlines()]


def layers() -> Table:
    table = Table(
        "layer", "shape", "bytes", "remark", title="all layers of the model, by their names", title_justify="left"
    )
    for i in range(3):
        table.add_row(f"model.layers.{i}.post_attention_layernorm.weight", "128 x 256", "16912", "loss 1.00e-03, damp")
    table.add_row("", "256", "512", "")
    return table


def test_a_table_that_fits_a_terminal_stays_a_table() -> None:
    found = shown(layers(), 120)
    assert found[0] == "all layers of the model, by their names"
    assert len({len(line) for line in found[1:]}) == 1


def test_where_a_table_is_too_wide_a_row_becomes_two_paragraphs() -> None:
    assert shown(layers(), 50)[:4] == [
        "all layers of the model, by their names",
        "model.layers.0.post_attention_layernorm.weight",
        "  shape: 128 x 256; bytes: 16912; remark: loss",
        "  1.00e-03, damp",
    ]
    assert shown(layers(), 50)[-1] == "  shape: 256; bytes: 512"  # of the row above


def test_few_rows_and_many_columns_change_places() -> None:
    """The figures of a model beside the original's, at 80 columns: whole."""
    table = Table("model", *(f"figure {i}" for i in range(9)), title="of two models, and a sentence of some length")
    table.add_row("demo", *"-" * 9)
    table.add_row("OUT", *("26.4524 ± 4.7372" for _ in range(9)))
    title, *found = shown(table, 80)
    assert title == "of two models, and a sentence of some length"
    assert [line.split("│")[1:4] for line in found if "figure 8" in line] == [
        [" figure 8 ", "    - ", " 26.4524 ± 4.7372 "]
    ]
    assert not any("…" in line for line in found)


@pytest.mark.parametrize("width", [40, 80])
def test_every_table_is_whole_at_any_width(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def narrow(stderr: bool = False) -> PlainConsole:
        return PlainConsole(force_terminal=True, no_color=True, width=width)

    monkeypatch.setattr("compress.evaluation.report.terminal.console", narrow)
    for act, _ in PRINTED.values():
        act()
    out = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert "…" not in out
    assert unwrapped(SHOWN) in unwrapped(out)


def test_a_stream_without_a_character_is_given_it_spelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the C locale, where standard output is ASCII; a column is as wide as what is in it."""
    written = io.BytesIO()
    with monkeypatch.context() as patch:
        for name in ("stdout", "stderr"):
            patch.setattr(sys, name, io.TextIOWrapper(written, encoding="ascii", write_through=True))
        patch.setattr(sys, "argv", ["compress", "--version"])
        with pytest.raises(SystemExit):
            main()
        for act, _ in PRINTED.values():
            act()
        print("na\u00efve 0.5 \u00b1 0.1", file=sys.stderr)
        for name in ("stdout", "stderr"):
            getattr(sys, name).detach()
    lines = written.getvalue().decode("ascii").splitlines()
    assert "na\\xefve 0.5 +/- 0.1" in lines
    rows = [line for line in lines if line.startswith("|") and "+/- 0.5" in line]
    assert len(rows) > 1
    assert len({len(line) for line in rows}) == 1


def test_progress_and_notes_show_names_as_they_are(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = Lines("quantize")
    lines.step(1, 2, NASTY)
    lines.note(NASTY)
    err = capsys.readouterr().err
    check(err)
    assert err.count(SHOWN) == 2
    out = io.StringIO()
    terminal = PlainConsole(file=out, force_terminal=True, width=500)
    monkeypatch.setattr("compress.cli.progress.console", lambda stderr: terminal)
    with reporting("quantize", quiet=False) as reporter:
        reporter.step(1, 2, NASTY)
        reporter.note(NASTY)
    assert f"note: {SHOWN}" in out.getvalue()
    assert f"quantize {SHOWN}" in out.getvalue()
    assert "\x1b]0" not in out.getvalue()  # rich's own escapes are others


def test_commands_show_names_of_files_and_tensors_as_they_are(
    llama: Path, token_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # No surrogates; and safetensors opens names of UTF-8 alone, which are ASCII where the locale has another encoding.
    encoding = "utf-8" if sys.getfilesystemencoding() == "utf-8" else "ascii"
    name = NASTY.encode(encoding, "ignore").decode(encoding)
    shown = visible(name)

    def run(*words: object, code: int = 0) -> Outcome:
        outcome = command(*words)
        assert outcome.code == code, outcome
        for text in (outcome.out, outcome.err):
            assert all(line.isprintable() for line in text.split("\n")), outcome
        return outcome

    model, tokens, out = Path(name), f"{name}.pt", f"o{name}"
    shutil.copytree(llama, model)
    shutil.copyfile(token_file, tokens)
    weights = load_file(llama / "model.safetensors")
    save_file({**weights, f"evil{name}": torch.zeros(1)}, model / "model.safetensors", {"format": "pt"})
    plain = [word for key, value in PLAIN_GPTQ.items() for word in ("--set", f"{key}={value}")]
    words = ["--group-size", 32, *plain, "--calibration", tokens, "--samples", 9, "--output", out]
    made = run("quantize", model, *words)
    check(made.out, f"{shown} -> o{shown}")
    check(made.err, f"like evil{shown}")
    check(run("inspect", model).out, f"evil{shown}")
    check(run("evaluate", out, "--reference", model, "--text", tokens).out, f"{shown}.pt: 90 tokens")
    check(run("inspect", out).out, "lm_head.weight")
    (model / "config.json").write_text(json.dumps({"model_type": name}))
    check(run("inspect", model, "--kernels", code=2).err, shown.replace(r"\r\n", " "))
    check(run("generate", model, "--prompt", "a", code=2).err, shown.replace(r"\r\n", " "))
    check(run("methods", "gptq", name, code=2).err, shown)
    check(run(f"--{name}", code=2).err, shown)
