"""recipes/studies/gpu/ledger.py: hashes of kernels, runs added to the ledger, and the table in kernels/README.md."""

import ast
import json
import shutil
from pathlib import Path

import pytest
from places import ROOT

from compress.recipes.studies.gpu import ledger

CARD = "Some GPU"


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return ledger.KernelSources().hashes()


def hashes_after(tmp_path: Path, file: str, old: str, new: str) -> dict[str, str]:
    """The hashes of kernels one file of which has another line."""
    folder = Path(shutil.copytree(ROOT / "kernels", tmp_path / "kernels", ignore=shutil.ignore_patterns("cpu")))
    text = (folder / file).read_text(encoding="utf-8")
    assert old in text
    (folder / file).write_text(text.replace(old, new, 1), encoding="utf-8")
    return ledger.KernelSources(folder).hashes()


def test_every_compiled_function_is_a_kernel_of_the_ledger_or_read_by_one(sources):
    assert ledger.KernelSources().unreached() == set()
    files = {kernel.partition(".")[0] for kernel in sources}
    assert {"planar_gemm", "int8_gemm", "trellis_paths", "sparse_kernels"} <= files


def test_the_table_of_the_document_is_that_of_the_ledger(sources):
    text = ledger.README.read_text(encoding="utf-8")
    assert ledger.in_readme(text, ledger.table(ledger.read_ledger(), sources)) == text


@pytest.mark.parametrize(
    ("file", "old", "new", "changed"),
    [
        ("triton/sparse_kernels.py", "tl.sum(", "1.0 * tl.sum(", {"sparse_kernels.product_kernel"}),
        # A function that two kernels call, and a constant that they read.
        ("triton/grouped_gemm.py", "def pairs_of_tile(tile,", "def pairs_of_tile(tile,  # said\n", set()),
        ("triton/split_k.py", "tl.atomic_add(", "1 * tl.atomic_add(", None),
        ("layouts/words.py", "PLANE = 32", "PLANE = 64", None),
    ],
    ids=["its own line", "a comment", "a function that it calls", "a constant of another file"],
)
def test_a_change_is_one_of_all_kernels_that_read_it(tmp_path, sources, file, old, new, changed):
    after = hashes_after(tmp_path, file, old, new)
    found = {kernel for kernel, source in sources.items() if after[kernel] != source}
    if changed is None:
        assert "planar_gemm.planar_kernel" in found
        assert "int8_quantize.quantize_static_kernel" not in found
    else:
        assert found == changed


def test_a_kernel_that_ran_right_and_then_changed_has_not_run_since(tmp_path, sources):
    lines = [
        {"device": CARD, "date": "2026-01-02T03:04:05", "versions": {"torch": "2.11"}, "sources": sources},
        {"test": "a", "about": [], "kernels": [*sources], "outcome": "passed", "message": ""},
        {"test": "b", "about": ["int8_gemm.w8a8_kernel"], "outcome": "failed", "message": "assert 9.5 <= 1"}
        | {"kernels": ["int8_gemm.w8a8_kernel", "int8_quantize.quantize_tokens_kernel"]},
    ]
    runs = ledger.take({}, lines, "abc")[CARD]
    assert ledger.stale(runs, sources) == {"int8_gemm.w8a8_kernel"}
    assert runs["int8_gemm.w8a8_kernel"]["failed"] == {"b": "assert 9.5 <= 1"}
    after = hashes_after(tmp_path, "triton/sparse_kernels.py", "tl.sum(", "1.0 * tl.sum(")
    row = next(line for line in ledger.table({CARD: runs}, after).splitlines() if "product_kernel" in line)
    assert row == (
        "| `sparse_kernels.product_kernel` | not run since it was changed (right in 1 cases on 2026-01-02 before) |"
    )
    assert ledger.stale(runs, after) == {"int8_gemm.w8a8_kernel", "sparse_kernels.product_kernel"}


def test_every_kernel_has_a_gpu_test_that_names_it(sources):
    named = set()
    for file in (ROOT / "tests" / "kernels" / "triton").glob("test_gpu*.py"):
        calls = (node for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Call))
        marks = [call for call in calls if ast.unparse(call.func) == "pytest.mark.kernels"]
        named |= {ast.literal_eval(word) for mark in marks for word in mark.args}
    assert named == sources.keys()


def test_a_ledger_is_read_as_it_was_written(tmp_path):
    runs = {CARD: {"x.y": {"source": "1", "failed": {}, "passed": 2, "date": "2026-01-02"}}}
    ledger.write_ledger(runs, tmp_path / "ledger.json")
    assert ledger.read_ledger(tmp_path / "ledger.json") == runs
    assert json.loads((tmp_path / "ledger.json").read_text(encoding="utf-8"))["format"] == ledger.FORMAT
