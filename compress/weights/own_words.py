"""Schemes that compressed-tensors cannot express: a `quantization_config` of our own, with quant_method `compress`.

    {"quant_method": "compress", "format": 1, "modules": [...],
     "groups": [{"targets": [layer, ...], "terms": [{"kind": ..., ...}, ...], "inputs": ..., "outputs": ..., ...}]}

Every compressed layer of the checkpoint is a target, also layers of codes alone. modules: the Python modules of formats
that are not ours; they must be imported before the checkpoint is read. Other readers must refuse such a checkpoint
rather than leave out a term of a sum: vLLM does not know the method, and transformers finds no weights under the names
that it looks for (`checkpoint.files.VARIANT`).
"""

import json
from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from compress.errors import CheckpointError
from compress.system.schema import fits
from compress.weights.formats.registry import FORMATS, OURS
from compress.weights.grid import Grid
from compress.weights.scheme import Scheme, read_entry

METHOD = "compress"
FORMAT = 1


class SchemeEntry(TypedDict):
    """The JSON of a `Scheme.entry`."""

    terms: list[dict[str, Any]]
    inputs: Grid | None
    outputs: Grid | None
    dynamic: bool
    rotation: NotRequired[int | None]


class SchemeGroup(SchemeEntry):
    targets: list[str]


class OwnQuantization(TypedDict):
    format: int
    modules: list[str]
    groups: list[SchemeGroup]


def is_own(quantization: Mapping[str, Any] | None) -> bool:
    """True for a `quantization_config` of our own (quant_method `compress`)."""
    return (quantization or {}).get("quant_method") == METHOD


def groups_of(layers: Mapping[str, Scheme]) -> dict[str, Any]:
    """The `quantization_config` of layers with these schemes."""
    by_entry: dict[str, list[str]] = {}
    for name, scheme in layers.items():
        by_entry.setdefault(json.dumps(scheme.entry(), sort_keys=True), []).append(name)
    kinds = {term.kind for scheme in layers.values() for term in scheme.terms}
    return {
        "quant_method": METHOD,
        "format": FORMAT,
        "modules": sorted({FORMATS[kind].__module__ for kind in kinds - OURS}),
        "groups": [{"targets": sorted(names), **json.loads(entry)} for entry, names in sorted(by_entry.items())],
    }


def read_groups(quantization: Mapping[str, Any], where: object) -> dict[str, Scheme]:
    """Inverse of `groups_of`: {layer: scheme}. Raises CheckpointError, which names `where`, for unreadable ones."""
    fits(quantization, OwnQuantization, where)
    if quantization["format"] != FORMAT:
        raise CheckpointError(f"{where} is of format {quantization['format']} of compress; readable: {FORMAT}")
    foreign = {str(t.get("kind")) for g in quantization["groups"] for t in g["terms"]} - FORMATS.keys()
    if foreign:
        modules = " or ".join(quantization["modules"]) or "unknown"
        raise CheckpointError(
            f"{where} holds the format {min(foreign)!r} of the module {modules}, which is no part of compress; if you "
            f"trust that module, have it imported first: --plugin {modules} (in Python: import it)"
        )
    return {target: read_entry(group, where) for group in quantization["groups"] for target in group["targets"]}
