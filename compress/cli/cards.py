"""The cards of the methods: what each does, its source, its options and their defaults, as its file states them.

Read from the source, without importing it: a pass imports torch, which takes seconds, and a card is only words.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.abc import InspectLoader
from importlib.util import find_spec
from typing import Any

from compress.recipe import PASSES


@dataclass(frozen=True)
class Card:
    """about: the docstring of the pass's module. options: the docstrings of its classes, the most general first.
    defaults: {option: value}, in the order of the fields."""

    about: str
    options: tuple[str, ...]
    defaults: dict[str, Any]


def summary_of(name: str) -> str:
    """What a method is, in a line."""
    return _docstring(_parsed(PASSES[name].partition(":")[0])).partition("\n")[0]


def card_of(name: str) -> Card:
    """The card of a method in `PASSES`."""
    module, _, kind = PASSES[name].partition(":")
    about = _docstring(_parsed(module))
    options: list[str] = []
    defaults: dict[str, Any] = {}
    for home, definition in reversed(list(_lineage(module, kind))):
        defaults |= {field: _value(home, node) for field, node in _fields(definition)}
        if defaults:
            options.append(_docstring(definition))
    return Card(about, tuple(options), defaults)


@cache
def _parsed(module: str) -> ast.Module:
    spec = find_spec(module)
    assert spec is not None
    assert isinstance(spec.loader, InspectLoader)
    return ast.parse(spec.loader.get_source(module) or "")


def _docstring(node: ast.Module | ast.ClassDef) -> str:
    return (ast.get_docstring(node) or "").strip()


def _lineage(module: str, name: str) -> Iterator[tuple[str, ast.ClassDef]]:
    """A class and what it extends, wherever that is defined, the class first: (module, definition)."""
    home, node = _definition(module, name)
    if isinstance(node, ast.ClassDef):
        yield home, node
        for base in node.bases:
            assert isinstance(base, ast.Name), ast.unparse(base)
            yield from _lineage(home, base.id)


def _definition(module: str, name: str) -> tuple[str, ast.stmt | None]:
    """(module, statement) that gives a module's name its value; None for what Python brings."""
    for node in _parsed(module).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return module, node
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            return _definition(str(node.module), name)
    return module, None


def _fields(definition: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    """The fields of a dataclass with their defaults; every option has one."""
    for node in definition.body:
        if (
            isinstance(node, ast.AnnAssign)
            and ast.unparse(node.target) != "where"
            and not ast.unparse(node.annotation).startswith("ClassVar")
        ):
            assert isinstance(node.target, ast.Name)
            assert node.value is not None
            yield node.target.id, node.value


def _value(module: str, node: ast.expr) -> Any:
    """What a literal or the name of one stands for."""
    if isinstance(node, ast.Name):
        home, definition = _definition(module, node.id)
        assert isinstance(definition, ast.Assign), node.id
        return _value(home, definition.value)
    return ast.literal_eval(node)
