"""The buffers of a model that are part of its checkpoint."""

from collections.abc import Iterator

from torch import Tensor, nn


def stored_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(Full name, buffer) of every persistent buffer, once for each name that it has."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer
