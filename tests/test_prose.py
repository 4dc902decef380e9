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


# Participles that say nothing of what a variable holds, where it lives longer than a glance.
VAGUE = {"found", "made", "given", "said", "told"}
GLANCE = 5  # lines


def vague_locals(path: Path) -> Iterator[tuple[int, str]]:
    """(line, name) of the vague variables that a function assigns and uses over more than a few lines."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            uses = [each for each in ast.walk(node) if isinstance(each, ast.Name) and each.id in VAGUE]
            arguments = {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
            for name in {each.id for each in uses if isinstance(each.ctx, ast.Store)} - arguments:
                lines = [each.lineno for each in uses if each.id == name]
                if max(lines) - min(lines) > GLANCE:
                    yield min(lines), name


def test_a_variable_that_lives_long_says_what_it_holds() -> None:
    """Kernels for GPUs aside: a change of their text makes their measurements old."""
    vague = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for folder in FOLDERS[:-1]
        for path in sorted((ROOT / folder).rglob("*.py"))
        if "triton" not in path.parts
        for line, name in vague_locals(path)
    ]
    assert not vague, "\n".join(["name it by what it holds:", *vague])
