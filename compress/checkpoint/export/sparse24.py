"""Exports a checkpoint with its 2:4 layers (numbers or codes) stored without their zeros, for `compress.load`.

A run writes dense weights with zeros, or codes with zeros in the format of compressed-tensors, which every reader
reads. This export stores the 2:4 layers among them in `weights.formats.sparse24`, whichever pass pruned them. Layers
that are not 2:4, or that would not take less space, stay as they are, and a note gives the reason.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from compress.base.errors import InputError
from compress.checkpoint.export.exporter import Exporter, Written
from compress.checkpoint.export.place import Place
from compress.checkpoint.files import RECORD, checksum
from compress.checkpoint.portable_names import command
from compress.checkpoint.read.compressed_layers import stored_in, weight_of
from compress.checkpoint.read.pretrained import stored_name
from compress.checkpoint.read.source import Source, once
from compress.checkpoint.write.join import LOADING
from compress.checkpoint.write.manifest import read_record
from compress.weights.formats.dense import dense
from compress.weights.formats.sparse24 import sparse24
from compress.weights.own_config import CACHE_SCHEME, CACHES, groups_of
from compress.weights.scheme import Scheme, parts_of, scheme_of


class Layer24(NamedTuple):
    """A layer stored as 2:4: its scheme, its tensors, and the SHA-256 of its values."""

    scheme: Scheme
    parts: dict[str, Tensor]
    checksum: str


class Layers24(NamedTuple):
    """The layers of a checkpoint that take less space as 2:4 (layers, without their tensors), the number of tensors
    that store them (parts), and {layer: the reason why it stays} for others (refused)."""

    layers: dict[str, Layer24]
    parts: int
    refused: dict[str, str]


class TwoOfFour(Exporter):
    """Stores 2:4 layers as two of every four weights and their positions. The values are the same."""

    about = "2:4 layers, numbers or codes, without their zeros, for compress.load alone"
    kind = "2:4"
    smaller = True

    def why_not(self, checkpoint: Source) -> list[str]:
        """Reasons where the record of a run is missing, or names no layer that takes less space as 2:4."""
        if not (checkpoint.path / RECORD).exists():
            return [f"it holds no {RECORD}, which names the layers that are pruned; prune it first"]
        found = found24(checkpoint)
        if found.layers:
            return []
        first = ", like {}: {}".format(*next(iter(found.refused.items()))) if found.refused else ": it names none"
        return [f"it has no layer that is stored smaller as 2:4{first}"]

    def write(self, checkpoint: Source, place: Place) -> Written:
        """Write the 2:4 layers, made one after the other, the other layers unchanged, and a configuration of our
        own."""
        selection = found24(checkpoint)
        for name, why in selection.refused.items():
            place.note(f"{name} stays as it is stored: {why}")
        total = selection.parts + sum(1 for _, sparse in written(checkpoint, selection.layers) if not sparse)
        place.tensors(tensors(checkpoint, selection.layers), total, own=True)
        place.json("config.json", configuration(checkpoint, selection.layers))
        place.text("README.md", LOADING)
        return Written(len(selection.layers), record_of(checkpoint, selection.layers, place.lost))


@once
def found24(source: Source) -> Layers24:
    """The 2:4 layers among those that the run treated."""
    layers: dict[str, Layer24] = {}
    refused: dict[str, str] = {}
    parts = 0
    for name in dict.fromkeys(stored_name(source, layer["name"]) for layer in read_record(source.path)["layers"]):
        try:
            made = layer24(source, name)
            layers[name] = made._replace(parts={})
            parts += len(made.parts)
        except InputError as why:
            refused[name] = str(why)
    return Layers24(layers, parts, refused)


def configuration(source: Source, found: Mapping[str, Layer24]) -> dict[str, Any]:
    """config.json of a checkpoint whose layers in `found` are stored 2:4."""
    schemes = {name: layer.scheme for name, layer in stored_in(source).layers.items()}
    quantization = groups_of(schemes | {name: layer.scheme for name, layer in found.items()})
    before = source.quantization or {}
    quantization |= {key: before[key] for key in (CACHES, CACHE_SCHEME) if key in before}
    return {**source.config, "quantization_config": quantization}


def layer24(source: Source, name: str) -> Layer24:
    """A layer of a checkpoint converted to 2:4. Raises InputError, with the reason, where it cannot be, or would not
    take less space."""
    stored = stored_in(source).layers.get(name)
    if stored is None:
        weight = source.weights.tensor(f"{name}.weight")
        if weight.ndim != 2:
            raise InputError(f"its weight has {weight.ndim} dimensions")
        stored_parts = {"weight": weight}
        term = sparse24(dense(weight))
        scheme, parts = scheme_of(term), parts_of(term)
    else:
        if len(stored.scheme.terms) > 1 or stored.shares is not None:
            raise InputError("its weight is a sum of terms, or another layer's")
        stored_parts = stored.read(source)
        term = sparse24(weight_of(source, name).terms[0])
        scheme = replace(stored.scheme, terms=(term.format,))
        rounding = {
            part: stored_parts[part]
            for part in scheme.parts(*term.shape).keys() & stored_parts.keys() - term.parts().keys()
        }
        parts = {**parts_of(term), **rounding}
    size, was = (sum(part.nbytes for part in each.values()) for each in (parts, stored_parts))
    if size >= was:
        raise InputError(f"it takes {was:,} bytes, and {size:,} as 2:4")
    return Layer24(scheme, parts, checksum(term.dequantize()))


def written(source: Source, found: Collection[str]) -> Iterator[tuple[str, bool]]:
    """(Name of a tensor to copy, False) or (name of a 2:4 layer, True), in the order of the checkpoint."""
    stored = stored_in(source).layers
    layer_of = {part: name for name in found if name in stored for part in stored[name].parts.values()}
    layer_of |= {f"{name}.weight": name for name in found if name not in stored}
    return ((name, name in found) for name in dict.fromkeys(layer_of.get(name, name) for name in source.weights))


def tensors(source: Source, found: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """(Name, tensor) of everything to write; layers are made one after the other."""
    for name, sparse in written(source, found):
        if sparse:
            yield from ((f"{name}.{part}", tensor) for part, tensor in layer24(source, name).parts.items())
        else:
            yield name, source.weights.tensor(name)


def record_of(source: Source, found: Mapping[str, Layer24], lost: Sequence[str]) -> dict[str, Any]:
    """The record of the run that pruned, with new checksums for the converted layers, and the notes of the export."""
    before = read_record(source.path)
    layers = [
        {**layer, "figures": {**layer["figures"], "sha256": found[name].checksum}}
        if (name := stored_name(source, layer["name"])) in found
        else layer
        for layer in before["layers"]
    ]
    return {
        **before,
        "identity": {"export": TwoOfFour.kind, "model": source.fingerprint()},
        "command": command(),
        "coverage": None,
        "layers": layers,
        "notes": [*before["notes"], *lost],
        "verification": None,
    }
