"""The interface of exporters, each of which writes a checkpoint in one layout."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from compress.checkpoint.companions import EVERYTHING
from compress.checkpoint.export.place import Place
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
    turns_back: it takes the rotations of inputs that a model computes as it runs out of the weights; the others refuse
    them. smaller: its outputs are to take fewer bytes, so a command that saves next to nothing fails. options: names of
    the words that its class may be made with, which are options of the command. one_file: the layout is no safetensors
    files, of which there may be several. companions: patterns of files that are copied from the checkpoint, but for
    those that the exporter writes itself; a licence always is.
    """

    about: ClassVar[str]
    kind: ClassVar[str]
    turns_back: ClassVar[bool] = False
    smaller: ClassVar[bool] = False
    options: ClassVar[Sequence[str]] = ()
    one_file: ClassVar[bool] = False
    companions: ClassVar[Sequence[str]] = EVERYTHING

    @property
    def reads_back(self) -> bool:
        """True where the outputs are no checkpoints, and `read_back` reads them with the package of their readers."""
        return False

    def why_not(self, checkpoint: Source) -> list[str]:
        """Reasons why this checkpoint cannot be written so, each the end of a sentence about it ("it is not
        compressed"); none where it can. Asked before anything is written."""
        ...

    def why_not_model(self, model: Source) -> list[str]:
        """Reasons why no codes of this model can be written so, the ends of sentences about it: its family, or a
        package that is missing. Asked before it is quantized; none by default."""
        return []

    def write(self, checkpoint: Source, place: Place) -> Written:
        """Write a checkpoint against which there are no reasons (`stored_in` says what it holds), config.json included
        where the layout has one. Raises CheckpointError for damage that only reading its tensors shows."""
        ...

    def read_back(self, folder: Path, record: Mapping[str, Any]) -> dict[str, Any] | None:
        """Read an output of this exporter with the package of its readers, and compare it with what was decided, as its
        record says (`Written.record`). Returns what was found, `layers` and `reader` among it; None for a layout that
        is read as a checkpoint. Raises CheckpointError for an output that differs, InputError where the package is
        missing."""
        return None
