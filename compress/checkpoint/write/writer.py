"""The sink of a run: writes block by block to disk while the run goes on, then joins the blocks to one checkpoint.

Everything is in `OUT.partial` (`checkpoint.write.directory`): a file per block and rank, and a journal that names the
tensors on disk with their SHA-256. `complete` joins the files of the blocks to the weight files of the checkpoint, and
writes the index, the configuration and the record (`checkpoint.write.join`); `take_name` renames it to the output.
Whenever a run is killed, there is a complete OUT, or a partial one to resume.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from compress.base.collectives import Comm
from compress.base.errors import CheckpointError, CompressError, InputError
from compress.checkpoint.byte_savings import Saving
from compress.checkpoint.companions import Companions
from compress.checkpoint.files import OWN_WHOLE, WHOLE, checksum
from compress.checkpoint.write.all_ranks import Together, readable
from compress.checkpoint.write.directory import Directory
from compress.checkpoint.write.join import Assembly, write_beside
from compress.checkpoint.write.journal import PROGRESS, Files, Journal, edits_of, note, read_edits, restore
from compress.checkpoint.write.record import Finished
from compress.checkpoint.write.shards import write_tensors
from compress.model.disk_names import DiskNames
from compress.model.experts import by_rank
from compress.model.fake_quantized import remember_scheme
from compress.model.layers import Layer, Table
from compress.model.online_rotation import input_rotation
from compress.model.open_block import Opened
from compress.weights.decision import Decision
from compress.weights.formats.codes import Int8Table
from compress.weights.formats.registry import check_importable
from compress.weights.formats.sparse24 import sparse24
from compress.weights.kv_cache_codes import CacheCodes
from compress.weights.matrix import Matrix, added
from compress.weights.own_config import is_own
from compress.weights.scheme import Scheme, read_entry

Made = TypeVar("Made", bound=Decision | Tensor)
REST_BYTES = 256 << 20  # of tensors in one file of a run


class Writer:
    """The pipeline's sink. Every method is called on every rank; a failure on one is an error on all."""

    def __init__(
        self,
        place: Directory,
        identity: str,
        comm: Comm,
        *,
        resume: bool,
        overwrite: bool,
        halved: Collection[str] = (),
        buffers: Collection[str] = (),
        repeated: Collection[str] = (),
        names: DiskNames | None = None,
        unchanged: Callable[[], None] = lambda: None,
    ) -> None:
        """Names of tensors: halved: of 2:4 layers, written without their zeros; buffers: that may hold infinities;
        repeated: that have a second name (`model.sharing`); names: in files and in the journal. unchanged: raises where
        the model has been changed since it was opened; asked before a block counts as finished. Raises InputError for
        an unfinished run of another identity."""
        self.place, self.comm, self.overwrite, self.unchanged = place, comm, overwrite, unchanged
        self.halved, self.repeated, self.names = halved, frozenset(repeated), names or DiskNames()
        self.buffers = frozenset(map(self.names.on_disk, buffers))
        self.together = Together(comm, place.partial)
        self.journal = Journal(identity)
        before = Journal.read(place.progress) if resume and place.progress.exists() else None
        if before is not None and (before.blocks or place.trained()):
            self.journal = before.of_run(identity, place.partial)
        self._note()

    @property
    def output(self) -> Path:
        return self.place.output

    @property
    def blocks(self) -> Mapping[str, Mapping[str, Any]]:
        """The journal's entry of every finished block."""
        return self.journal.blocks

    @property
    def assembly(self) -> Assembly:
        """The assembly that joins the tensors of the journal to weight files."""
        return Assembly(self.place, self.journal, self.together)

    def forget(self) -> None:
        """Clear the journal: the blocks written so far are of no use to a resumed run."""
        self.journal = Journal(self.journal.identity)
        self._note()

    def schemes(self) -> dict[str, Scheme]:
        """{layer: scheme} of the layers written compressed so far."""
        noted = {name: scheme for entry in self.blocks.values() for name, scheme in entry["layers"].items()}
        return {name: read_entry(scheme, name) for name, scheme in noted.items() if scheme is not None}

    def dense_layers(self) -> list[str]:
        """Names of layers whose compressed values were written dense so far."""
        return [n for entry in self.blocks.values() for n, scheme in entry["layers"].items() if scheme is None]

    def finished(self, block: str, without: Collection[str] = ()) -> Finished | None:
        """The results of a block that an earlier run wrote, but for the decisions about some layers, whose tensors are
        not read; or None. Raises CheckpointError for a changed tensor."""
        if (entry := self.blocks.get(block)) is None:
            return None
        tensors, noted = self._read(entry["files"], without), entry["edits"]
        with readable(f"the edits of the unfinished run in {self.place.blocks}"):
            edits = [] if noted is None else read_edits(noted["edits"], self.place.blocks / noted["file"])
        return restore(entry, tensors, edits, without)

    def write(self, block: str, opened: Opened, layers: Mapping[str, Layer], finished: Finished) -> None:
        """Write a finished block while it is open, each rank its share of the tensors, then enter it in the journal."""
        decided = {name: d for name, d in finished.decided.items() if isinstance(d, Decision)}
        decided |= {name: halve(layers[name], decided[name]) for name in decided if name in self.halved}
        stored = {name: d for name, d in decided.items() if layers[name].has_format and not d.dense}
        dense = {n: dense_values(layers[n], d.weight, opened) for n, d in decided.items() if n not in stored}
        plain = _plain(self, block, opened, {id(layers[name].parameter) for name in stored})
        values = {id(layers[n].parameter): layers[n].stored(v) for n, v in dense.items()}
        prefix = f"{block}." if block else ""
        plain |= {prefix + n: values[id(p)] for n, p in opened.block.named_parameters() if id(p) in values}
        costs = {name: float(layers[name].shape[0] * layers[name].shape[1]) for name in stored}
        whole = by_rank(opened.block)
        alone = {name for name in decided if layers[name].parameter in whole}
        alone |= {prefix + n for n, p in opened.block.named_parameters() if p in whole}
        owner = _owners(costs | {name: float(tensor.numel()) for name, tensor in plain.items()}, alone, self.comm)
        mine = {name: tensor for name, tensor in plain.items() if owner[name] == self.comm.rank}
        schemes = {name: scheme_in(layers[name], decision) for name, decision in stored.items()}
        check_importable(term for scheme in schemes.values() for term in scheme.terms)
        held = finished.caches.items() if self.comm.rank == 0 else ()
        mine |= {f"{name}.{key}": t for name, codes in held for key, t in codes.parts().items()}
        sums = {n: checksum(dense[n] if n in dense else d.weight.dequantize()) for n, d in decided.items()}
        sums |= self.comm.union(sums) if whole else {}
        for record in finished.records:
            record.figures["sha256"] = sums[record.name]
        own = [(layers[n], d, schemes[n]) for n, d in stored.items() if owner[n] == self.comm.rank]
        coded = (named for each in own for named in _tensors(*each).items())  # packed as they are written
        files, edits = self._saved(f"block-{len(self.blocks):05d}", chain(mine.items(), coded)), None
        if finished.edits:
            file = f"edits-{len(self.blocks):05d}.safetensors"
            tensors, noted = edits_of(finished.edits)
            self.together.first(file, lambda: self._save(self.place.blocks / file, tensors))
            edits = {"file": file, "edits": noted}
        entry = note(finished, schemes, files, edits)
        if whole:
            noted_layers = self.comm.union(entry["layers"])
            entry["layers"] = {name: noted_layers[name] for name in layers if name in noted_layers}
        self.journal.blocks[block] = entry
        self._note()

    def complete(
        self,
        rest: Iterator[tuple[str, Tensor]],
        config: dict[str, Any] | None,
        companions: Companions | None,
        extra_files: Mapping[str, str],
        record: dict[str, Any],
        given: int,
    ) -> Saving:
        """Write the tensors outside the blocks, join the weight files, write all other files. Returns the saving.

        `rest` yields (name, tensor) in the same order on every rank (sharded tensors are gathered on the way). given:
        bytes of the model before the run. The record gets `tensors` (their SHA-256), `files` and `bytes`.
        """
        if self.journal.rest is None:
            self.journal.rest = self._saved_rest(rest)
            self._note()
        else:  # the stopped run had come further than this, and may have copied these tensors already
            before = self.journal.rest
            self.together.first("rest", lambda: self._read(before))
        self.together.first("model", lambda: self.place.model.mkdir(exist_ok=True))
        own = is_own((config or {}).get("quantization_config"))
        weight_map = self.assembly.weight_files(OWN_WHOLE if own else WHOLE)
        saved = Saving(given, self.assembly.bytes_in(weight_map))
        whole = {**record, "bytes": asdict(saved), "tensors": self.journal.checksums}

        def finish() -> None:
            write_beside(self.place.model, weight_map, config, companions, extra_files, whole)
            self.journal.complete = True
            self.journal.write(self.place.progress)

        self.together.first("model", finish)
        return saved

    def take_name(self) -> None:
        """Rename the checkpoint to the output. Raises CompressError where something took that name meanwhile."""

        def name() -> None:
            try:
                self.place.take_name(self.overwrite)
            except InputError as error:
                raise CompressError(f"{error}; the work is kept: --resume goes on with it") from None

        self.together.first(str(self.output), name)

    def _note(self) -> None:
        """Write the journal to disk, if the model is as it was when it was opened."""
        self.together.first(PROGRESS, self.unchanged)
        self.together.first(PROGRESS, lambda: self.journal.write(self.place.progress))

    def _saved_rest(self, rest: Iterable[tuple[str, Tensor]]) -> Files:
        """Save tensors in files of about `REST_BYTES`. Each tensor goes to the rank with the least so far."""
        files: Files = {}
        load = [0] * self.comm.world
        for number, part in enumerate(in_parts(rest, REST_BYTES)):
            mine: dict[str, Tensor] = {}
            for name, tensor in part.items():
                owner = load.index(min(load))
                load[owner] += tensor.numel()
                mine |= {name: tensor} if owner == self.comm.rank else {}
            files |= self._saved(f"rest-{number:05d}", mine.items())
        return files

    def _saved(self, stem: str, tensors: Iterable[tuple[str, Tensor]]) -> Files:
        """Save this rank's tensors. Returns {file: {tensor: SHA-256}} of all ranks; none without tensors."""
        stem += "" if self.comm.world == 1 else f"-rank{self.comm.rank}"

        written = ((self.names.on_disk(name), tensor) for name, tensor in tensors)
        save = partial(_in_files, self.place.blocks, stem, written, self._save)
        parts = self.comm.gather_objects(self.together(f"{stem}.safetensors", save))
        return {file: sums for part in parts for file, sums in part.items()}

    def _save(self, path: Path, tensors: Mapping[str, Tensor]) -> Files:
        return {path.name: write_tensors(path, tensors, self.buffers)} if tensors else {}

    def _read(self, files: Mapping[str, Mapping[str, str]], without: Collection[str] = ()) -> dict[str, Tensor]:
        """{name in the model: tensor} written as `files`, but for some layers'. CheckpointError for a changed one."""
        left = {self.names.on_disk(name) for name in without}
        held = [(file, name) for file, sums in files.items() for name in sums if name.rpartition(".")[0] not in left]
        where = {name: self.assembly.path(file, name) for file, name in held}
        expected = {name: digest for sums in files.values() for name, digest in sums.items()}
        tensors: dict[str, Tensor] = {}
        for path in sorted(set(where.values())):
            with readable(f"{path} of the unfinished run"), safe_open(path, framework="pt") as file:
                tensors |= {name: file.get_tensor(name) for name, at in where.items() if at == path}
        for name, tensor in tensors.items():
            if checksum(tensor) != expected[name]:
                raise CheckpointError(
                    f"{where[name]} of the unfinished run: {name} has changed since it was written; drop that run with "
                    "--overwrite"
                )
        return {self.names.in_model(name): tensor for name, tensor in tensors.items()}


