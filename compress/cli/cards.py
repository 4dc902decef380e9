"""The cards of the methods: what each does, its source, and its options, as its file states them.

Read from the source, without importing it: a pass imports torch, which takes seconds, and a card is only words. What
an option means is the string below its field. What it may be is its type, if that is a choice; otherwise the string
begins with it, up to a colon; `SCHEMES` there stands for the schemes of `weights.number_formats`.
"""

import ast
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, replace
from functools import cache
from importlib.abc import InspectLoader
from importlib.util import find_spec
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from compress.base.terminal import fill
from compress.passes.protocol.recipe import PASSES
from compress.weights.number_formats import BY_NAME

if TYPE_CHECKING:
    from compress.passes.protocol.base import Pass

WIDTH = 110  # characters of a line, as the help of commands has


@dataclass(frozen=True)
class Option:
    """A field of a pass: its name, its default, the values it may have and what it means, both in words."""

    name: str
    default: Any
    allowed: str
    meaning: str

    @property
    def shown(self) -> str:
        """The default as a recipe or the command line would give it."""
        lowered = self.default is None or isinstance(self.default, bool)
        return str(self.default).lower() if lowered else str(self.default)


@dataclass(frozen=True)
class Card:
    """about: the docstring of the pass's module. options: in the order of the fields."""

    about: str
    options: tuple[Option, ...]

    def __str__(self) -> str:
        """The text, then an option a line: name, default, allowed values and meaning; what is longer is indented."""
        return f"{self.about}\n\n{self._table(WIDTH)}"

    def in_columns(self, width: int) -> str:
        """The same on a terminal of this width."""
        return f"{fill(self.about, width)}\n\n{self._table(min(WIDTH, width))}"

    def _table(self, width: int) -> str:
        if not self.options:
            return "no options"
        names = max(len(option.name) for option in self.options)
        defaults = max(len(option.shown) for option in self.options)
        indent = " " * (names + defaults + 4)
        lines = [f"{'option':{names}}  {'default':{defaults}}  allowed: meaning"]
        for option in self.options:
            head = f"{option.name:{names}}  {option.shown:{defaults}}  "
            words = ": ".join(filter(None, (option.allowed, option.meaning)))
            lines += wrap(head + words, width, subsequent_indent=indent, break_on_hyphens=False)
        return "\n".join(lines)


def summary_of(name: str) -> str:
    """A method in one line: the first of its module's docstring."""
    return _docstring(parse(PASSES[name].partition(":")[0])).partition("\n")[0]


def methods_that_write(aspect: str) -> list[str]:
    """The methods whose class says that it writes this: dense weight, quantized weight, mask ..."""
    return [name for name, home in PASSES.items() if _class_value(home, "writes") == aspect]


def _class_value(path: str, name: str) -> Any:
    """The value that a class (module:Class), or the first of its bases that has one, gives a ClassVar."""
    module, _, kind = path.partition(":")
    for home, definition in _lineage(module, kind):
        for node in definition.body:
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name and node.value is not None:
                return _value(home, node.value)
    return None


def card_of(name: str) -> Card:
    """The card of a method in `PASSES`."""
    module, _, kind = PASSES[name].partition(":")
    options: dict[str, Option] = {}
    for home, definition in reversed(_lineage(module, kind)):
        for node in definition.body:  # what a class settles is no option any more
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).startswith("ClassVar"):
                options.pop(ast.unparse(node.target), None)
        for option, default, allowed, meaning in fields_of(home, definition):
            assert default is not None, option  # every option has one
            before, value = options.get(option), _value(home, default)
            if not meaning and before is not None:  # another default, and nothing more to say
                options[option] = replace(before, default=value)
            else:
                options[option] = Option(option, value, allowed, meaning)
    return Card(_docstring(parse(module)), tuple(options.values()))


def card_of_class(kind: "type[Pass]") -> Card:
    """The card of a pass that is no part of this package: defaults are those of the imported class, words those of its
    source, where there is one."""
    from compress.passes.protocol.recipe import options_of

    words: dict[str, tuple[str, str]] = {}
    for each in reversed(kind.__mro__[:-1]):
        home, definition = _definition(each.__module__, each.__name__)
        if isinstance(definition, ast.ClassDef):
            for name, _, allowed, meaning in fields_of(home, definition):
                if meaning or name not in words:
                    words[name] = allowed, meaning
    options = []
    for name, field in options_of(kind).items():
        default = field.default if field.default_factory is MISSING else field.default_factory()
        shown = "required" if default is MISSING else default
        options.append(Option(name, shown, *words.get(name, ("", ""))))
    about = _docstring(parse(kind.__module__)) or (kind.__doc__ or "").strip()
    return Card(about, tuple(options))


@cache
def parse(module: str) -> ast.Module:
    spec = find_spec(module)
    assert spec is not None
    assert isinstance(spec.loader, InspectLoader)
    return ast.parse(spec.loader.get_source(module) or "")


def _docstring(node: ast.Module | ast.ClassDef) -> str:
    return (ast.get_docstring(node) or "").strip()


def _lineage(module: str, name: str) -> list[tuple[str, ast.ClassDef]]:
    """A class and what it extends, wherever that is defined, in the order in which Python asks them: (module,
    definition). What several bases share is asked after all of them."""
    home, node = _definition(module, name)
    if not isinstance(node, ast.ClassDef):
        return []
    found = [(home, node)]
    for base in node.bases:
        assert isinstance(base, ast.Name), ast.unparse(base)
        inherited = _lineage(home, base.id)
        found = [each for each in found if each not in inherited] + inherited
    return found


def _definition(module: str, name: str) -> tuple[str, ast.stmt | None]:
    """(module, statement) that gives a module's name its value; None for what Python brings."""
    for node in parse(module).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return module, node
        if isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _definition(str(node.module), alias.name)
    return module, None


def fields_of(module: str, definition: ast.ClassDef) -> Iterator[tuple[str, ast.expr | None, str, str]]:
    """(Name, default, allowed values, meaning) of each field that is an option."""
    for node, below in zip(definition.body, [*definition.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or ast.unparse(node.annotation).startswith("ClassVar"):
            continue
        name = ast.unparse(node.target)
        if name == "where":  # which layers the pass is for is said beside its options
            continue
        text = ""
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            text = " ".join(str(below.value.value).split()).removesuffix(".")
        allowed = _choices(module, node.annotation)
        if not allowed:
            allowed, _, text = text.partition(": ")
            allowed = BY_NAME if allowed == "SCHEMES" else allowed
        yield name, node.value, allowed, text[:1].lower() + text[1:]


def _choices(module: str, annotation: ast.expr) -> str:
    """The values of a type that has few of them; nothing of another one."""
    if isinstance(annotation, ast.Name) and annotation.id == "bool":
        return "true, false"
    if isinstance(annotation, ast.Name):
        home, definition = _definition(module, annotation.id)
        return _choices(home, definition.value) if isinstance(definition, ast.Assign) else ""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Literal":
        chosen = ast.literal_eval(annotation.slice)
        return ", ".join(map(str, chosen if isinstance(chosen, tuple) else (chosen,)))
    return ""


def _value(module: str, node: ast.expr) -> Any:
    """The value of a literal, or of a name that a module defines as one."""
    if isinstance(node, ast.Name):
        home, definition = _definition(module, node.id)
        assert isinstance(definition, ast.Assign), node.id
        return _value(home, definition.value)
    return ast.literal_eval(node)
