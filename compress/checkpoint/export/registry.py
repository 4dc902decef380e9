"""Ways to write a checkpoint, by the word of `compress export --to`. A new one is a file beside this one and a line.

Somebody else's is a line of its own, `EXPORTERS["mine"] = "my_module:Mine"`, in a module that `--plugin` names.
"""

import importlib
from typing import TYPE_CHECKING

from compress.errors import one_of

if TYPE_CHECKING:
    from compress.checkpoint.export.exporter import Exporter

# Where each is, imported (with torch) when it is used: a wrong word is said at once.
EXPORTERS = {
    "dense": "compress.checkpoint.export.dense:Dense",
    "gptq": "compress.checkpoint.export.gptq:GPTQLayout",
    "awq": "compress.checkpoint.export.awq:AWQLayout",
    "sparse24": "compress.checkpoint.export.two_of_four:TwoOfFour",
}


def exporter_named(name: str) -> "Exporter":
    """An exporter by its word. Raises InputError for another, with the likeliest one."""
    module, _, kind = EXPORTERS[one_of("export", name, EXPORTERS)].partition(":")
    exporter: Exporter = getattr(importlib.import_module(module), kind)()
    return exporter
