"""A configuration beside the weight files: a model that these cannot fill is refused before memory is taken for it."""

from math import prod

from torch import nn

from compress.checkpoint.read.source import Source
from compress.checkpoint.read.stored import stored_in
from compress.errors import CheckpointError

# What a model may have beyond the files before it is refused here: below that the loader, which takes memory for the
# rest, names the tensor that is missing.
SLACK_ELEMENTS = 2**26
SLACK_FACTOR = 2


def check_room(source: Source, empty: nn.Module) -> None:
    """Raise CheckpointError where a model, which is on the meta device, is far larger than the weight files hold."""
    asked, held = elements_of(empty), elements_in(source)
    if asked <= SLACK_FACTOR * held + SLACK_ELEMENTS:
        return
    raise CheckpointError(
        f"{source.path / 'config.json'} describes a {type(empty).__name__} of {asked:,} values and the weight files "
        f"hold {held:,}{_example(source, empty)}; fetch the checkpoint again"
    )


def elements_of(model: nn.Module) -> int:
    """Values of a model's parameters and buffers, tied ones counted once."""
    return sum(tensor.numel() for tensor in (*model.parameters(), *model.buffers()))


def elements_in(source: Source) -> int:
    """Values that the tensors of a checkpoint stand for: codes count as the weights that they are of."""
    layers = [] if source.quantization is None else [*stored_in(source).layers.values()]
    parts = {name for stored in layers for name in stored.parts.values()}
    coded = sum(prod(stored.shape) for stored in layers if stored.shares is None)
    return coded + sum(prod(shape) for name, (shape, _) in source.headers.items() if name not in parts)


def _example(source: Source, empty: nn.Module) -> str:
    """The first tensor that has another shape in the files, in words; nothing where there is none."""
    for name, tensor in empty.named_parameters():
        found = source.headers.get(name)
        if found is not None and found[0] != tuple(tensor.shape):
            return f" ({name} has shape {list(found[0])}, the model's has {list(tensor.shape)})"
    return ""
