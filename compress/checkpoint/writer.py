"""A run's sink: block by block to disk while it goes on, then one checkpoint.

Everything is in `OUT.partial` (`checkpoint.directory`): a file per block and rank, and a journal that names the tensors
that are safely on disk with their SHA-256. `complete` puts the files of the blocks together to the weight files of the
checkpoint, and writes the index, the configuration and the record beside them; `take_name` makes that the output.
Whenever a run is killed, there is a complete OUT or a partial one to resume.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from compress.checkpoint.directory import COMPANIONS, Directory
from compress.checkpoint.files import INDEX, RECORD, checksum, sync_directory, write_json, write_whole
from compress.checkpoint.journal import PROGRESS, Journal
from compress.checkpoint.record import Finished, LayerRecord, RangeRecord
from compress.checkpoint.shards import Piece, pieces_of, planned, write_shard
from compress.comm import Comm
from compress.errors import CheckpointError, CompressError, InputError
from compress.model.folds import Consumer, Fold, Folded, FoldRecord
from compress.model.layers import Layer, Table
from compress.model.opened import Opened
from compress.weights.caches import SIDES, CacheCodes, CacheScheme
from compress.weights.codes import inputs_from, outputs_from, quantized_from, tensors_of
from compress.weights.decision import Decision
from compress.weights.grid import Grid
from compress.weights.scheme import PARTS, Scheme, scheme_of

KEPT = "finished blocks are kept: make room and run again with --resume"


class Writer:
    """The pipeline's sink. Every method is called on every rank; a failure on one is an error on all."""

    def __init__(self, place: Directory, identity: str, comm: Comm, *, resume: bool, overwrite: bool) -> None:
        self.place, self.comm, self.overwrite = place, comm, overwrite
        self.journal = Journal(identity)
        if resume and place.progress.exists() and (before := Journal.read(place.progress)).blocks:
            if before.identity != identity:
                raise InputError(
                    f"{place.partial} is of another run (model, recipe, calibration data or version differ); resume "
                    "with what it was started with, or drop it with --overwrite"
                )
            self.journal = before
        self._together(PROGRESS, self._note)

    @property
    def output(self) -> Path:
        return self.place.output

    @property
    def blocks(self) -> Mapping[str, Mapping[str, Any]]:
        """What the journal says about every finished block."""
        return self.journal.blocks

    def forget(self) -> None:
        """There is nothing to go on with: what was written so far is dropped with the run."""
        self.journal = Journal(self.journal.identity)
        self._together(PROGRESS, self._note)

    def _note(self) -> None:
        """Bring the journal to disk."""
        if self.comm.rank == 0:
            self.journal.write(self.place.progress)

    def schemes(self) -> dict[str, Scheme]:
        """{layer: scheme} of the layers written as codes so far."""
        return {
            name: _scheme(scheme)
            for entry in self.blocks.values()
            for name, scheme in entry["layers"].items()
            if scheme is not None
        }

    def dense_layers(self) -> list[str]:
        """Layers whose compressed values had to be written dense so far."""
        return [n for entry in self.blocks.values() for n, scheme in entry["layers"].items() if scheme is None]

    def finished(self, block: str) -> Finished | None:
        """What an earlier run wrote for a block; None where it did not. Raises CheckpointError, naming the tensor,
        where that is not on disk as it was written."""
        entry = self.blocks.get(block)
        if entry is None:
            return None
        tensors = self._read(entry["files"])
        records = [LayerRecord(**{**r, "shape": tuple(r["shape"])}) for r in entry["records"]]
        decided: dict[str, Decision | Tensor] = {}
        for name, noted in entry["layers"].items():
            if noted is None:
                dense = tensors[f"{name}.weight"]
                decided[name] = dense.t() if dense.ndim == 2 else dense.flatten(1)
                continue
            scheme = _scheme(noted)
            parts = {key: tensors[key] for part in PARTS if (key := f"{name}.{part}") in tensors}
            inputs, outputs = inputs_from(name, parts, scheme), outputs_from(name, parts, scheme)
            decided[name] = Decision(quantized_from(name, parts, scheme), {}, inputs, outputs)
        caches = {}
        for name, noted in entry["caches"].items():
            keys, values = (tensors.get(f"{name}.{side}_scale") for side in SIDES)
            scales = None if keys is None or values is None else (keys, values)
            caches[name] = CacheCodes(CacheScheme(**noted), scales)
        with _readable(f"the folds of the unfinished run in {self.place.blocks}"):
            folded = self._read_folds(entry["folds"])
        described = [FoldRecord(**record) for record in entry["fold_records"]]
        ranges = [RangeRecord.restored(noted) for noted in entry["ranges"]]
        return Finished(decided, records, entry["left_alone"], folded, described, ranges, caches)

    def _read(self, files: Mapping[str, Mapping[str, str]]) -> dict[str, Tensor]:
        """The tensors that were written as `files`, wherever they lie now, held to their checksums."""
        where = {name: self._path(file, name) for file, sums in files.items() for name in sums}
        expected = {name: digest for sums in files.values() for name, digest in sums.items()}
        tensors: dict[str, Tensor] = {}
        for path in sorted(set(where.values())):
            with _readable(f"{path} of the unfinished run"), safe_open(path, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name, at in where.items() if at == path}
        for name, tensor in tensors.items():
            if checksum(tensor) != expected[name]:
                raise CheckpointError(
                    f"{where[name]} of the unfinished run: {name} has changed since it was written; drop that run with "
                    "--overwrite"
                )
        return tensors

    def _path(self, file: str, tensor: str) -> Path:
        """Where a tensor lies that was written to `file`."""
        moved = self.journal.moved.get(tensor)
        return self.place.blocks / file if moved is None else self.place.model / moved

    def write(
        self,
        block: str,
        opened: Opened,
        layers: Mapping[str, Layer],
        finished: Finished,
    ) -> None:
        """Write a finished block while it is open, each rank the tensors that fall to it, then note it as done."""
        prefix = f"{block}." if block else ""
        decided = {name: d for name, d in finished.decided.items() if isinstance(d, Decision)}
        packed = {name: d for name, d in decided.items() if layers[name].has_format}
        replaced = {id(layers[name].parameter) for name in packed}
        # Embeddings, which have an entry of their own, are inside a model that is one block.
        inside = [entry for name, entry in self.blocks.items() if name.startswith(prefix)]
        written = {key for entry in inside for sums in entry["files"].values() for key in sums}
        written |= {f"{name}.weight" for entry in inside for name in entry["layers"]}
        plain = {prefix + n: value for n, value in opened.stored() if prefix + n not in written}
        dense = {prefix + n for n, p in opened.block.named_parameters() if id(p) in replaced}
        costs = {name: float(d.weight.codes.numel()) for name, d in packed.items()}
        costs |= {name: float(t.numel()) for name, t in plain.items() if name not in dense}
        owner = self.comm.assign(costs)
        mine: dict[str, Tensor] = {}
        for name, decision in packed.items():
            if owner[name] == self.comm.rank:
                mine.update(self._tensors(layers[name], decision))
        for name, tensor in plain.items():
            if name not in dense and owner[name] == self.comm.rank:
                mine[name] = tensor
        if self.comm.rank == 0:
            for name, codes in finished.caches.items():
                scales = {} if codes.scales is None else dict(zip(SIDES, codes.scales, strict=True))
                mine |= {f"{name}.{side}_scale": scale for side, scale in scales.items()}
        for record in finished.records:
            record.figures["sha256"] = checksum(decided[record.name].weight.dequantize())
        name_of_block = self._name(f"block-{len(self.blocks):05d}")
        file = self._together(name_of_block, lambda: self._save(name_of_block, mine))
        schemes = {
            name: asdict(scheme_of(d.weight.grid, d.inputs, d.outputs, isinstance(layers[name], Table)))
            for name, d in packed.items()
        }
        self.journal.blocks[block] = {
            "files": self._gathered(file),
            "layers": {name: schemes.get(name) for name in decided},
            "records": [asdict(r) for r in finished.records],
            "ranges": [asdict(r) for r in finished.ranges],
            "left_alone": dict(finished.left_alone),
            "fold_records": [asdict(r) for r in finished.fold_records],
            "folds": self._save_folds(finished.folded, len(self.blocks)),
            "caches": {n: asdict(c.scheme) for n, c in finished.caches.items()},
        }
        self._together(PROGRESS, self._note)

    @staticmethod
    def _tensors(layer: Layer, decision: Decision) -> dict[str, Tensor]:
        """What a layer is stored as. Modules that share the weight of a table have, in `weight`, its codes, and need
        their scales beside them, which are small; packed codes are the table's alone."""
        table = isinstance(layer, Table)
        tensors = tensors_of(layer.name, decision.weight, decision.inputs, decision.outputs, table)
        if isinstance(layer, Table) and f"{layer.name}.weight" in tensors:
            small = {n.removeprefix(layer.name): t for n, t in tensors.items() if not n.endswith(".weight")}
            tensors |= {other + part: tensor.clone() for other in layer.shared for part, tensor in small.items()}
        return tensors

    def _save_folds(self, folded: Sequence[Folded], number: int) -> dict[str, Any] | None:
        """Keep what a resumed run needs to fold again, until the run is finished; None where nothing was folded."""
        if not folded:
            return None
        name = f"folds-{number:05d}.safetensors"
        tensors, noted = {}, []
        for i, each in enumerate(folded):
            # Copies: two passes that use one fold share its maps, which safetensors refuses.
            tensors[f"{i}.scale"] = each.scale_C.clone().contiguous()
            maps = (c.channel_of_K.cpu().clone().contiguous() for c in each.fold.consumers)
            tensors |= {f"{i}.{j}": channel_of_K for j, channel_of_K in enumerate(maps)}
            fold = each.fold
            consumers = [c.name for c in fold.consumers]
            noted.append(
                {"producer": fold.producer, "kind": fold.kind, "channels": fold.channels, "consumers": consumers}
            )
        self._together(name, lambda: save_file(tensors, self.place.blocks / name) if self.comm.rank == 0 else None)
        return {"file": name, "folds": noted}

    def _read_folds(self, entry: Mapping[str, Any] | None) -> list[Folded]:
        if entry is None:
            return []
        folded = []
        with safe_open(self.place.blocks / entry["file"], framework="pt") as file:
            for i, noted in enumerate(entry["folds"]):
                consumers = tuple(Consumer(n, file.get_tensor(f"{i}.{j}")) for j, n in enumerate(noted["consumers"]))
                fold = Fold(noted["producer"], noted["kind"], noted["channels"], consumers)
                folded.append(Folded(fold, file.get_tensor(f"{i}.scale")))
        return folded

    def _together(self, what: str, work: Callable[[], Any]) -> Any:
        """Write `what` on this rank; a failure, here or on another rank, is an error on every rank."""
        result, problem = None, None
        try:
            result = work()
        except CompressError as error:
            problem = str(error)
        except (OSError, SafetensorError) as error:
            problem = f"cannot write {what} in {self.place.partial}: {error}; {KEPT}"
        self.comm.fail_together(problem)
        return result

    def _name(self, stem: str) -> str:
        rank = "" if self.comm.world == 1 else f"-rank{self.comm.rank}"
        return f"{stem}{rank}.safetensors"

    def _save(self, name: str, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, str]]:
        """Save this rank's tensors; returns {file: {tensor: SHA-256}} ({} for none)."""
        if not tensors:
            return {}
        clean = {k: t.detach().cpu().contiguous().clone() for k, t in tensors.items()}
        save_file(clean, self.place.blocks / name, metadata={"format": "pt"})
        with (self.place.blocks / name).open("rb") as file:
            os.fsync(file.fileno())
        return {name: {k: checksum(t) for k, t in clean.items()}}

    def _gathered(self, saved: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
        """What every rank saved."""
        return {file: sums for part in self.comm.gather_objects(saved) for file, sums in part.items()}

    def complete(
        self,
        rest: Iterator[tuple[str, Tensor]],
        config: dict[str, Any] | None,
        source: Path | None,
        extra_files: Mapping[str, str],
        record: dict[str, Any],
    ) -> None:
        """Write what lies outside the blocks, put the weight files together, and write the index, the configuration
        and the record beside them, in `place.model`.

        `rest` yields (name, tensor) in the same order on every rank (sharded tensors are gathered as it goes). To the
        record are added `tensors` (their SHA-256) and `files`.
        """
        if self.journal.rest is None:
            mine: dict[str, Tensor] = {}
            load = [0] * self.comm.world
            for name, tensor in rest:
                owner = load.index(min(load))
                load[owner] += tensor.numel()
                if owner == self.comm.rank:
                    mine[name] = tensor
            name_of_rest = self._name("rest")
            self.journal.rest = self._gathered(self._together(name_of_rest, lambda: self._save(name_of_rest, mine)))
            self._together(PROGRESS, self._note)
        else:  # of a run that was stopped later than this, so it may have been copied already
            before = self.journal.rest
            self._together("rest", lambda: self._read(before) if self.comm.rank == 0 else None)
        self._together("model", lambda: self.place.model.mkdir(exist_ok=True) if self.comm.rank == 0 else None)
        weight_map = self._put_together()
        record = {**record, "tensors": self.journal.checksums}

        def describe() -> None:
            if self.comm.rank == 0:
                self._describe(weight_map, config, source, extra_files, record)
                self.journal.complete = True
                self.journal.write(self.place.progress)

        self._together("model", describe)

    def _put_together(self) -> dict[str, str]:
        """Copy the tensors of all blocks into the weight files, each rank some of them; returns {tensor: file}. A file
        of a block goes when all of it is copied: it takes little more room than the checkpoint."""
        sums = self.journal.checksums
        held = {piece.name: piece for piece in self._together("blocks", lambda: list(self._pieces()))}
        if lost := sorted(sums.keys() - held.keys()):
            raise CheckpointError(f"{lost[0]} is no longer in {self.place.partial}; drop that run with --overwrite")
        plan = planned([held[name] for name in sums])
        open_files = [file for file, pieces in plan.items() if any(p.name not in self.journal.moved for p in pieces)]
        for first in range(0, len(open_files), self.comm.world):
            turn = open_files[first : first + self.comm.world]
            mine = {file: plan[file] for file in turn[self.comm.rank : self.comm.rank + 1]}
            self._together("model", partial(self._write_shards, mine, sums))
            self.journal.moved |= {piece.name: file for file in turn for piece in plan[file]}
            self._together(PROGRESS, self._note)
            self._together("blocks", self._drop_copied)
        return {piece.name: file for file, pieces in plan.items() for piece in pieces}

    def _write_shards(self, shards: Mapping[str, Sequence[Piece]], sums: Mapping[str, str]) -> None:
        for file, pieces in shards.items():
            write_shard(self.place.model / file, pieces, sums)

    def _pieces(self) -> Iterator[Piece]:
        """Every tensor of the checkpoint where it lies now."""
        paths = {self._path(file, name) for file, sums in self.journal.files.items() for name in sums}
        wanted = self.journal.checksums
        yield from (piece for path in sorted(paths) for piece in pieces_of(path) if piece.name in wanted)

    def _drop_copied(self) -> None:
        if self.comm.rank == 0:
            for file, sums in self.journal.files.items():
                if all(name in self.journal.moved for name in sums):
                    (self.place.blocks / file).unlink(missing_ok=True)

    def _describe(
        self,
        weight_map: dict[str, str],
        config: dict[str, Any] | None,
        source: Path | None,
        extra_files: Mapping[str, str],
        record: dict[str, Any],
    ) -> None:
        """Everything beside the weights, and nothing else."""
        model, weights = self.place.model, sorted(set(weight_map.values()))
        names = {*weights, *extra_files}
        if len(weights) > 1:
            total = sum((model / file).stat().st_size for file in weights)
            write_json(
                model / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            )
            names.add(INDEX)
        if config is not None:
            write_json(model / "config.json", config)
            names.add("config.json")
        companions = [] if source is None else [p for c in COMPANIONS for p in sorted(source.glob(c)) if p.is_file()]
        for path in companions:
            write_whole(model / path.name, path.read_bytes())
            names.add(path.name)
        for name, text in extra_files.items():
            write_whole(model / name, text)
        write_json(model / RECORD, {**record, "files": sorted(names)})
        for path in model.iterdir():
            if path.name not in {RECORD, *names}:
                path.unlink()
        sync_directory(model)

    def take_name(self) -> None:
        """Make the checkpoint the output. Raises CompressError where something took that name meanwhile."""

        def name() -> None:
            if self.comm.rank == 0:
                try:
                    self.place.take_name(self.overwrite)
                except InputError as error:
                    raise CompressError(f"{error}; the work is kept: --resume goes on with it") from None

        self._together(str(self.output), name)


@contextmanager
def _readable(what: str) -> Iterator[None]:
    """Within: what cannot be read is an error that names it."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{what} cannot be read ({error}); drop that run with --overwrite") from None


def _scheme(noted: Mapping[str, Any]) -> Scheme:
    """A scheme from `progress.json`."""
    keys = ("weights", "inputs", "outputs")
    grids = {key: None if noted[key] is None else Grid(**noted[key]) for key in keys}
    return Scheme(**{**noted, **grids})


class Discard:
    """The sink of a run that writes nothing."""

    def finished(self, block: str) -> Finished | None:
        """Nothing is."""
        return None

    def write(
        self,
        block: str,
        opened: Opened,
        layers: Mapping[str, Layer],
        finished: Finished,
    ) -> None:
        """Nothing."""
