"""Patterns of layers' names, as `only`, `but` and `ignore` take them."""

import re
from fnmatch import translate
from functools import cache

from compress.errors import InputError

# What compressed-tensors and vLLM write before a regular expression, which has to match from a name's beginning.
REGULAR = "re:"
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
