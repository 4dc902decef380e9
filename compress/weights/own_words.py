"""Schemes that compressed-tensors has no words for, in ours: a `quantization_config` whose quant_method is `compress`.

    {"quant_method": "compress", "format": 1, "modules": [...],
     "groups": [{"targets": [layer, ...], "terms": [{"kind": ..., ...}, ...], "inputs": ..., "outputs": ..., ...}]}

Every compressed layer of the checkpoint is a target, those that are codes alone, too. modules: those that have formats
which are not ours; they must be imported before the checkpoint is read. Other readers are to refuse such a checkpoint,
rather than leave out a term of a sum: vLLM knows no such method, transformers finds no weights under the names that it
looks for (`checkpoint.files.VARIANT`).
"""

import json
from collections.abc import Mapping
from typing import Any, TypedDict

from compress.errors import CheckpointError
from compress.system.schema import fits
from compress.weights.formats.registry import FORMATS, OURS
from compress.weights.grid import Grid
from compress.weights.scheme import Scheme, read_entry

METHOD = "compress"
FORMAT = 1


class Entry(TypedDict):
    """A `Scheme.entry`."""

    terms: list[dict[str, Any]]
    inputs: Grid | None
    outputs: Grid | None
    dynamic: bool


class Group(Entry):
    targets: list[str]


class Quantization(TypedDict):
    format: int
    modules: list[str]
    groups: list[Group]


def is_own(quantization: Mapping[str, Any] | None) -> bool:
    """Whether a `quantization_config` is in our own words."""
    return (quantization or {}).get("quant_method") == METHOD


def groups_of(layers: Mapping[str, Scheme]) -> dict[str, Any]:
    """Layers with their schemes as a `quantization_config` has them."""
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
    """Inverse of `groups_of`: {layer: scheme}. Raises CheckpointError, naming `where`, for what cannot be read."""
    fits(quantization, Quantization, where)
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
