"""gguf-py, the package `gguf` of llama.cpp, which is an extra of this one."""

from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from compress.base.errors import install

# Types that ggml has (llama.cpp#24448) and gguf-py 0.19.0 lacks: {name: (number, elements, bytes)}, and {word of a file
# of such: number}.
NEWER = {"Q2_0": (42, 64, 18)}
NEWER_FILES = {"MOSTLY_Q2_0": 41}
MISSING = f"the package gguf, which writes and reads GGUF files, is not installed ({install('gguf')})"


def missing() -> str | None:
    """The line that says that the package is not installed; None where it is."""
    return MISSING if find_spec("gguf") is None else None


def gguf() -> ModuleType:
    """The package, which knows the types that are newer than it."""
    import gguf as package

    kinds: Any = package.GGMLQuantizationType
    for name, (number, elements, size) in NEWER.items():
        if name not in kinds.__members__:
            kind = int.__new__(kinds, number)
            kind._name_, kind._value_ = name, number
            kinds._member_map_[name] = kinds._value2member_map_[number] = kind
            package.GGML_QUANT_SIZES[kind] = (elements, size)
    return package


def read_file(path: Path) -> Any:
    """A file, opened by gguf-py's reader; its arrays are mapped, and copied where they are written to."""
    package: Any = gguf()

    class PlainReader(package.GGUFReader):  # type: ignore[misc]
        """Reads a hundred thousand tokens from a plain array, which takes a quarter of the time of a mapped one."""

        @property
        def data(self) -> np.ndarray[Any, Any]:
            return self._plain

        @data.setter
        def data(self, mapped: np.ndarray[Any, Any]) -> None:
            self._plain = np.asarray(mapped)

    return PlainReader(path, "c")


def reader() -> str:
    """Name and version of the package, as the record has it."""
    from importlib.metadata import version

    return f"gguf {version('gguf')}"
