"""Names of a checkpoint's tensors and layers in its files and in its model."""

from collections.abc import Mapping

from compress.checkpoint.read.pretrained import empty_model
from compress.checkpoint.read.source import Source
from compress.checkpoint.read.stored import stored_in
from compress.errors import CheckpointError
from compress.model.disk_names import DiskNames, disk_names
from compress.model.experts_apart import NUMBERED
from compress.weights.scheme import Scheme


def names_in(source: Source) -> DiskNames:
    """Names of tensors in a checkpoint's files and in its model; the same ones where transformers makes no model of
    it."""
    return source.once("names", lambda: _names_in(source))


def stored_name(source: Source, layer: str) -> str:
    """The name in the files of a layer of the record, which has the model's names."""
    if f"{layer}.weight" in source.weights or layer in stored_in(source).layers:
        return layer
    return names_in(source).on_disk(layer)


def mixed_experts(schemes: Mapping[str, Scheme]) -> list[str]:
    """Names of the modules whose experts have several schemes."""
    found: dict[str, set[Scheme]] = {}
    for name, scheme in schemes.items():
        if (held := NUMBERED.match(f"{name}.weight")) is not None:
            found.setdefault(held[1], set()).add(scheme)
    return [name for name, each in found.items() if len(each) > 1 and name.endswith("experts")]


def _names_in(source: Source) -> DiskNames:
    try:
        return disk_names(empty_model(source), source.headers)
    except CheckpointError:
        return DiskNames()
