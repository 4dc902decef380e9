"""Names of a checkpoint's tensors and layers in its files and in its model."""

from compress.base.errors import CheckpointError
from compress.checkpoint.read.compressed_layers import stored_in
from compress.checkpoint.read.pretrained import empty_model
from compress.checkpoint.read.source import Source
from compress.model.disk_names import DiskNames, disk_names


def names_in(source: Source) -> DiskNames:
    """Names of tensors in a checkpoint's files and in its model; the same ones where transformers makes no model of
    it."""
    return source.once("names", lambda: _names_in(source))


def stored_name(source: Source, layer: str) -> str:
    """The name in the files of a layer of the record, which has the model's names."""
    if f"{layer}.weight" in source.weights or layer in stored_in(source).layers:
        return layer
    return names_in(source).on_disk(layer)


def _names_in(source: Source) -> DiskNames:
    try:
        return disk_names(empty_model(source), source.headers)
    except CheckpointError:
        return DiskNames()
