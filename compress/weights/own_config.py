"""Schemes that compressed-tensors cannot express: a `quantization_config` of our own, with quant_method `compress`.

    {"quant_method": "compress", "format": 1, "modules": [...],
     "groups": [{"targets": [layer, ...], "terms": [{"kind": ..., ...}, ...], "inputs": ..., "outputs": ..., ...}],
     "caches": {"bits": ..., "group": ..., "rotated": ...}}

Every compressed layer of the checkpoint is a target, also layers of codes alone. caches: key-value caches in fewer
than 8 bits (`weights.kv_cache_codes.CacheScheme`); those of 8 bits have the words of compressed-tensors,
kv_cache_scheme. modules: the Python modules of formats that are not ours; they must be imported before the checkpoint
is read. Other readers must refuse such a checkpoint rather than leave out a term of a sum: vLLM does not know the
method, and transformers finds no weights under the names that it looks for (`checkpoint.files.VARIANT`).
"""

import json
from collections.abc import Mapping
from typing import Any, Literal, NotRequired, TypedDict

from compress.base.errors import CheckpointError
from compress.base.schema import fits
from compress.weights.compressed_tensors import read_cache_scheme
from compress.weights.formats.registry import FORMATS, OURS
from compress.weights.grid import Grid
from compress.weights.kv_cache_codes import IN_BYTES, CacheScheme
from compress.weights.scheme import Scheme, read_entry

METHOD = "compress"
FORMAT = 1
CACHES = "caches"
CACHE_SCHEME = "kv_cache_scheme"


class SchemeEntry(TypedDict):
    """The JSON of a `Scheme.entry`."""

    terms: list[dict[str, Any]]
    inputs: Grid | None
    outputs: Grid | None
    dynamic: bool
    rotation: NotRequired[int | None]


class SchemeGroup(SchemeEntry):
    targets: list[str]


class CachesEntry(TypedDict):
    """The JSON of a `CacheScheme` of 4 or 3 bits."""

    bits: Literal[4, 3]
    group: int
    rotated: bool


class OwnQuantization(TypedDict):
    format: int
    modules: list[str]
    groups: list[SchemeGroup]
    caches: NotRequired[CachesEntry]


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


def caches_entry(scheme: CacheScheme) -> CachesEntry:
    """The entry of key-value caches in fewer than 8 bits."""
    assert scheme.bits != 8
    assert scheme.group is not None
    return {"bits": scheme.bits, "group": scheme.group, "rotated": scheme.rotated}


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


def caches_of(quantization: Mapping[str, Any] | None) -> CacheScheme | None:
    """The scheme of the key-value caches of a `quantization_config`, in our own words or in those of
    compressed-tensors; None where it has none. Raises CheckpointError for one that cannot be read."""
    quantization = quantization or {}
    if is_own(quantization) and CACHES in quantization:
        entry = quantization[CACHES]
        if entry["group"] < IN_BYTES:
            raise CheckpointError(f"{CACHES} in groups of {entry['group']}; readable: {IN_BYTES} or more")
        return CacheScheme(bits=entry["bits"], group=entry["group"], rotated=entry["rotated"])
    entry = quantization.get(CACHE_SCHEME)
    return read_cache_scheme(entry) if entry else None
