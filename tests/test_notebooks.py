"""Notebooks of the documents run from their first cell to their last."""

import ast
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    """The cells of one kind (`code`, `markdown`)."""
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


def check_outputs(found: list[dict[str, Any]]) -> None:
    """Cells that ran from the first to the last have no error and wrote nothing to standard error."""
    assert [cell["execution_count"] for cell in found] == list(range(1, len(found) + 1))
    outputs = [output for cell in found for output in cell["outputs"]]
    assert outputs
    assert [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_are_python_or_commands_and_keep_what_they_showed(path: Path) -> None:
    for cell in cells(path, "code"):
        ast.parse("".join(line for line in cell["source"] if not line.startswith("!")))
    if any(cell["outputs"] for cell in cells(path, "code")):  # `make notebook-outputs` keeps them
        check_outputs(cells(path, "code"))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="`make notebooks` installs what runs them")
    nbclient = pytest.importorskip("nbclient", reason="`make notebooks` installs what runs them")
    # Of this environment: its Python for the cells, its `compress` for the commands, its folder for what they make.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=3000, resources={"metadata": {"path": str(tmp_path)}}).execute()
    check_outputs([cell for cell in notebook.cells if cell.cell_type == "code"])
