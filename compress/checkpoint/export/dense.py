"""A plain checkpoint out of a compressed one: dense weights, exactly what the codes stand for, for any other reader.

    OUT --layer by layer--> DIR.partial/blocks --byte by byte--> DIR.partial/model --> DIR

What is compressed becomes `<layer>.weight` in the dtype that its terms are stored in; everything else is copied, and
config.json says nothing of compression. At no time are more dense weights in memory than PART_BYTES, or one layer where
that is larger. DIR appears when it is complete, as the output of a run does (`checkpoint.write.directory`), with a
record of the same kind: `compress verify DIR` holds it to that, and `--overwrite` knows it again.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from compress.checkpoint.files import WHOLE, checksum
from compress.checkpoint.read.source import Source, find_source
from compress.checkpoint.read.stored import Stored, stored_in, weight_of
from compress.checkpoint.shown import shown
from compress.checkpoint.write.directory import Directory, claimed
from compress.checkpoint.write.join import write_beside
from compress.checkpoint.write.manifest import manifest
from compress.checkpoint.write.record import RunRecord
from compress.checkpoint.write.shards import pieces_of, planned, write_shard
from compress.errors import CompressError, InputError
from compress.system.comm import Comm
from compress.system.progress import Reporter, Silent

# Of dense weights, that wait in memory to be written.
PART_BYTES = 2**28


@dataclass(frozen=True)
class Exported:
    """What an export made: the directory, how many layers of it are stored another way than before, the bytes of its
    weight files, what was lost or left as it was (`lost`), and the bytes of the weight files that were read
    (`bytes_before`)."""

    output: Path
    layers: int
    bytes: int
    lost: tuple[str, ...]
    bytes_before: int


@dataclass(frozen=True)
class Export:
    """What an export writes: tensors, made one after the other, so many in all, for so many layers; its configuration;
    its record but for their checksums; what there is to say of it; the name of a single weight file."""

    tensors: Iterable[tuple[str, Tensor]]
    total: int
    layers: int
    config: Mapping[str, Any]
    record: Mapping[str, Any]
    lost: tuple[str, ...]
    whole: str = WHOLE


def export_dense(
    model: str | Path, output: str | Path, *, overwrite: bool = False, reporter: Reporter | None = None
) -> Exported:
    """Write a compressed checkpoint as a plain one of transformers, with the dense weights that its codes stand for:
    bit for bit those of `load(model, dequantize=True)`.

    model: directory or hub id. output: a directory to make; one that is there is replaced with `overwrite` only, and
    only if this tool wrote it. What dense weights leave out (rounded inputs, outputs and key-value caches) goes to the
    reporter, into the record and into what is returned. Formats of a plugin are known once its module is imported.

    Raises InputError, having written nothing, for a model that is not compressed or an output that is in the way;
    CompressError where it cannot be written.
    """
    reporter, source = reporter or Silent(), find_source(str(model))
    stored = stored_in(source)
    if not stored.layers and stored.caches is None:
        raise InputError(f"{source.name} is not compressed: its weights are dense as they are")
    lost = tuple(left_out(stored))
    about = manifest(
        RunRecord(notes=list(lost)),
        model=shown(source.name),
        identity={"export": "dense", "model": source.fingerprint()},
        calibration=None,
        ranks=1,
    )
    config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    total = sum(1 for _ in dense_names(source))
    export = Export(dense_tensors(source), total, len(stored.layers), config, about, lost)
    return write_export(source, export, output, overwrite, reporter)


def write_export(source: Source, export: Export, output: str | Path, overwrite: bool, reporter: Reporter) -> Exported:
    """Write what there is to export of a checkpoint. Raises InputError for an output that is in the way, CompressError
    where it cannot be written."""
    if Path(output).exists() and Path(output).samefile(source.path):
        raise InputError(f"output {str(output)!r} is the model itself; give another directory")
    with claimed(output, Comm(), resume=False, overwrite=overwrite, model=source.path) as place:
        assert place is not None
        for line in export.lost:
            reporter.note(line)
        try:
            sums = _write_parts(export, place, reporter)
            _assemble(source, export, place, sums)
        except (OSError, SafetensorError) as error:
            raise CompressError(f"cannot write {place.output}: {error}") from None
        place.take_name(overwrite)
    size, before = (
        sum(path.stat().st_size for path in files)
        for files in (place.output.glob("*.safetensors"), source.weights.paths)
    )
    return Exported(place.output, export.layers, size, export.lost, before)


def left_out(stored: Stored) -> Iterator[str]:
    """What dense weights do not say of a compressed model, a line each."""
    rounded = [name for name, layer in stored.layers.items() if layer.scheme.inputs is not None]
    if rounded:
        returned = any(stored.layers[name].scheme.outputs is not None for name in rounded)
        yield (
            f"{len(rounded)} layers, like {rounded[0]}, round what they are given{' and return' if returned else ''} "
            f"({stored.layers[rounded[0]].scheme}); dense weights leave that out: the exported model computes without"
        )
    if stored.caches is not None:
        yield (
            f"keys and values are kept in 8 bits ({stored.caches.scheme}); a dense checkpoint leaves that out: the "
            "exported model keeps them as they are"
        )


def dense_names(source: Source) -> Iterator[tuple[str, str | None]]:
    """(name of a tensor of the dense checkpoint, the layer whose weight it is, if that is compressed), in the order of
    the compressed one."""
    stored = stored_in(source)
    layer_of = {part: name for name, layer in stored.layers.items() for part in layer.parts.values()}
    held = {} if stored.caches is None else stored.caches.scales
    scales = {name for parts in held.values() for name, _ in parts.values()}
    done: set[str] = set()
    for name in source.weights:
        layer = layer_of.get(name)
        if layer is None and name not in scales:
            yield name, None
        elif layer is not None and layer not in done and stored.layers[layer].shares is None:
            done.add(layer)
            yield f"{layer}.weight", layer


def dense_tensors(source: Source) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the dense checkpoint, one made after the other."""
    for name, layer in dense_names(source):
        yield name, source.weights.tensor(name) if layer is None else weight_of(source, layer).dequantize()


