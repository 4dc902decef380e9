"""The bytes of a model before a run and after it."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from torch.nn.parameter import is_lazy

from compress.checkpoint.read.configuration import Header
from compress.checkpoint.read.source import Source
from compress.checkpoint.read.weight_files import tensor_bytes
from compress.model.tensors import stored_buffers


@dataclass(frozen=True)
class Saving:
    """Bytes of all tensors of a model, without the headers of its files."""

    before: int
    after: int

    @property
    def share(self) -> float:
        """The share of bytes saved; negative where there are more bytes after than before."""
        return 1 - self.after / max(self.before, 1)


def bytes_before(source: Source | None, model: nn.Module | None) -> int:
    """Bytes of the tensors that a run begins with: those of the checkpoint, or of a model in memory."""
    if source is not None:
        return bytes_of(source.weights.stored.items())
    assert model is not None
    buffers = {id(buffer): buffer for _, buffer in stored_buffers(model)}
    shaped = [p for p in model.parameters() if not is_lazy(p)]  # lazy ones are refused later, with the layers
    return sum(t.numel() * t.element_size() for t in (*shaped, *buffers.values()))


def bytes_of(headers: Iterable[tuple[str, Header]]) -> int:
    """Bytes of tensors by their headers. Raises CheckpointError for a dtype that is not known."""
    return sum(tensor_bytes(name, *header) for name, header in headers)
