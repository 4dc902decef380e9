"""docs/memory.md is what `compress plan` says of the well-known models."""

from pathlib import Path

import pytest

from compress.recipes.studies.models.memory_table import HEAD, card, row, shown

PAGE = (Path(__file__).parents[3] / "docs" / "memory.md").read_text(encoding="utf-8")


def test_the_page_has_every_known_model_in_its_order() -> None:
    assert PAGE.startswith(HEAD)
    rows = [line.split(" | ")[0].strip("| ") for line in PAGE.splitlines() if line.startswith("| ")]
    assert rows[1 : rows.index("GPU, GiB")] == shown()


def test_a_card_is_told_its_largest_model() -> None:
    assert card(8, ["smollm2-135m", "llama-3.1-8b", "llama-3.1-405b"]).startswith("| 8 | llama-3.1-8b | ")


@pytest.mark.parametrize("name", ["smollm2-135m", pytest.param("gpt-oss-20b", marks=pytest.mark.full)])
def test_a_row_is_what_plan_says(name: str) -> None:
    """`python recipes/studies/models/memory_table.py > docs/memory.md` after a change of forecasts."""
    assert row(name) in PAGE.splitlines()