def _in_files(
    folder: Path, stem: str, tensors: Iterable[tuple[str, Tensor]], save: Callable[[Path, Mapping[str, Tensor]], Files]
) -> Files:
    """Save tensors in files of about `REST_BYTES`, by a function for each."""
    files: Files = {}
    for number, part in enumerate(in_parts(tensors, REST_BYTES)):
        files |= save(folder / f"{stem}{f'-{number}' if number else ''}.safetensors", part)
    return files


def aside(sink: "Writer | InMemory", decided: Made) -> Made:
    """A layer's decision, with its tensors on the CPU in a file that has no name any more, so that they take no memory;
    as it is where nothing is written. Raises CompressError where the file cannot be written."""
    if isinstance(sink, InMemory):
        return decided
    path = sink.place.blocks / f"aside-rank{sink.comm.rank}.pt"
    try:
        torch.save(decided, path)
        return cast(Made, torch.load(path, map_location="cpu", mmap=True, weights_only=False))
    except (OSError, RuntimeError) as error:
        raise CompressError(f"cannot write {path}: {error}") from None
    finally:
        path.unlink(missing_ok=True)


def _plain(writer: Writer, block: str, opened: Opened, replaced: set[int]) -> dict[str, Tensor]:
    """{full name: tensor} of a block, without what terms replace, or what has an entry or a name elsewhere."""
    prefix = f"{block}." if block else ""
    inside = [entry for name, entry in writer.blocks.items() if name.startswith(prefix)]
    without = {writer.names.in_model(key) for entry in inside for sums in entry["files"].values() for key in sums}
    without |= {f"{name}.weight" for entry in inside for name in entry["layers"]} | writer.repeated
    without |= {prefix + name for name, p in opened.block.named_parameters() if id(p) in replaced}
    inner = {name.removeprefix(prefix) for name in without if name.startswith(prefix)}
    return {prefix + name: value for name, value in opened.stored(inner)}


