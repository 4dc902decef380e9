"""Results as a notebook shows them: in short, as tables, as text, and as data."""

import json
import sys
from typing import Any

import evaluations
import pytest
from evaluations import HOSTILE
from models import strong

import compress
from compress.base.errors import InputError
from compress.base.shown import Shown
from compress.checkpoint.write.record import LayerRecord, RunRecord
from compress.evaluation.document import Figure
from compress.jobs.job import Result
from compress.search.fit import FitResult
from compress.search.fitting.prove import FitProof, RunPoint
from compress.search.sweep_rows import Sweep, SweepRow, rank


def fitted() -> FitResult:
    runs = [
        RunPoint(name, 500, 3.4, {"kl_mean": Figure(0.05, 0.01), "perplexity_ratio": Figure(1.02)}) for name in "ab"
    ]
    proof = FitProof(HOSTILE, "1,000 bytes", True, False, HOSTILE, 12, 2000, [], runs, "a", "b", Figure(0.1, 0.01), 1.0)
    return FitResult(None, None, None, proof)  # type: ignore[arg-type]


def swept() -> Sweep:
    rows = [
        SweepRow(HOSTILE, {}, bytes=2, kl_mean=0.5, tasks={"piqa": {"accuracy": 0.75}}),
        SweepRow("b", {}, problem="x"),
    ]
    return Sweep(HOSTILE, HOSTILE, rank(rows))


def result() -> Result:
    layers = [LayerRecord(f"{HOSTILE}{i}", "gptq", HOSTILE, "", 64, (4, 4), {"loss": 0.5}) for i in range(400)]
    return Result(RunRecord(layers, left_alone={HOSTILE: HOSTILE}))


# {its kind: (how it is made, a column of its rows, and what is in the first row there)}
RESULTS = {
    "evaluation": (evaluations.hostile, "kl_mean", 0.045),
    "forecast": (lambda: compress.plan(strong(), compress.RTN(group_size=16)), "scheme", "w4a16 g16 symmetric"),
    "fit": (fitted, "kl_mean_error", 0.01),
    "result": (result, "loss", 0.5),
    "sweep": (swept, "piqa", 0.75),
}


@pytest.fixture(params=RESULTS)
def shown(request: pytest.FixtureRequest) -> tuple[Shown, str, Any]:
    make, column, value = RESULTS[request.param]
    return make(), column, value


def test_a_result_shows_itself_in_short_and_escapes_what_is_not_its_own(shown: tuple[Shown, str, Any]) -> None:
    found, _, _ = shown
    assert repr(found).startswith(f"{type(found).__name__}: ")
    assert len(repr(found)) < 400
    assert repr(found).isprintable()
    html = found._repr_html_()
    assert html.startswith("<p>")
    for text in (html, found.summary().replace("\n", "")):
        assert text.isprintable()
    assert "<script" not in html
    assert "<img" not in html


def test_a_result_is_data(shown: tuple[Shown, str, Any]) -> None:
    found, column, value = shown
    assert json.loads(json.dumps(found.to_dict())) == found.to_dict()
    frame = found.to_frame()
    assert frame[column][0] == value


def test_the_table_of_a_notebook_has_the_cells_of_the_terminal() -> None:
    found = swept()
    for text in (found.summary(), found._repr_html_()):
        assert all(cell in text for cell in ("0.50000", "75.00%", "failed"))


def test_without_pandas_a_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(InputError, match="pip install pandas"):
        swept().to_frame()