def _write_parts(export: Export, place: Directory, reporter: Reporter) -> dict[str, str]:
    """Write the tensors into files of bounded size; returns {tensor: SHA-256}, in their order."""
    sums: dict[str, str] = {}
    reporter.step(0, export.total, "")
    for i, part in enumerate(batches(export.tensors)):
        save_file(part, place.blocks / f"part-{i:05d}.safetensors", metadata={"format": "pt"})
        sums |= {name: checksum(tensor) for name, tensor in part.items()}
        reporter.step(len(sums), export.total, next(reversed(part)))
    return sums


def batches(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    """Tensors of at most PART_BYTES together, one at least."""
    batch: dict[str, Tensor] = {}
    room = PART_BYTES
    for name, tensor in tensors:
        if batch and tensor.nbytes > room:
            yield batch
            batch, room = {}, PART_BYTES
        batch[name] = tensor.contiguous()
        room -= tensor.nbytes
    yield batch


def _assemble(source: Source, export: Export, place: Directory, sums: dict[str, str]) -> None:
    """The checkpoint, out of its parts: each goes when it is copied."""
    place.model.mkdir(exist_ok=True)
    parts = sorted(place.blocks.iterdir())
    plan = planned([piece for part in parts for piece in pieces_of(part)], export.whole)
    left = {part: len(pieces_of(part)) for part in parts}
    for file, pieces in plan.items():
        write_shard(place.model / file, pieces, sums)
        for piece in pieces:
            left[piece.file] -= 1
            if not left[piece.file]:
                piece.file.unlink()
    weight_map = {piece.name: file for file, pieces in plan.items() for piece in pieces}
    write_beside(place.model, weight_map, export.config, source.path, {}, {**export.record, "tensors": sums})
