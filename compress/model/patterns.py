"""Patterns of layers' names, as `only`, `but` and `ignore` take them."""

import re
from collections.abc import Sequence
from fnmatch import translate
from functools import cache
from glob import escape

from compress.base.errors import InputError
from compress.base.sandbox import check_expressions

# The prefix of a regular expression, as in compressed-tensors and vLLM. It has to match from a name's beginning.
REGULAR = "re:"
SHOWN = 4  # patterns in a message
FORMS = "patterns are shell-style and match whole names ('*.down_proj'), or regular expressions ('re:.*down_proj')"


def matches(name: str, pattern: str) -> bool:
    """True if a pattern matches a layer's full name. Raises InputError for one that is no pattern."""
    return compiled(pattern).match(name) is not None


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """The regular expression of a pattern. Raises InputError for one that is none."""
    if not pattern.startswith(REGULAR):
        return re.compile(translate(pattern))
    try:
        return re.compile(pattern.removeprefix(REGULAR))
    except (re.error, OverflowError, RecursionError) as error:
        raise InputError(f"pattern {pattern!r} is no regular expression ({error}); {FORMS}") from None


def check_quick(patterns: Sequence[str], names: Sequence[str]) -> None:
    """Raises InputError for regular expressions that stand still at one of the names."""
    regular = [pattern for pattern in patterns if pattern.startswith(REGULAR)]
    shown = ", ".join(map(repr, regular[:SHOWN]))
    check_expressions(f"pattern {shown}", [pattern.removeprefix(REGULAR) for pattern in regular], names)


def patterns_of(layers: Sequence[str], everything: Sequence[str]) -> list[str]:
    """Shell-style patterns that match exactly these layers. Layers whose names differ in numbers only share a pattern
    when all of them are meant; every other layer has its own."""
    meant, words = set(layers), []
    for layer in layers:
        pattern = re.sub(r"(?<=\.)[0-9]+(?=\.)", "*", escape(layer))
        matched = {other for other in everything if matches(other, pattern)}
        word = pattern if matched <= meant else escape(layer)
        if word not in words:
            words.append(word)
    return words


def ignoring(layers: Sequence[str], everything: Sequence[str]) -> str:
    """The options by which a command line leaves exactly these layers alone; of many, the first with an ellipsis."""
    found = [f"--ignore '{pattern}'" for pattern in patterns_of(layers, everything)]
    return " ".join(found[:SHOWN]) + (f" ... ({len(found)} patterns)" if len(found) > SHOWN else "")