def _owners(costs: Mapping[str, float], alone: Collection[str], comm: Comm) -> dict[str, int]:
    """{name: rank} of who writes what, by its cost. alone: what this rank alone has, and writes."""
    shared = {name: cost for name, cost in costs.items() if name not in alone}
    return comm.assign(shared) | dict.fromkeys(alone, comm.rank)


def scheme_in(layer: Layer, decision: Decision) -> Scheme:
    """The scheme in which a decision about a layer is stored, with the rotation of the layer's input."""
    return replace(decision.scheme(isinstance(layer, Table)), rotation=input_rotation(layer.module))


def in_parts(tensors: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    """Tensors in their order, in parts of at most `limit` bytes (one tensor at least)."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if part and size + tensor.nbytes > limit:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    if part:
        yield part


def halve(layer: Layer, decision: Decision) -> Decision:
    """The decision about a layer with its weight stored as 2:4; that about a token table is returned unchanged. Raises
    CompressError for a layer that is not 2:4."""
    if isinstance(layer, Table):
        return decision
    try:
        if not layer.has_format:
            raise InputError(f"a {type(layer.module).__name__} has no such form")
        return replace(decision, weight=added(*map(sparse24, decision.weight.terms)))
    except InputError as why:
        raise CompressError(
            f"{layer.name} cannot be stored as 2:4: {why}; prune it so, ignore it, or leave out store"
        ) from None


def dense_values(layer: Layer, decided: Matrix, opened: Opened) -> Tensor:
    """Decided values of a layer without a format, in the dtype that the model stores. They are not rounded to
    the dtype of the computation in between."""
    values_NK = decided.dequantize()
    assert input_rotation(layer.module) is None, f"{layer.name} rotates its input, which dense weights do not say"
    same = not opened.is_open(layer.parameter) or torch.equal(layer.weight, values_NK.to(layer.weight))
    assert same, f"{layer.name} has other values than were decided"
    return values_NK.to(opened.dtype_of(layer.parameter))


def _tensors(layer: Layer, decision: Decision, scheme: Scheme) -> dict[str, Tensor]:
    """{full name: tensor} that store a layer. Modules that share an int8 table read its codes from their own `weight`
    and need copies of its scales, which are small; packed codes are stored for the table alone."""
    parts = decision.parts(isinstance(layer, Table))
    tensors = {f"{layer.name}.{name}": part for name, part in parts.items()}
    if isinstance(layer, Table) and isinstance(scheme.codes, Int8Table):
        small = {name: part for name, part in parts.items() if name != "weight"}
        tensors |= {f"{other}.{name}": part.clone() for other in layer.shared for name, part in small.items()}
    return tensors


class InMemory:
    """The sink of a walk that writes nothing. blocks: {block or table: its results}, where they are kept. places: of
    the original's weights within their codes (`train.rounding.latents`), by layer, of a walk before a training."""

    def __init__(self, keep: bool = False) -> None:
        self.keep = keep
        self.blocks: dict[str, Finished] = {}
        self.places: dict[str, Tensor] = {}

    def finished(self, block: str, without: Collection[str] = ()) -> Finished | None:
        """None: no block is taken from an earlier run."""
        return None

    def write(self, block: str, opened: Opened, layers: Mapping[str, Layer], finished: Finished) -> None:
        """Keep what was decided about a block, where that was asked for. Its layers remember their schemes."""
        for name, decided in finished.decided.items():
            layer = layers[name]
            coded = isinstance(decided, Decision) and not decided.dense and not isinstance(layer.parameter, DTensor)
            if isinstance(decided, Decision) and coded and (layer.has_format or layer.index is not None):
                remember_scheme(layer, scheme_in(layer, decided), opened.dtype_of(layer.parameter))
        if self.keep:
            self.blocks[block] = finished

    @property
    def decisions(self) -> dict[str, Decision]:
        """The decisions, by layer."""
        return {n: d for each in self.blocks.values() for n, d in each.decided.items() if isinstance(d, Decision)}

    @property
    def caches(self) -> dict[str, CacheCodes]:
        """The codes of caches, by attention."""
        return {name: codes for each in self.blocks.values() for name, codes in each.caches.items()}
