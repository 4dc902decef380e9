"""`--json` of an evaluation: its summary, its gates, and the schema that describes it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import evaluations
import jsonschema
import pytest
from commands import Desk, command

from compress.evaluation.document import Evaluation, Figure, Named
from compress.evaluation.evaluation_file import read_evaluation
from compress.evaluation.json_document import as_document
from compress.evaluation.quality.gates import parse_gate
from compress.evaluation.report.verdict import verdict
from compress.recipes.studies.document_schemas import PLACE, schemas

BARE = Evaluation(Named("x", "Llama", 10, "float32"), [], missing={"texts": "no text was given"})


def schema(name: str) -> dict[str, Any]:
    return json.loads((PLACE / name).read_text(encoding="utf-8"))


def test_stored_schemas_are_those_of_the_documents() -> None:
    """`python recipes/studies/document_schemas.py` makes them anew; what they no longer allow raises a FORMAT."""
    assert {path.name: schema(path.name) for path in PLACE.glob("*.json")} == schemas()
    for made in schemas().values():
        jsonschema.Draft202012Validator.check_schema(made)


@pytest.mark.parametrize("found", [evaluations.whole(), evaluations.hostile(), BARE], ids=["whole", "hostile", "bare"])
def test_an_evaluation_keeps_to_its_schema(found: Evaluation) -> None:
    document = json.loads(json.dumps(as_document(found, [parse_gate("kl_mean > 0.05").check(found)])))
    jsonschema.validate(document, schema("evaluation.json"))
    for spoiled in ({"format": 1}, {"summary": {"verdict": "fine"}}, {"gates": [{"passed": "yes"}]}, {"texts": None}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(document | spoiled, schema("evaluation.json"))


def test_the_summary_has_the_headline_figures_and_null_for_the_rest() -> None:
    found = evaluations.whole()
    summary = as_document(found)["summary"]
    assert summary.pop("verdict") == verdict(found)
    assert summary == {
        "kl_mean": 0.045,
        "kl_mean_error": pytest.approx(0.00225),
        "perplexity": pytest.approx(22.2118, abs=1e-4),
        "reference_perplexity": 21.39,
        "bytes": 113_175_416,
        "reference_bytes": 269_036_504,
        "percent_smaller": pytest.approx(57.93, abs=0.01),
        "bits_per_weight": 4.25,
        "decode_tokens_per_s": 31.2,
        "reference_decode_tokens_per_s": 19.8,
    }
    assert {value for key, value in as_document(BARE)["summary"].items() if key != "verdict"} == {None}


def test_gates_say_the_figure_nearest_to_failing_and_its_limit() -> None:
    found = evaluations.whole()
    near = replace(evaluations.text_result(kl=0.04), name="near.txt")
    found = replace(found, texts=[near, *found.texts])
    written = ["kl_mean > 0.05", "kl_mean > 100 * noise", "same_top < 0.9", "gap.kl_mean > 1", "kl_mean < 0.01"]
    results = as_document(found, [parse_gate(each).check(found) for each in written])["gates"]
    assert [each["expression"] for each in results] == written
    assert [each["passed"] for each in results] == [True, False, False, False, True]
    assert [each["value"] for each in results] == [0.045, 0.045, 0.885, None, 0.04]
    assert [each["limit"] for each in results] == [0.05, pytest.approx(0.04), 0.9, 1.0, 0.01]
    assert results[0]["reason"] is None
    assert results[1]["reason"] == "kl_mean is 0.045 on wiki.txt, the noise floor 0.0004"


def test_the_command_writes_it_with_its_gates_and_without_hashes_of_tensors(
    desk: Desk, copy_of, llama_w4: Path
) -> None:
    words = ("--reference", desk.model, "--text", desk.tokens, "--json", "-", "--quiet")
    done = command(
        "evaluate", folder := copy_of(llama_w4), *words, "--fail-if", "kl_mean > 9", "--fail-if", "bytes > 1"
    )
    assert done.code == 3
    assert "Gate failed: bytes is" in (folder / "evaluation.md").read_text(encoding="utf-8")
    document = json.loads(done.out)
    jsonschema.validate(document, schema("evaluation.json"))
    assert list(document)[:3] == ["format", "summary", "gates"]
    assert [each["passed"] for each in document["gates"]] == [True, False]
    record = json.loads((llama_w4 / "compress.json").read_text(encoding="utf-8"))
    assert all("sha256" in layer["figures"] for layer in record["layers"])
    assert not any("sha256" in layer["figures"] for layer in document["run"]["layers"])


def test_a_document_is_read_back(tmp_path: Path) -> None:
    found = replace(evaluations.whole(), gap={"kl_mean": Figure(0.1)})
    (tmp_path / "found.json").write_text(json.dumps(as_document(found)), encoding="utf-8")
    assert read_evaluation(tmp_path / "found.json") == found
