"""Writes a checkpoint in another layout, by any exporter.

    MODEL --why_not--> nothing, or one line    --write--> DIR.partial --record, seal--> DIR

DIR appears when it is complete, like the output of a run (`checkpoint.write.directory`), with a record of the same
kind: `--overwrite` recognises it, and a reader of the layout can be tested against it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from compress.base.byte_sizes import parse_bytes
from compress.base.collectives import Comm
from compress.base.errors import CompressError, InputError, why_not_written
from compress.base.progress import Reporter, Silent, tell
from compress.checkpoint.companions import companions_of
from compress.checkpoint.export.exporter import Exporter
from compress.checkpoint.export.package_readback import in_own_process
from compress.checkpoint.export.place import Place
from compress.checkpoint.export.registry import EXPORTERS, exporter_named
from compress.checkpoint.portable_names import portable
from compress.checkpoint.read.compressed_layers import stored_in
from compress.checkpoint.read.source import OF_TENSORS, Source, find_source, tensors_of
from compress.checkpoint.seal import rewrite
from compress.checkpoint.write.directory import Directory, claim
from compress.checkpoint.write.manifest import manifest
from compress.checkpoint.write.record import RunRecord


@dataclass(frozen=True)
class Exported:
    """The result of an export. output: the directory. layers: the number of layers stored another way than before.
    bytes, bytes_before: of the weight files written and read. lost: remarks on what was lost or left as it was."""

    output: Path
    layers: int
    bytes: int
    lost: tuple[str, ...]
    bytes_before: int


@dataclass(frozen=True)
class Offer:
    """An exporter's word and description, and the reasons why it cannot write a checkpoint; none where it can."""

    name: str
    about: str
    why_not: tuple[str, ...]


def export(
    model: str | Path,
    output: str | Path,
    to: str | Exporter = "dense",
    *,
    overwrite: bool = False,
    verify: bool = True,
    shard_size: int | str | None = None,
    trust_remote_code: bool = False,
    reporter: Reporter | None = None,
) -> Exported:
    """Write a checkpoint another way.

    model: directory or hub id. output: a directory to make; one that is there is replaced with `overwrite` only, and
    only if this tool wrote it. to: a word of `EXPORTERS`, or an exporter. verify: read an output that is no checkpoint
    with the package of its readers, in a process of its own, and compare it with what was decided; the record says by
    which version. shard_size: largest weight file, bytes or words like "2GB" (by default 5 GB). trust_remote_code:
    run Python code that comes with the model, if any does. What the output lacks, or keeps as it was, goes to the
    reporter, into the record and into what is returned. Formats of a plugin are known once its module is imported.

    Raises InputError, having written nothing, for a model that cannot be written so or an output that is in the way;
    CompressError where it cannot be written.
    """
    exporter = exporter_named(to) if isinstance(to, str) else to
    shard_bytes = shard_bytes_of(exporter, shard_size)
    reporter, source = reporter or Silent(), find_source(str(model), trust_remote_code)
    if Path(output).exists() and Path(output).samefile(source.path):
        raise InputError(f"output {str(output)!r} is the model itself; give another directory")
    if reasons := _reasons(exporter, source):
        raise InputError(f"{source.name} cannot be exported as {exporter.kind}: {'; '.join(reasons)}")
    how: dict[str, Any] = {"overwrite": overwrite, "model": source.path, "shard_bytes": shard_bytes}
    with claim(output, Comm(), resume=False, **how) as directory:
        assert directory is not None
        with in_one_line(directory):
            place = Place(directory, reporter)
            if verify and exporter.reads_back:
                tell(reporter, "verifies")
            written = exporter.write(source, place)
            companions = companions_of(source, exporter.companions)
            for line in companions.told():
                place.note(line)
            record = {**_record(source, exporter, place), **written.record}
            size = place.finish(companions, record)
            if verify and exporter.reads_back:
                verify_written(directory, reporter)
        directory.take_name(overwrite)
    before = sum(path.stat().st_size for path in source.weights.paths)
    return Exported(directory.output, written.layers, size, tuple(place.lost), before)


@contextmanager
def in_one_line(directory: Directory) -> Iterator[None]:
    """Makes what a system says of files that are written a CompressError, which names the file."""
    try:
        yield
    except OSError as error:
        raise CompressError(f"cannot write {error.filename or directory.output}: {why_not_written(error)}") from None
    except SafetensorError as error:
        raise CompressError(f"cannot write {directory.output}: {error}") from None


def verify_written(directory: Directory, reporter: Reporter) -> None:
    """Read an output back in a process of its own, and put the findings into its record."""
    tell(reporter, "phase", "verify", "nothing", "the output, read back in a fresh process")
    found = in_own_process(directory.model)
    rewrite(directory.model, {"verification": found})
    for line in found.get("remarks", ()):
        reporter.note(line)


def offers(model: str | Path, trust_remote_code: bool = False) -> list[Offer]:
    """The exporters that there are, and why some cannot write this checkpoint. Some read its weights to know."""
    source = find_source(str(model), trust_remote_code)
    found = ((name, exporter_named(name)) for name in EXPORTERS)
    return [Offer(name, exporter.about, tuple(_reasons(exporter, source))) for name, exporter in found]


def shard_bytes_of(exporter: Exporter, shard_size: int | str | None) -> int | None:
    """The bytes of a shard size; None for none. Raises InputError for other words, and for a layout of one file."""
    if shard_size is None:
        return None
    if exporter.one_file:
        raise InputError(f"shard size {shard_size}: {exporter.kind} writes a single weight file; drop --shard-size")
    return parse_bytes(str(shard_size), "shard size")


def _reasons(exporter: Exporter, source: Source) -> list[str]:
    """Reasons why an exporter cannot write a checkpoint."""
    turned = next((name for name, layer in stored_in(source).layers.items() if layer.scheme.rotation is not None), None)
    if turned is None or exporter.turns_back:
        return exporter.why_not(source)
    return [f"{turned} rotates its input as the model runs, which only an export to dense takes out of the weights"]


def _record(source: Source, exporter: Exporter, place: Place) -> dict[str, object]:
    """The record of an export but for its tensors and files."""
    return manifest(
        RunRecord(notes=place.lost),
        model=portable(source.name),
        identity={"export": exporter.kind, "model": source.fingerprint(), OF_TENSORS: tensors_of(source.path)},
        calibration=None,
        ranks=1,
    )
