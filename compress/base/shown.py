"""Results that a notebook shows, and hands on as data."""

import json
from dataclasses import asdict
from importlib import import_module
from typing import Any

from compress.base.errors import InputError

# Puts results into words. It lies above every type that it knows, so it is imported when a person looks.
WORDS = "compress.cli.notebook"


class Shown:
    """A result, a dataclass. It shows what the command of its kind prints: in short (`repr`), as tables in a notebook,
    as text (`summary`); and it is JSON (`to_dict`) or rows to plot (`to_frame`)."""

    def _rows(self) -> list[dict[str, Any]]:
        """A dictionary of plain values for each row that one would plot."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """The content of the command's `--json`: dictionaries, lists, words and numbers alone."""
        return plain(asdict(self))  # type: ignore[call-overload]

    def to_frame(self) -> Any:
        """The rows as a DataFrame. Raises InputError where pandas is missing."""
        try:
            import pandas
        except ImportError:
            raise InputError("to_frame needs pandas, which is not installed: pip install pandas") from None
        return pandas.DataFrame(self._rows())

    def summary(self) -> str:
        """The text that the command of its kind prints."""
        return str(import_module(WORDS).as_text(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}: {import_module(WORDS).headline(self)}"

    def _repr_html_(self) -> str:
        return str(import_module(WORDS).as_html(self))


def plain(value: Any) -> Any:
    """A value as JSON reads it back; what JSON has no word for, like a path, as text."""
    return json.loads(json.dumps(value, default=str))
