"""Converts a finished block to its entry in the journal (JSON, with tensors in files) and back."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from compress.checkpoint.read.compressed_layers import read_weight
from compress.checkpoint.write.record import Finished, LayerRecord, RangeRecord
from compress.model.edits.folds import FoldRecord
from compress.model.known_edits import Edit, read_edit
from compress.weights.caches import CacheCodes, CacheScheme
from compress.weights.decision import Decision
from compress.weights.scheme import Scheme, read_entry


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


def restore(entry: Mapping[str, Any], tensors: Mapping[str, Tensor], edits: Sequence[Edit]) -> Finished:
    """Inverse of `note`. Raises CheckpointError, which names the tensor at fault."""
    records = [LayerRecord(**{**r, "shape": tuple(r["shape"])}) for r in entry["records"]]
    shapes = {record.name: record.shape for record in records}
    decided: dict[str, Decision | Tensor] = {}
    for name, noted in entry["layers"].items():
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
