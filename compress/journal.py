"""What an unfinished run has safely on disk: `OUT.partial/progress.json`, whole after every block.

It names the files of each block with the SHA-256 of each tensor in them, and what else a run needs in order to go on
behind a block without computing it again. `moved` says which tensors lie in the weight files of the checkpoint already.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from compress.checkpoint import read_json, write_json
from compress.errors import CheckpointError

PROGRESS = "progress.json"
KIND, FORMAT = "unfinished run", 2


@dataclass
class Journal:
    """identity: fingerprint of what is run ('' before it is known). blocks: {block: its entry}, in the order in which
    they were finished; an entry's `files` is {file: {tensor: SHA-256}}. rest: the same of what lies outside the blocks,
    once it is written. moved: {tensor: weight file}. complete: nothing is left to do but to name the directory."""

    identity: str = ""
    blocks: dict[str, dict[str, Any]] = field(default_factory=dict)
    rest: dict[str, dict[str, str]] | None = None
    moved: dict[str, str] = field(default_factory=dict)
    complete: bool = False

    @classmethod
    def read(cls, path: Path) -> "Journal":
        """Raises CheckpointError for a file that is not one, or not one of this version."""
        found = read_json(path)
        if not isinstance(found, dict) or found.pop("compress", None) != KIND:
            raise CheckpointError(f"{path} is no record of an unfinished run; move {path.parent} away")
        if found.pop("format", None) != FORMAT:
            raise CheckpointError(f"{path} is of another version of compress; remove {path.parent} or use that version")
        kinds = {"identity": str, "blocks": dict, "rest": dict | None, "moved": dict, "complete": bool}
        if set(found) != set(kinds) or not all(isinstance(found[key], kind) for key, kind in kinds.items()):
            raise CheckpointError(f"{path} is damaged; remove {path.parent}")
        return cls(**found)

    def write(self, path: Path) -> None:
        """Replace the file in one step."""
        write_json(path, {"compress": KIND, "format": FORMAT, **asdict(self)})

    @property
    def files(self) -> dict[str, Mapping[str, str]]:
        """{file: {tensor: SHA-256}} of everything that was written."""
        entries = [entry["files"] for entry in self.blocks.values()]
        if self.rest is not None:
            entries.append(self.rest)
        return {file: sums for files in entries for file, sums in files.items()}

    @property
    def checksums(self) -> dict[str, str]:
        """{tensor: SHA-256} of everything that was written, block after block, by name inside one."""
        found: dict[str, str] = {}
        for files in [*(entry["files"] for entry in self.blocks.values()), self.rest or {}]:
            tensors = {name: digest for sums in files.values() for name, digest in sums.items()}
            found |= dict(sorted(tensors.items()))
        return found
