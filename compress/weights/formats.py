"""The formats of terms, by the name that they have on disk. A new one is a file beside this one and a line here.

Somebody else's is a line of its own, `FORMATS[LowRank.kind] = LowRank`, in the module that has it: it is known once
that module is imported.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from compress.errors import CheckpointError, InputError
from compress.schema import fits
from compress.weights.codes import Float8Rows, Int8Rows, Int8Table, Packed
from compress.weights.dense import Dense
from compress.weights.terms import Format

FORMATS: dict[str, type[Format]] = {f.kind: f for f in (Packed, Int8Rows, Int8Table, Float8Rows, Dense)}
OURS = frozenset(FORMATS)


def read_format(entry: Mapping[str, Any], where: object) -> Format:
    """The format of a JSON entry. Raises CheckpointError, naming `where`, for one that is not known or does not hold
    what it must."""
    kind = FORMATS.get(str(entry.get("kind")))
    if kind is None:
        known = ", ".join(FORMATS)
        raise CheckpointError(f"{where} holds the format {entry.get('kind')!r}; known: {known}")
    fields = {key: value for key, value in entry.items() if key != "kind"}
    fits(fields, kind, where)
    return kind.from_entry(fields)


def import_plugin(module: str) -> None:
    """Import a module that has formats of its own. Raises InputError where that fails."""
    try:
        import_module(module)
    except Exception as error:  # noqa: BLE001 - importing runs the module, which may raise anything
        raise InputError(
            f"plugin {module!r} cannot be imported ({type(error).__name__}: {error}); give a module that is on "
            "PYTHONPATH"
        ) from None


def foreign_modules() -> list[str]:
    """The modules of the formats that are known and not ours."""
    return sorted({FORMATS[kind].__module__ for kind in FORMATS.keys() - OURS})
