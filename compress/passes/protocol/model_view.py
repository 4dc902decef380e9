"""A whole model, as a pass sees it that edits it before anything else is decided."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

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


class Whole(Protocol):
    """A model of which every rank has all tensors."""

    @property
    def model(self) -> nn.Module:
        """In evaluation mode, on the device on which it was read; not to be changed."""

    @property
    def batches(self) -> Sequence[Batch]:
        """This rank's micro-batches of calibration data, none where nobody gave any."""

    @property
    def comm(self) -> Comm:
        """The ranks."""

    def couplings(self) -> Mapping[str, Sequence[Coupling]]:
        """{block: the groups of channels and heads that can go of it}, found by trial; those that no pattern of
        `ignore` speaks against."""

    def streams(self) -> FoundStreams:
        """The hidden states that take a rotation."""

    def matrix_folds(self) -> Mapping[str, Sequence[tuple[Fold, int]]]:
        """{block: its folds along which a matrix passes, with the largest size of one}."""

    def through(self, watch: WatchBlock) -> None:
        """Run this rank's micro-batches through all blocks, each call of a block inside the context that `watch` makes
        of both."""

    def removal(self, p: RemovalOptions) -> Foreseen:
        """The edits that remove shares of the model."""

    def note(self, message: str) -> None:
        """Tell the person something, which also goes into the record."""
