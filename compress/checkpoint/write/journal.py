"""The journal of an unfinished run: `OUT.partial/progress.json`, complete after every block.

It names the files of each block with the SHA-256 of each tensor in them, and holds everything else that a run needs in
order to continue after a block without computing it again. `moved` names the tensors that are already in the weight
files of the checkpoint.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from safetensors.torch import load_file
from torch import Tensor

from compress.base.errors import CheckpointError, InputError
from compress.base.schema import fits
from compress.checkpoint.files import read_json, write_json
from compress.checkpoint.read.compressed_layers import read_weight
from compress.checkpoint.write.record import Finished, LayerRecord, RangeRecord
from compress.model.edits.folds import FoldRecord
from compress.model.known_edits import Edit, read_edit
from compress.weights.decision import Decision
from compress.weights.kv_cache_codes import CacheCodes, CacheScheme
from compress.weights.own_config import SchemeEntry
from compress.weights.scheme import Scheme, read_entry

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
        content = read_json(path)
        if not isinstance(content, dict) or content.get("compress") != KIND:
            raise CheckpointError(f"{path} is no record of an unfinished run; move {path.parent} away")
        if content.get("format") != FORMAT:
            raise CheckpointError(f"{path} is of another version of compress; remove {path.parent} or use that version")
        try:
            fits(content, Content, path)
        except CheckpointError as error:
            raise CheckpointError(f"{error}; remove {path.parent}") from None
        return cls(content["identity"], content["blocks"], content["rest"], content["moved"], content["complete"])

    def of_run(self, identity: str, partial: Path) -> "Journal":
        """This journal. Raises InputError where it is of another run."""
        if self.identity != identity:
            raise InputError(
                f"{partial} is of another run (model, recipe, calibration data or version differ); resume with what "
                "it was started with, or drop it with --overwrite"
            )
        return self

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


def note(finished: Finished, schemes: Mapping[str, Scheme], files: Any, edits: Any) -> dict[str, Any]:
    """The journal's entry of a block. schemes: of the layers that are stored compressed; files: of its tensors; edits:
    the `EditPlace` of its edits, or None."""
    entries = {name: scheme.entry() for name, scheme in schemes.items()}
    return {
        "files": files,
        "layers": {name: entries.get(name) for name, d in finished.decided.items() if isinstance(d, Decision)},
        "records": [asdict(r) for r in finished.records],
        "ranges": [asdict(r) for r in finished.ranges],
        "left_alone": dict(finished.left_alone),
        "fold_records": [asdict(r) for r in finished.fold_records],
        "edits": edits,
        "caches": {n: asdict(c.scheme) for n, c in finished.caches.items()},
        "not_folded": list(finished.not_folded),
    }


def restore(
    entry: Mapping[str, Any], tensors: Mapping[str, Tensor], edits: Sequence[Edit], without: Collection[str] = ()
) -> Finished:
    """Inverse of `note`, without the decisions about some layers. Raises CheckpointError, which names the tensor at
    fault."""
    records = [LayerRecord(**{**r, "shape": tuple(r["shape"])}) for r in entry["records"]]
    shapes = {record.name: record.shape for record in records}
    decided: dict[str, Decision | Tensor] = {}
    for name, noted in entry["layers"].items():
        if name in without:
            continue
        if noted is None:
            decided[name] = tensors[f"{name}.weight"]
            continue
        scheme = read_entry(noted, name)
        parts = {key: tensors[full] for key in scheme.parts(*shapes[name]) if (full := f"{name}.{key}") in tensors}
        weight = read_weight(name, scheme, parts, shapes[name])
        decided[name] = Decision(weight, {}, scheme.read_inputs(parts), scheme.read_outputs(parts))
    caches = {}
    for name, noted in entry["caches"].items():
        held = {key.removeprefix(f"{name}."): tensor for key, tensor in tensors.items() if key.startswith(f"{name}.")}
        caches[name] = CacheCodes.read(CacheScheme(**noted), held)
    described = [FoldRecord(**record) for record in entry["fold_records"]]
    ranges = [RangeRecord.restored(noted) for noted in entry["ranges"]]
    return Finished(
        decided, records, entry["left_alone"], edits, described, ranges, caches, entry.get("not_folded", ())
    )


def edits_of(edits: Sequence[Edit]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """(Tensors, entries) from which a resumed run applies edits again (`read_edits`)."""
    tensors = {f"{i}.{name}": part for i, edit in enumerate(edits) for name, part in edit.parts().items()}
    return tensors, [edit.entry() for edit in edits]


def read_edits(entries: Sequence[Mapping[str, Any]], path: Path) -> list[Edit]:
    """Inverse of `edits_of`, with the tensors read from a file. Raises CheckpointError for an entry that is no edit."""
    tensors = load_file(path)
    return [
        read_edit(entry, {name.removeprefix(f"{i}."): t for name, t in tensors.items() if name.startswith(f"{i}.")})
        for i, entry in enumerate(entries)
    ]
