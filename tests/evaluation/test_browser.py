"""The pages of reports in a real browser: nothing is fetched, nothing runs, everything is seen, whoever looks."""

from collections.abc import Iterator
from pathlib import Path

import browser
import evaluations
import pytest
import torch
from evaluations import HOSTILE, hostile, runs

from compress.evaluation.report.compose import compose
from compress.evaluation.report.page import as_html
from compress.evaluation.speed.report import SpeedReport
from compress.recipes.studies.kernels.plot import page_of
from compress.recipes.studies.kernels.products import candidates
from compress.recipes.studies.kernels.tables import KernelReport

CPU = torch.device("cpu")
PROGRAM = browser.found()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROGRAM is None, reason="no Chromium: apt-get install chromium")]
COMPLAINTS = {"Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"}
OPEN = "document.querySelectorAll('details').forEach(each => { each.open = true })"
BOXES = """[...document.querySelectorAll('svg')].map(each => {
  const box = each.getBoundingClientRect(); return [box.width, box.height, each.querySelectorAll('*').length];
})"""
CUT = """[...document.querySelectorAll('svg text')].filter(each => {
  const text = each.getBoundingClientRect(), drawn = each.ownerSVGElement.getBoundingClientRect();
  return text.width > 0 && (text.left < drawn.left - 1 || text.right > drawn.right + 1);
}).map(each => each.textContent)"""
OVER = """[...document.querySelectorAll('svg')].flatMap(drawn => {
  const found = [...drawn.querySelectorAll('text, rect[width="10.0"]')].map(each => each.getBoundingClientRect());
  const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 4 && b.top < a.bottom - 4;
  return found.filter((a, i) => a.width > 0 && found.slice(i + 1).some(b => meet(a, b)))
    .map(() => drawn.getAttribute('aria-label'));
})"""
CLIPPED = """[...document.querySelectorAll('.wide')].filter(each => each.scrollWidth > each.clientWidth + 1)
  .map(each => each.getAttribute('aria-label'))"""
BEYOND = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def seen() -> Iterator[browser.Browser]:
    assert PROGRAM is not None
    with browser.Browser(PROGRAM) as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of one run, of several, of one whose names mean ill, and of benchmarks."""
    folder = tmp_path_factory.mktemp("pages")
    made = {"one": [evaluations.whole()], "several": evaluations.sweep(), "hostile": [hostile()]}
    for name, found in made.items():
        (folder / f"{name}.html").write_text(as_html(compose(runs(*found))), encoding="utf-8")
    for name, report in (("linears", linears()), ("model", model())):
        (folder / f"{name}.html").write_text(as_html(page_of(report.content())), encoding="utf-8")
        made[name] = []
    return {name: folder / f"{name}.html" for name in made}


def linears() -> KernelReport:
    """Every candidate, of figures of many lengths, with more numbers of tokens than a benchmark has by default."""
    found = KernelReport("linears", CPU, {"shapes": [[4096, 14336]], "dtype": "bfloat16", "rounds": 2})
    for i, M in enumerate((1, 8, 16, 64, 256, 2048, 8192, 2**20)):
        for j, (name, (_, kind)) in enumerate(candidates(torch.randn(1, 128)).items()):
            ours = j not in (0, len(found.results) - 1)
            entry = {"N": 4096, "K": 14336, "M": M, "candidate": name, "kind": kind, "ours": ours}
            over = {} if j == 0 else {"dense": 10.0 ** (i - j) + j}
            found.results.append({**entry, "time_ms": 3.0**j * M, "share": 1 / (1 + j), "speedup_over": over})
    return found


def model() -> SpeedReport:
    settings = {"model": "a" * 70, "prompt": 2048, "new": 128, "dtype": "bfloat16", "rounds": 10}
    found = SpeedReport("model", CPU, settings)
    for j, name in enumerate(("dense", "w4a16", "w8a8")):
        for batch in (1, 4, 1024):
            rates = {"tokens_per_s": 9.87654 * 40**j, "time_ms": 1.0, "share": 0.1 * j, "speedup_over": {"dense": 40.0}}
            entry = {"variant": name, "batch": batch, "weights_bytes": 16 * 2**30 >> j, "peak_bytes": None}
            found.results.append({**entry, "prefill": rates, "decode": rates})
    return found


@pytest.mark.parametrize("name", ["one", "several", "hostile", "linears", "model"])
@pytest.mark.parametrize("scripts", [True, False])
def test_a_page_is_quiet_and_whole(seen: browser.Browser, pages: dict[str, Path], name: str, scripts: bool) -> None:
    for width, dark in ((390, False), (390, True), (1280, False), (1280, True)):
        seen.look(width, dark=dark)
        seen.open(pages[name], scripts)
        seen.value(OPEN)
        asked = [e["params"]["request"]["url"] for e in seen.events if e.get("method") == "Network.requestWillBeSent"]
        assert asked == [pages[name].as_uri()]
        assert [each for each in seen.events if each.get("method") in COMPLAINTS] == []
        boxes = seen.value(BOXES)
        assert len(boxes) >= (3 if name == "model" else 4)
        assert all(w > 200 and h > 30 and inside > 3 for w, h, inside in boxes), boxes
        assert seen.value(BEYOND) == 0, f"wider than a screen of {width}"
        assert seen.value("document.querySelectorAll('script, img, iframe').length") == 0


@pytest.mark.parametrize("name", ["one", "several", "linears", "model"])
def test_words_of_pictures_stand_apart_and_tables_have_room(
    seen: browser.Browser, pages: dict[str, Path], name: str
) -> None:
    for width in (390, 1280):
        seen.look(width)
        seen.open(pages[name])
        seen.value(OPEN)
        assert seen.value(CUT) == []
        assert seen.value(OVER) == []
        assert seen.value(CLIPPED) == []


def test_tables_are_read_without_scripts_and_on_paper(seen: browser.Browser, pages: dict[str, Path]) -> None:
    for media in ("screen", "print"):
        seen.look(1280, media=media)
        seen.open(pages["one"], scripts=False)
        text = seen.value("document.body.innerText")
        for words in ("0.0450 ± 0.0022", "lambada", "107.93 MiB", "embedding", "210 layers bit for bit"):
            assert words in text
    assert "every option" in text  # what is folded on a screen is not on paper


def test_dark_is_dark_and_light_is_light(seen: browser.Browser, pages: dict[str, Path]) -> None:
    light = {}
    for dark in (False, True):
        seen.look(1280, dark=dark)
        seen.open(pages["one"])
        found = seen.value("getComputedStyle(document.body).backgroundColor + getComputedStyle(document.body).color")
        light[dark] = [sum(map(int, part.split(",")[:3])) for part in found.replace(")", "").split("rgb(")[1:]]
    assert light[False][0] > 700 > 200 > light[False][1]
    assert light[True][0] < 200 < 600 < light[True][1]


def test_hostile_names_are_seen_as_they_are(seen: browser.Browser, pages: dict[str, Path]) -> None:
    seen.look(1280)
    seen.open(pages["hostile"])
    text = seen.value("document.body.innerText")
    assert text.count("<script>alert('x')</script>") > 20
    assert "\\u202e\\x1b[31m" in text
    assert HOSTILE not in text
