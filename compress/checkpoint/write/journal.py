"""The journal of an unfinished run: `OUT.partial/progress.json`, complete after every block.

It names the files of each block with the SHA-256 of each tensor in them, and holds everything else that a run needs in
order to continue after a block without computing it again. `moved` names the tensors that are already in the weight
files of the checkpoint.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from compress.base.errors import CheckpointError
from compress.base.schema import fits
from compress.checkpoint.files import read_json, write_json
from compress.checkpoint.write.record import LayerRecord, RangeRecord
from compress.model.edits.folds import FoldRecord
from compress.weights.caches import CacheScheme
from compress.weights.own_config import SchemeEntry

PROGRESS = "progress.json"
KIND, FORMAT = "unfinished run", 3
Files = dict[str, dict[str, str]]  # {file: {tensor: SHA-256}}


class EditPlace(TypedDict):
    """The edits of a block: their entries (`model.known_edits`), and the file of their tensors."""

    file: str
    edits: list[dict[str, Any]]


class JournalBlock(TypedDict):
    """A finished block. layers: the scheme of each, None where its values are stored dense."""

    files: Files
    layers: dict[str, SchemeEntry | None]
    records: list[LayerRecord]
    ranges: list[RangeRecord]
    left_alone: dict[str, str]
    fold_records: list[FoldRecord]
    edits: EditPlace | None
    caches: dict[str, CacheScheme]
    not_folded: NotRequired[list[str]]


class Content(TypedDict):
    """The content of the file."""

    compress: str
    format: int
    identity: str
    blocks: dict[str, JournalBlock]
    rest: Files | None
    moved: dict[str, str]
    complete: bool


@dataclass
class Journal:
    """The journal of a run.

    identity: fingerprint of the run ('' before it is known). blocks: {block: the JSON of a `JournalBlock`}, in the
    order in which they were finished. rest: the files of tensors outside the blocks, once written. moved: {tensor:
    weight file}.
    complete: only renaming the directory is left to do.
    """

    identity: str = ""
    blocks: dict[str, dict[str, Any]] = field(default_factory=dict)
    rest: Files | None = None
    moved: dict[str, str] = field(default_factory=dict)
    complete: bool = False

    @classmethod
    def read(cls, path: Path) -> "Journal":
        """The journal in a file. Raises CheckpointError, which names the key, for a file that is no journal, or one of
        another version."""
        found = read_json(path)
        if not isinstance(found, dict) or found.get("compress") != KIND:
            raise CheckpointError(f"{path} is no record of an unfinished run; move {path.parent} away")
        if found.get("format") != FORMAT:
            raise CheckpointError(f"{path} is of another version of compress; remove {path.parent} or use that version")
        try:
            fits(found, Content, path)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; remove {path.parent}") from None
        return cls(found["identity"], found["blocks"], found["rest"], found["moved"], found["complete"])

    def write(self, path: Path) -> None:
        """Replace the file in one step."""
        write_json(path, {"compress": KIND, "format": FORMAT, **asdict(self)})

    @property
    def files(self) -> Mapping[str, Mapping[str, str]]:
        """{file: {tensor: SHA-256}} of all tensors written."""
        entries = [entry["files"] for entry in self.blocks.values()]
        if self.rest is not None:
            entries.append(self.rest)
        return {file: sums for files in entries for file, sums in files.items()}

    @property
    def checksums(self) -> dict[str, str]:
        """{tensor: SHA-256} of all tensors written, block after block, sorted by name inside each block."""
        found: dict[str, str] = {}
        for files in [*(entry["files"] for entry in self.blocks.values()), self.rest or {}]:
            tensors = {name: digest for sums in files.values() for name, digest in sums.items()}
            found |= dict(sorted(tensors.items()))
        return found
