"""A checkpoint whose layers are 2:4 (numbers with zeros, or codes) without those zeros, for `compress.load`.

    OUT --layer by layer--> DIR.partial --> DIR        values the same, `quant_method: compress`

Dense zeros, and codes with zeros in the words of compressed-tensors, are what a run writes: every reader takes them.
What is 2:4 of that is stored as `weights.formats.sparse24` here, whatever pass pruned it. Layers that are not 2:4, or
take no less space so, stay as they are stored, with the reason.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from compress.checkpoint.export.dense import Export, Exported, write_export
from compress.checkpoint.files import OWN_WHOLE, RECORD, checksum
from compress.checkpoint.read.source import Source, find_source
from compress.checkpoint.read.stored import stored_in, weight_of
from compress.checkpoint.shown import command
from compress.checkpoint.write.manifest import read_record
from compress.errors import InputError
from compress.system.progress import Reporter, Silent
from compress.weights.formats.dense import dense
from compress.weights.formats.sparse24 import sparse24
from compress.weights.own_words import groups_of
from compress.weights.scheme import Scheme, parts_of, scheme_of


class Layer24(NamedTuple):
    """A layer that is stored 2:4: its tensors, and the SHA-256 of its values."""

    scheme: Scheme
    parts: dict[str, Tensor]
    checksum: str


def export_sparse24(
    model: str | Path, output: str | Path, *, overwrite: bool = False, reporter: Reporter | None = None
) -> Exported:
    """Write a checkpoint of this tool with its 2:4 layers stored as such: of every four weights two, and where they
    are. The values are the same; only `compress.load` reads them so.

    model: a directory with the record of its run, which names the layers. output, overwrite: as of `export_dense`.
    Which layers stay as they are, and why, goes to the reporter, into the record and into what is returned.

    Raises InputError, having written nothing, where no layer is 2:4 or the output is in the way; CompressError where it
    cannot be written.
    """
    reporter, source = reporter or Silent(), find_source(str(model))
    if not (source.path / RECORD).exists():
        raise InputError(f"{source.name} holds no {RECORD}, which names the layers that are pruned; prune it first")
    found: dict[str, Layer24] = {}
    refused: dict[str, str] = {}
    parts = 0
    for name in dict.fromkeys(layer["name"] for layer in read_record(source.path)["layers"]):
        try:
            made = layer24(source, name)
            found[name] = made._replace(parts={})
            parts += len(made.parts)
        except InputError as why:
            refused[name] = str(why)
    if not found:
        first = ", like {}: {}".format(*next(iter(refused.items()))) if refused else ": it names none"
        raise InputError(f"{source.name} has no layer that is stored smaller as 2:4{first}")
    lost = tuple(f"{name} stays as it is stored: {why}" for name, why in refused.items())
    schemes = {name: layer.scheme for name, layer in stored_in(source).layers.items()}
    quantization = groups_of(schemes | {name: layer.scheme for name, layer in found.items()})
    if cache := (source.quantization or {}).get("kv_cache_scheme"):
        quantization["kv_cache_scheme"] = cache
    config = {**source.config, "quantization_config": quantization}
    total = parts + sum(1 for _, sparse in written(source, found) if not sparse)
    record = record_of(source, found, lost)
    export = Export(tensors(source, found), total, len(found), config, record, lost, OWN_WHOLE)
    return write_export(source, export, output, overwrite, reporter)


def layer24(source: Source, name: str) -> Layer24:
    """A layer of a checkpoint as it is stored 2:4. Raises InputError that says why there is no such layer."""
    stored = stored_in(source).layers.get(name)
    if stored is None:
        weight = source.weights.tensor(f"{name}.weight")
        if weight.ndim != 2:
            raise InputError(f"its weight has {weight.ndim} dimensions")
        held = {"weight": weight}
        term = sparse24(dense(weight))
        scheme, parts = scheme_of(term), parts_of(term)
    else:
        if len(stored.scheme.terms) > 1 or stored.shares is not None:
            raise InputError("its weight is a sum of terms, or another layer's")
        held = stored.read(source)
        term = sparse24(weight_of(source, name).terms[0])
        scheme = replace(stored.scheme, terms=(term.format,))
        rounding = {part: held[part] for part in scheme.parts(*term.shape).keys() & held.keys() - term.parts().keys()}
        parts = {**parts_of(term), **rounding}
    size, was = (sum(part.nbytes for part in each.values()) for each in (parts, held))
    if size >= was:
        raise InputError(f"it takes {was:,} bytes, and {size:,} as 2:4")
    return Layer24(scheme, parts, checksum(term.dequantize()))


def written(source: Source, found: Collection[str]) -> Iterator[tuple[str, bool]]:
    """(the name of a tensor that is copied, False) or (a layer that is 2:4, True), in the order of the checkpoint."""
    stored = stored_in(source).layers
    layer_of = {part: name for name in found if name in stored for part in stored[name].parts.values()}
    layer_of |= {f"{name}.weight": name for name in found if name not in stored}
    return ((name, name in found) for name in dict.fromkeys(layer_of.get(name, name) for name in source.weights))


def tensors(source: Source, found: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors to write, one layer made after the other."""
    for name, sparse in written(source, found):
        if sparse:
            yield from ((f"{name}.{part}", tensor) for part, tensor in layer24(source, name).parts.items())
        else:
            yield name, source.weights.tensor(name)


def record_of(source: Source, found: Mapping[str, Layer24], lost: tuple[str, ...]) -> dict[str, Any]:
    """The record of the run that pruned, with what is said of the layers that are stored otherwise now."""
    before = read_record(source.path)
    layers = [
        {**layer, "figures": {**layer["figures"], "sha256": found[layer["name"]].checksum}}
        if layer["name"] in found
        else layer
        for layer in before["layers"]
    ]
    return {
        **before,
        "identity": {"export": "2:4", "model": source.fingerprint()},
        "command": command(),
        "coverage": None,
        "layers": layers,
        "notes": [*before["notes"], *lost],
        "verification": None,
    }
