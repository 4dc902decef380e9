"""`compress.report`: one page of evaluations, results and paths, in a notebook and in a file."""

import html
import json
from pathlib import Path

import evaluations
import pytest

import compress
from compress.base.errors import InputError
from compress.checkpoint.write.record import RunRecord
from compress.jobs.job import Result


def test_a_page_names_evaluations_and_paths_and_is_the_same_in_a_notebook_and_in_a_file(tmp_path: Path) -> None:
    first, second, third = evaluations.sweep()[:3]
    kept = tmp_path / "third.json"
    kept.write_text(json.dumps(third.to_dict()), encoding="utf-8")
    page = compress.report([first, second, kept])
    shown = page._repr_html_()
    assert "\n" not in shown
    page.save(tmp_path / "page.html")
    written = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert html.unescape(shown.split('srcdoc="')[1].rsplit('"', 1)[0]) == written
    assert all(f">{name}<" in written for name in ("smollm2-w4", "rtn-w4", "third"))
    assert repr(page).startswith("3 runs compared: ")
    assert len(repr(page)) < 600
    page.save(tmp_path / "page.html")  # ours, replaced


def test_names_come_from_a_mapping_or_are_numbered() -> None:
    first, second, *_ = evaluations.sweep()
    names = [article.name for article in compress.report({"mine": first, "theirs": second}).content.articles]
    assert names == ["mine", "theirs"]
    names = [article.name for article in compress.report([first, first]).content.articles]
    assert names == ["smollm2-w4 1", "smollm2-w4 2"]
    assert [article.name for article in compress.report(first).content.articles] == ["smollm2-w4"]


@pytest.mark.parametrize(
    ("runs", "message"),
    [([], "nothing to report on"), ([Result(RunRecord())], "not evaluated"), (["no/such"], "does not exist")],
    ids=["none", "memory", "path"],
)
def test_what_cannot_be_reported_on_is_a_line(runs: list[object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        compress.report(runs)


def test_a_page_is_saved_as_html_and_over_nothing_of_others(tmp_path: Path) -> None:
    page = compress.report(evaluations.whole())
    with pytest.raises(InputError, match=r"ends in \.html"):
        page.save(tmp_path / "page.txt")
    (tmp_path / "mine.html").write_text("mine", encoding="utf-8")
    with pytest.raises(InputError, match="not what compress writes"):
        page.save(tmp_path / "mine.html")
