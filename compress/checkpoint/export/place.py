"""The files of an export while they are written. The output appears under its name only when all files exist.

DIR.partial/blocks   finished tensors, in files of bounded size
DIR.partial/model    the files of the output, side by side; only companions lie in folders
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from compress.base.progress import Reporter
from compress.checkpoint.companions import Companions
from compress.checkpoint.files import INDEX, OWN_INDEX, OWN_WHOLE, RECORD, WHOLE, checksum, write_json, write_whole
from compress.checkpoint.leftovers import BLOCKS, MODEL, expect, of_checkpoint
from compress.checkpoint.write.directory import Directory
from compress.checkpoint.write.join import copy_companions, seal, write_index
from compress.checkpoint.write.shards import pieces_of, plan_shards, write_shard

# Of tensors that wait in memory to be written.
PART_BYTES = 2**28


class Place:
    """Takes the files of an export.

    Every file that is written through a method here is named and sealed by the record, counted, replaced with
    --overwrite, and removed where the export fails or is killed. An OSError in between becomes one line for the person.

    lost: remarks so far. sums: {tensor: SHA-256} of those that `tensors` has written.
    """

    def __init__(self, directory: Directory, reporter: Reporter) -> None:
        self.lost: list[str] = []
        self.sums: dict[str, str] = {}
        self._directory, self._reporter = directory, reporter
        self._folder = directory.model
        self._folder.mkdir(exist_ok=True)
        self._names: set[str] = set()
        self._weights: set[str] = set()

    def note(self, line: str) -> None:
        """Report a line about something that the output lacks or keeps unchanged: to the person, in the record and in
        the result."""
        self.lost.append(line)
        self._reporter.note(line)

    def step(self, done: int, total: int, what: str) -> None:
        """Report that `done` of `total` steps are finished; `what` names the last one."""
        self._reporter.step(done, total, what)

    def file(self, name: str) -> Path:
        """The path at which to write a file with weights, in any format."""
        self._weights.add(name)
        return self._take(name)

    def aside(self, name: str) -> Path:
        """The path of a file for reading the output back alone, which is gone once the output has its name
        (`found_aside`)."""
        return self._directory.blocks / name

    def text(self, name: str, content: str) -> None:
        """Write a text file without weights."""
        write_whole(self._take(name), content)

    def json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a JSON file, like config.json."""
        write_json(self._take(name), value)

    def tensors(self, tensors: Iterable[tuple[str, Tensor]], total: int, *, own: bool = False) -> None:
        """Write named tensors, `total` in all, as safetensors files with the usual names, and an index where there are
        several. Of what is made lazily at most PART_BYTES, or one tensor, are in memory at a time.

        own: the configuration is in words of compress alone (`weights.own_config`), and so are the names.
        """
        for i, part in enumerate(batches(tensors)):
            save_file(part, self._directory.blocks / f"part-{i:05d}.safetensors", metadata={"format": "pt"})
            self.sums |= {name: checksum(tensor) for name, tensor in part.items()}
            self.step(len(self.sums), total, next(reversed(part)))
        weight_map = self._join(OWN_WHOLE if own else WHOLE)
        if write_index(self._folder, weight_map, index := OWN_INDEX if own else INDEX):
            self._take(index)

    def finish(self, companions: Companions | None, record: Mapping[str, Any]) -> int:
        """Copy the companions, except files that were written already, then seal all files. Returns the bytes of the
        files with weights."""
        if companions is not None:
            self._names |= copy_companions(self._folder, companions, self._names)
        seal(self._folder, self._names, {**record, **({"tensors": self.sums} if self.sums else {})})
        return sum((self._folder / name).stat().st_size for name in self._weights)

    def _take(self, name: str) -> Path:
        """The path of a file, recorded as ours, so that a later run recognises it even if this one is killed now."""
        assert Path(name).name == name != RECORD, name
        self._names.add(name)
        if not of_checkpoint(name):
            expect(self._directory.partial, self._names)
        return self._folder / name

    def _join(self, whole: str) -> dict[str, str]:
        """Copy the parts into weight files, and remove each part once copied. Returns {tensor: file}."""
        parts = sorted(self._directory.blocks.iterdir())
        held = [piece for part in parts for piece in pieces_of(part)]
        plan = plan_shards(held, whole, self._directory.shard_bytes)
        left = {part: len(pieces_of(part)) for part in parts}
        for file, pieces in plan.items():
            write_shard(self.file(file), pieces, self.sums)
            for piece in pieces:
                left[piece.file] -= 1
                if not left[piece.file]:
                    piece.file.unlink()
        return {piece.name: file for file, pieces in plan.items() for piece in pieces}


def found_aside(folder: Path, name: str) -> Path | None:
    """The file of `Place.aside` for an output in `folder`; None where the output has its name already."""
    path = folder.parent / BLOCKS / name
    return path if folder.name == MODEL and path.is_file() else None


def batches(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Groups of tensors of at most PART_BYTES together, or of a single tensor."""
    batch: dict[str, Tensor] = {}
    room = PART_BYTES
    for name, tensor in tensors:
        if batch and tensor.nbytes > room:
            yield batch
            batch, room = {}, PART_BYTES
        batch[name] = tensor.contiguous()
        room -= tensor.nbytes
    yield batch
