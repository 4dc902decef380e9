"""The interface of exporters, each of which writes a checkpoint in one layout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from compress.checkpoint.export.place import Place
from compress.checkpoint.leftovers import COMPANIONS
from compress.checkpoint.read.source import Source


@dataclass(frozen=True)
class Written:
    """The result of an exporter: the number of layers stored another way than before, and entries that it sets in the
    record."""

    layers: int
    record: Mapping[str, Any] = field(default_factory=dict)


class Exporter(Protocol):
    """Writes a checkpoint in one layout: which files there are, their names, tensors and configuration.

    Everything else is shared (`checkpoint.export.write`): the output appears whole or not at all, --overwrite replaces
    only what this tool wrote, and the record seals every file.

    about: the layout and its readers, a phrase. kind: a word for sentences ("14 layers are <kind>") and the record.
    smaller: its outputs are to take fewer bytes, so a command that saves next to nothing fails. companions: patterns of
    files that are copied from the checkpoint, but for those that the exporter writes itself; a licence always is.
    """

    about: ClassVar[str]
    kind: ClassVar[str]
    smaller: ClassVar[bool] = False
    companions: ClassVar[Sequence[str]] = COMPANIONS

    def why_not(self, checkpoint: Source) -> list[str]:
        """Reasons why this checkpoint cannot be written so, each the end of a sentence about it ("it is not
        compressed"); none where it can. Asked before anything is written."""
        ...

    def write(self, checkpoint: Source, place: Place) -> Written:
        """Write a checkpoint against which there are no reasons (`stored_in` says what it holds), config.json included
        where the layout has one. Raises CheckpointError for damage that only reading its tensors shows."""
        ...
