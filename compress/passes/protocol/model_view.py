"""A whole model, as a pass sees it that edits it before anything else is decided."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import nn

from compress.base.collectives import Comm
from compress.model.calls import Batch, Call
from compress.model.edits.folds import Fold
from compress.model.edits.keep_channels import Coupling
from compress.model.known_edits import Applicable
from compress.model.structure.streams import FoundStreams
from compress.passes.protocol.removal import RemovalOptions

WatchBlock = Callable[[nn.Module, Call], AbstractContextManager[None]]


@dataclass(frozen=True)
class Foreseen:
    """Edits of which each is decided once those before it are made, and the model that they leave.

    model: the edited model without values: its shapes and its configuration. edits: yields (name of a module, edit of
    it), the same on every rank; each is made before the next is asked for. notes: lines for the person, of words for
    the size of what is left.
    """

    model: nn.Module
    edits: Callable[[], Iterator[tuple[str, Applicable]]]
    notes: Callable[[str], Sequence[str]]


@dataclass(frozen=True)
class Whole:
    """A model of which every rank has all tensors.

    model: in evaluation mode, on the device on which it was read; not to be changed. batches: this rank's micro-batches
    of calibration data, none where nobody gave any. couplings: {block: the groups of channels and heads that can go of
    it}, found by trial when it is called; those that no pattern of `ignore` speaks against. streams: its hidden states
    that take a rotation. matrix_folds: {block: its folds along which a matrix passes, with the largest size of one}.
    through: runs this rank's micro-batches through all blocks, each call of a block inside the context that is made of
    both. removal: the edits that remove shares of it. note: tells the person something, which also goes into the
    record.
    """

    model: nn.Module
    batches: Sequence[Batch]
    comm: Comm
    couplings: Callable[[], Mapping[str, Sequence[Coupling]]]
    streams: Callable[[], FoundStreams]
    matrix_folds: Callable[[], Mapping[str, Sequence[tuple[Fold, int]]]]
    through: Callable[[WatchBlock], None]
    removal: Callable[[RemovalOptions], Foreseen]
    note: Callable[[str], None]
