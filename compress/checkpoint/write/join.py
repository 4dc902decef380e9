"""Joins the blocks of a run to one checkpoint: copies them byte by byte to weight files and writes all other files."""

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from compress.base.errors import CheckpointError
from compress.checkpoint.byte_savings import bytes_of
from compress.checkpoint.companions import Companions
from compress.checkpoint.files import (
    INDEX,
    OWN_INDEX,
    OWN_WHOLE,
    RECORD,
    VARIANT,
    WHOLE,
    sync_directory,
    write_json,
    write_whole,
)
from compress.checkpoint.leftovers import MODEL, expect, expected_names, holds, is_left, of_checkpoint, remove
from compress.checkpoint.read.weight_files import WeightFiles
from compress.checkpoint.seal import write_record
from compress.checkpoint.write.all_ranks import Together
from compress.checkpoint.write.directory import Directory
from compress.checkpoint.write.journal import PROGRESS, Journal
from compress.checkpoint.write.shards import Piece, pieces_of, plan_shards, write_shard
from compress.weights.own_config import is_own

# For a person who loads the folder with transformers alone, whose error names only a missing model.safetensors.
LOADING = f"""# Loading this model

Its weights are in formats of compress (`{OWN_WHOLE}`), which transformers does not know by itself: without
the second line below it looks for `{WHOLE}` and fails.

```python
import compress, transformers
compress.register()
model = transformers.AutoModelForCausalLM.from_pretrained("PATH", variant="{VARIANT}")
```

`compress.load("PATH")` loads it, too. For other programs `compress export PATH --to dense --output DIR` writes a plain
checkpoint, without the saving.
"""

# The same for a module of the caller, which no configuration describes.
LOADING_INTO = """# Loading this model

It is of a class that transformers does not have. Make one of the same class and sizes, and fill it:

```python
import compress
model = compress.load("PATH", into=MyModel(...))
```
"""


class Assembly:
    """Joins the tensors of all blocks to weight files; each rank writes some of the files. The journal records copied
    tensors, so that a stopped run continues after them."""

    def __init__(self, place: Directory, journal: Journal, together: Together) -> None:
        self.place, self.journal, self.together = place, journal, together
        self.comm = together.comm

    def weight_files(self, whole: str) -> dict[str, str]:
        """Write the weight files, or a single one called `whole`; returns {tensor: file}. The file of a block is
        removed once all of it is copied, so that little more room than that of the checkpoint is needed."""
        sums = self.journal.checksums
        held = {piece.name: piece for piece in self.together("blocks", lambda: list(self._pieces()))}
        if lost := sorted(sums.keys() - held.keys()):
            raise CheckpointError(f"{lost[0]} is no longer in {self.place.partial}; drop that run with --overwrite")
        plan = plan_shards([held[name] for name in sums], whole, self.place.shard_bytes)
        open_files = [file for file, pieces in plan.items() if any(p.name not in self.journal.moved for p in pieces)]
        for first in range(0, len(open_files), self.comm.world):
            turn = open_files[first : first + self.comm.world]
            mine = {file: plan[file] for file in turn[self.comm.rank : self.comm.rank + 1]}
            self.together("model", partial(self._write_shards, mine, sums))
            self.journal.moved |= {piece.name: file for file in turn for piece in plan[file]}
            self.together.first(PROGRESS, lambda: self.journal.write(self.place.progress))
            self.together.first("blocks", self._drop_copied)
        return {piece.name: file for file, pieces in plan.items() for piece in pieces}

    def bytes_in(self, weight_map: Mapping[str, str]) -> int:
        """The bytes of the tensors in the written weight files."""
        files = sorted({self.place.model / file for file in weight_map.values()})
        return self.together("model", lambda: bytes_of(WeightFiles(files).headers.items()))

    def _write_shards(self, shards: Mapping[str, Sequence[Piece]], sums: Mapping[str, str]) -> None:
        for file, pieces in shards.items():
            write_shard(self.place.model / file, pieces, sums)

    def _pieces(self) -> Iterator[Piece]:
        """Every tensor of the checkpoint, in the file that holds it now."""
        paths = {self.path(file, name) for file, sums in self.journal.files.items() for name in sums}
        wanted = self.journal.checksums
        yield from (piece for path in sorted(paths) for piece in pieces_of(path) if piece.name in wanted)

    def path(self, file: str, tensor: str) -> Path:
        """The path of the file that now holds a tensor which was written to `file` of a block."""
        moved = self.journal.moved.get(tensor)
        return self.place.blocks / file if moved is None else self.place.model / moved

    def _drop_copied(self) -> None:
        for file, sums in self.journal.files.items():
            if all(name in self.journal.moved for name in sums):
                (self.place.blocks / file).unlink(missing_ok=True)


def write_beside(
    model: Path,
    weight_map: Mapping[str, str],
    config: Mapping[str, Any] | None,
    companions: Companions | None,
    extra_files: Mapping[str, str],
    record: Mapping[str, Any],
) -> None:
    """Write all files except the weights into `model`, and remove leftovers there. companions: the tokenizer and the
    like, to copy."""
    own = is_own((config or {}).get("quantization_config"))
    if config is not None and "model_type" not in config:
        extra_files = {"README.md": LOADING_INTO, **extra_files}
    elif own:
        extra_files = {"README.md": LOADING, **extra_files}
    names = {*weight_map.values(), *extra_files}
    if write_index(model, weight_map, index := OWN_INDEX if own else INDEX):
        names.add(index)
    if config is not None:
        write_json(model / "config.json", config)
        names.add("config.json")
    if companions is not None:
        names |= copy_companions(model, companions, extra_files)
    for name, text in extra_files.items():
        write_whole(model / name, text)
    seal(model, names, record)


def write_index(model: Path, weight_map: Mapping[str, str], index: str) -> bool:
    """Write the index, which maps tensors to weight files. Returns False, having written nothing, where there is at
    most one weight file."""
    weights = sorted(set(weight_map.values()))
    if len(weights) <= 1:
        return False
    total = sum((model / file).stat().st_size for file in weights)
    write_json(model / index, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    return True


def copy_companions(model: Path, companions: Companions, but: Container[str]) -> set[str]:
    """Copy the files beside the weights, except the names in `but`. Returns the names copied."""
    names = {name for name in companions.names if name not in but}
    if unusual := {name for name in names if not of_checkpoint(name)}:
        expect(model.parent, {*expected_names(model.parent), *unusual})
    for name in sorted(names):
        (model / name).parent.mkdir(exist_ok=True, parents=True)
        write_whole(model / name, (companions.folder / name).read_bytes())
    for folder in {(model / name).parent for name in names} - {model}:
        sync_directory(folder)
    return names


def seal(model: Path, names: Collection[str], record: Mapping[str, Any]) -> None:
    """Write the record of an output whose files are all in `model`, and remove leftovers there. Raises CheckpointError
    for a file there that no run left."""
    write_record(model, {**record, "files": sorted(names)})
    for path in sorted(model.rglob("*"), reverse=True):  # the content of a folder comes before the folder
        within = path.relative_to(model).as_posix()
        if within in {RECORD, *names} or (path.is_dir() and holds(within, names)):
            continue
        if not is_left(MODEL, path, within, expected_names(model.parent)):
            raise CheckpointError(f"{path} is in the way of the checkpoint, and no run left it; move it")
        remove(path)
    sync_directory(model)
