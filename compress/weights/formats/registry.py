"""The registry of formats, by their names on disk. A new format is a file beside this one and a line here.

A format of another project registers itself by a line in its own module, like `FORMATS[LowRank.kind] = LowRank`; it is
known once that module is imported.
"""

import sys
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from compress.base.errors import CheckpointError, CompressError, InputError
from compress.base.schema import fits
from compress.weights.formats.act_order import ActOrder
from compress.weights.formats.codes import FineGrained, Float8Blocks, Float8Rows, Int8Rows, Int8Table, Packed
from compress.weights.formats.dense import Dense
from compress.weights.formats.k_quants import KQuant
from compress.weights.formats.levels import LEVEL_FORMATS, ModelOptNVFP4, NF4Float32
from compress.weights.formats.lowrank import LowRankFactors
from compress.weights.formats.sparse import SparseRows
from compress.weights.formats.sparse24 import PackedSparse24, Sparse24
from compress.weights.formats.ternary import BinaryCodes, TernaryCodes
from compress.weights.formats.tiles import Tiles
from compress.weights.formats.trellis import TrellisCodes
from compress.weights.terms import Format

FORMATS: dict[str, type[Format]] = {
    f.kind: f
    for f in (
        *(Packed, Int8Rows, Int8Table, Float8Rows, Float8Blocks, FineGrained, TernaryCodes, BinaryCodes),
        *(ActOrder, ModelOptNVFP4, NF4Float32),
        *(Dense, SparseRows, Sparse24, PackedSparse24, Tiles, KQuant, TrellisCodes, LowRankFactors),
    )
}
FORMATS |= {kind.kind: kind for kind in LEVEL_FORMATS.values()}
OURS = frozenset(FORMATS)


def read_format(entry: Mapping[str, Any], where: object) -> Format:
    """The format of a JSON entry. Raises CheckpointError, which names `where`, for a format that is not known or whose
    fields are missing or wrong."""
    kind = FORMATS.get(str(entry.get("kind")))
    if kind is None:
        known = ", ".join(FORMATS)
        raise CheckpointError(f"{where} holds the format {entry.get('kind')!r}; known: {known}")
    fields = {key: value for key, value in entry.items() if key != "kind"}
    fits(fields, kind, where)
    return kind.from_entry(fields)


def import_plugin(module: str) -> None:
    """Import a module that registers formats of its own. Raises InputError where the import fails."""
    try:
        import_module(module)
    except Exception as error:  # noqa: BLE001 - importing runs the module, which may raise anything
        raise InputError(
            f"plugin {module!r} cannot be imported ({type(error).__name__}: {error}); give a module that is on "
            "PYTHONPATH"
        ) from None


def folder_of(module: str) -> str:
    """The folder that must be on PYTHONPATH for importing an imported module again."""
    file = Path(sys.modules[module].__file__ or "").resolve()
    above = module.count(".") + (file.name == "__init__.py")
    return str(file.parents[above])


def check_importable(formats: Iterable[Format]) -> None:
    """Raises CompressError for a format defined in a script or notebook: no reader of its checkpoint could import
    it."""
    for format_ in formats:
        module = type(format_).__module__
        if module == "__main__":
            raise CompressError(
                f"the format {format_.kind!r} is defined in a script or a notebook, from which nobody who reads the "
                "checkpoint can import it; put it into a module"
            )
