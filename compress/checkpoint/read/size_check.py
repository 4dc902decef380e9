"""Compares a configuration with the weight files: refuses a model that is too large for them before it takes memory."""

from math import prod

from torch import nn

from compress.base.errors import CheckpointError
from compress.checkpoint.read.compressed_layers import stored_in
from compress.checkpoint.read.source import Source

# A model may have this many values beyond those of the files. Below that the loader, which takes memory for them, names
# the missing tensor.
SLACK_ELEMENTS = 2**26
SLACK_FACTOR = 2


def check_room(source: Source, empty: nn.Module) -> None:
    """Raises CheckpointError for a model (on the meta device) of far more values than the weight files hold."""
    asked, held = elements_of(empty), elements_in(source)
    if asked <= SLACK_FACTOR * held + SLACK_ELEMENTS:
        return
    raise CheckpointError(
        f"{source.path / 'config.json'} describes a {type(empty).__name__} of {asked:,} values and the weight files "
        f"hold {held:,}{_example(source, empty)}; fetch the checkpoint again"
    )


def elements_of(model: nn.Module) -> int:
    """The number of values in a model's parameters and buffers; tied ones count once."""
    return sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))


def elements_in(source: Source) -> int:
    """The number of values in a checkpoint; a compressed layer counts with all its weights."""
    layers = [] if source.quantization is None else [*stored_in(source).layers.values()]
    parts = {name for stored in layers for name in stored.parts.values()}
    coded = sum(prod(stored.shape) for stored in layers if stored.shares is None)
    return coded + sum(prod(shape) for name, (shape, _) in source.headers.items() if name not in parts)


def _example(source: Source, empty: nn.Module) -> str:
    """Words for the first tensor with another shape in the files; empty where there is none."""
    for name, tensor in empty.named_parameters():
        found = source.headers.get(name)
        if found is not None and found[0] != tuple(tensor.shape):
            return f" ({name} has shape {list(found[0])}, the model's has {list(tensor.shape)})"
    return ""
