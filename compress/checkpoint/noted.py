"""A finished block as the journal has it, and back: a JSON entry, and tensors beside it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from compress.checkpoint.record import Finished, LayerRecord, RangeRecord
from compress.checkpoint.stored import read_weight
from compress.model.folds import Consumer, Fold, Folded, FoldRecord
from compress.weights.caches import CacheCodes, CacheScheme
from compress.weights.decision import Decision
from compress.weights.scheme import Scheme, read_entry


def note(finished: Finished, schemes: Mapping[str, Scheme], files: Any, folds: Any) -> dict[str, Any]:
    """The entry of a block: schemes of the layers that are stored as such, the files of its tensors, and what
    is said about its folds."""
    entries = {name: scheme.entry() for name, scheme in schemes.items()}
    return {
        "files": files,
        "layers": {name: entries.get(name) for name, d in finished.decided.items() if isinstance(d, Decision)},
        "records": [asdict(r) for r in finished.records],
        "ranges": [asdict(r) for r in finished.ranges],
        "left_alone": dict(finished.left_alone),
        "fold_records": [asdict(r) for r in finished.fold_records],
        "folds": folds,
        "caches": {n: asdict(c.scheme) for n, c in finished.caches.items()},
    }


def restore(entry: Mapping[str, Any], tensors: Mapping[str, Tensor], folded: Sequence[Folded]) -> Finished:
    """Inverse of `note`. Raises CheckpointError that names the tensor at fault."""
    records = [LayerRecord(**{**r, "shape": tuple(r["shape"])}) for r in entry["records"]]
    shapes = {record.name: record.shape for record in records}
    decided: dict[str, Decision | Tensor] = {}
    for name, noted in entry["layers"].items():
        if noted is None:
            dense = tensors[f"{name}.weight"]
            decided[name] = dense.t() if dense.ndim == 2 else dense.flatten(1)
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
    return Finished(decided, records, entry["left_alone"], folded, described, ranges, caches)


def folds_of(folded: Sequence[Folded]) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """What a resumed run needs to fold again: tensors, and what names them."""
    tensors, noted = {}, []
    for i, each in enumerate(folded):
        # Copies: two passes that use one fold share its maps, which safetensors refuses.
        tensors[f"{i}.scale"] = each.scale_C.clone().contiguous()
        maps = (c.channel_of_K.cpu().clone().contiguous() for c in each.fold.consumers)
        tensors |= {f"{i}.{j}": channel_of_K for j, channel_of_K in enumerate(maps)}
        fold = each.fold
        consumers = [c.name for c in fold.consumers]
        noted.append({"producer": fold.producer, "kind": fold.kind, "channels": fold.channels, "consumers": consumers})
    return tensors, noted


def read_folds(folds: Sequence[Mapping[str, Any]], path: Path) -> list[Folded]:
    """Inverse of `folds_of`."""
    folded = []
    with safe_open(path, framework="pt") as file:
        for i, noted in enumerate(folds):
            consumers = tuple(Consumer(n, file.get_tensor(f"{i}.{j}")) for j, n in enumerate(noted["consumers"]))
            fold = Fold(noted["producer"], noted["kind"], noted["channels"], consumers)
            folded.append(Folded(fold, file.get_tensor(f"{i}.scale")))
    return folded
