"""gguf-py, the package `gguf` of llama.cpp, which is an extra of this one."""

from importlib.util import find_spec
from types import ModuleType

from compress.base.errors import install

MISSING = f"the package gguf, which writes and reads GGUF files, is not installed ({install('gguf')})"


def missing() -> str | None:
    """The line that says that the package is not installed; None where it is."""
    return MISSING if find_spec("gguf") is None else None


def gguf() -> ModuleType:
    """The package."""
    import gguf as package

    return package


def reader() -> str:
    """Name and version of the package, as the record has it."""
    from importlib.metadata import version

    return f"gguf {version('gguf')}"
