"""docs/models.md says of architectures what the stored run has found; a run of today finds no less."""

import json
import re

import pytest
from places import ROOT

from compress.recipes.studies.models.architectures import MOST, row
from compress.recipes.studies.models.model_table import (
    METHODS,
    SUPPORTED,
    TASKS,
    VERDICTS,
    counts,
    of_method,
    page,
    readers,
    reason_of,
    result_of,
    rows_of,
    summary,
)

SAMPLE = 8  # every so many rows are run again
LOST = 0.01  # of the share of weights in codes: less than before


def test_the_page_is_that_of_the_stored_run() -> None:
    """`python recipes/studies/models/model_table.py > docs/models.md` after another run."""
    assert (ROOT / "docs" / "models.md").read_text(encoding="utf-8") == page()


def test_readme_counts_the_architectures_that_were_tried() -> None:
    tried = re.search(r"(\d+) were tried", summary(rows_of()))
    assert f"lists {tried[1]} architectures" in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


def test_every_row_has_a_verdict_and_a_reason() -> None:
    for found in rows_of():
        assert found["task"] in TASKS
        assert found["model_types"]
        assert "Traceback" not in json.dumps(found)
        for method in METHODS:
            assert result_of(found, method) in VERDICTS
            assert (found[method]["share"] >= MOST) if result_of(found, method) == "partly" else True
        if any(result_of(found, method) != "works" for method in METHODS):
            assert reason_of(found), found


def test_nine_in_ten_are_compressed_and_none_ends_in_a_traceback() -> None:
    rows = [found for found in rows_of() if "not tried" not in found]
    for method in METHODS:
        found = counts(rows, method)
        assert found["fails"] == found["wrong"] == 0
        assert sum(found[verdict] for verdict in SUPPORTED) >= 0.9 * len(rows), method


def test_reasons_are_put_in_words_for_a_user() -> None:
    convolution = {"why": "convolution; --convolutions includes it (in Python convolutions=True)", "share": 0.05}
    own = {"why": "ViTEmbeddings: not a linear layer", "share": 0.002}
    partly = {"result": "partly", "share": 0.948, "dense": [convolution, own]}
    words = "convolutions stay dense (5.0%), a weight of `ViTEmbeddings`, which is no linear layer (0.2%)"
    assert of_method(partly) == words
    works = {"result": "works", "share": 1.0, "transformers": "default"}
    found = {"w4a16 gptq": {**partly, "transformers": "no: why"}, "w8a8 rtn": works}
    assert reason_of(found) == f"4 bits: {words}; w8a8: all in codes"
    assert readers(found) == "compress, transformers (w8a8)"
    refused = "a.b is a Conv1d, which compressed-tensors cannot hold with a rounded input (rtn); ignore it"
    assert "ONNX" in of_method({"result": "refused", "why": refused})
    with pytest.raises(StopIteration):
        of_method({"result": "partly", "dense": [{"why": "a reason without words", "share": 0.1}]})


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("before", rows_of()[::SAMPLE], ids=lambda found: f"{found['task']}-{found['class']}")
def test_a_run_of_today_finds_no_less(before: dict) -> None:
    now = row(before["task"], before["class"], before["model_types"])
    for method in METHODS:
        was, found = VERDICTS.index(result_of(before, method)), VERDICTS.index(result_of(now, method))
        assert found <= was, (now.get("not tried") or now[method], before)
        if "share" in before.get(method, {}):
            assert now[method]["share"] >= before[method]["share"] - LOST
