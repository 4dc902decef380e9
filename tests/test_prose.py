"""What a machine can tell of how the code reads."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from places import ROOT

# A docstring says what something is, returns or does: no noun clause as a sentence.
CLAUSE = re.compile(r"(What|How|Whether|Which|Where|Why|Within|Of|When|Who|Whose)\b")
FOLDERS = ("compress", "kernels", "evaluation", "recipes")


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of docstrings, and of the strings below the fields of a class."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for before, at in zip([None, *node.body], node.body, strict=False):
                match at if before is None or isinstance(before, ast.AnnAssign) else None:
                    case ast.Expr(ast.Constant(str(text))):
                        yield at.lineno, text.lstrip()


def test_no_docstring_is_a_noun_clause() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in docstrings(path)
        if CLAUSE.match(text)
    ]
    assert not found, "\n".join(["say what it returns or does, noun or verb first:", *found])
