"""A run that is ready to begin: block by block through the model, then the checkpoint."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compress.base.errors import CompressError
from compress.base.progress import tell
from compress.base.shown import Shown, plain
from compress.checkpoint.companions import companions_of
from compress.checkpoint.portable_names import portable
from compress.checkpoint.read.unplaced_tensors import matrices
from compress.checkpoint.write import coverage
from compress.checkpoint.write.manifest import manifest, read_record
from compress.checkpoint.write.quantization_config import configuration, quantization_config
from compress.checkpoint.write.record import RunRecord
from compress.checkpoint.write.writer import InMemory, Writer
from compress.engine.block_loop import run
from compress.engine.plan.format_limits import notes_for_readers, notes_on_dense
from compress.engine.restore import gradients, hooks_and_buffers, naming, undone, values
from compress.engine.walk.remarks import nothing_done
from compress.engine.walk.state import Run
from compress.jobs.calibration_data import RunData
from compress.jobs.model_source import OpenedModel
from compress.jobs.request import Request
from compress.jobs.verify import verify_output
from compress.kernels import spill
from compress.model.calls import evaluating
from compress.model.disk_names import DiskNames
from compress.model.tensors import stored_buffers
from compress.train.loop.metrics import summary, training_file
from compress.weights.decision import Decision

VERIFY_LIMIT = 2 * 2**30  # bytes of the original up to which a result is verified without being asked


@dataclass(repr=False)
class Result(Shown):
    """The result of `quantize`. model: the compressed model, where one is in memory. output: its directory. codes:
    {layer: its decision}, where `keep_codes` asked for them."""

    record: RunRecord
    model: nn.Module | None = None
    output: Path | None = None
    verification: dict[str, Any] | None = None
    codes: Mapping[str, Decision] | None = None

    def _rows(self) -> list[dict[str, Any]]:
        """A row for each layer and pass that compressed it, with the figures that the pass measured."""
        found = ((layer.figures, asdict(layer)) for layer in self.record.layers)
        return [{key: value for key, value in layer.items() if key != "figures"} | figures for figures, layer in found]

    def to_dict(self) -> dict[str, Any]:
        """The record of the run: all of `compress.json`, where there is an output."""
        return read_record(self.output) if self.output is not None else plain(asdict(self.record))


@dataclass
class Job:
    """A run that is ready to begin, and what is made of its result.

    opened: the model as it was found, cut where structure goes before all this.
    run: what the walk works with.
    identity: what a resumed run must have in common with it.
    caches: what the configuration says about key-value caches.
    stores: the dtypes of parameters before they were widened to be trained.
    """

    request: Request
    opened: OpenedModel
    run: Run
    data: RunData
    identity: dict[str, Any]
    caches: dict[str, Any]
    stores: Mapping[str, torch.dtype] = field(default_factory=dict)

    def finish(self) -> Result:
        """Compress, and write what was asked for. Raises CompressError for work that failed or compressed nothing."""
        with self.undoing():
            return self.carry_out()

    def carry_out(self) -> Result:
        """`finish`, of which nothing is undone where it fails."""
        result = Result(self.run.record)
        if isinstance(self.run.sink, Writer) and self.wants_verification():
            tell(self.run.reporter, "verifies")
        with evaluating(self.run.model):
            run(self.run)
            self.check_done()
        if self.run.plan.decides and not self.run.plan.only_trains:
            self.run.record.coverage = self.covered()
        if isinstance(self.run.sink, Writer):
            self.complete(self.run.sink)
            if self.wants_verification():
                trusted = self.request.trust_remote_code
                result.verification = verify_output(self.run.sink.place, self.run.comm, self.run.reporter, trusted)
            self.run.sink.take_name()
            result.output = self.run.sink.output
        if self.run.residency.keep:
            result.model = self.run.model
        if isinstance(self.run.sink, InMemory):
            result.codes = self.run.sink.decisions if self.run.sink.keep else None
        return result

    def undoing(self) -> AbstractContextManager[None]:
        """Restores a caller's model after a failure, or names its changed parts; no-op for a model read from disk."""
        if self.opened.source is not None:
            return nullcontext()
        if not self.request.restore:
            return naming(self.run.record.changed)
        before = [] if self.opened.cut is None else [self.opened.cut.undo]
        return undone(values(self.run.model), hooks_and_buffers(self.run.model), *before, gradients(self.run.model))

    def check_done(self) -> None:
        """Raise CompressError for a run in which a pass found nothing that it could compress."""
        problem = nothing_done(self.run.plan, self.run.record)
        if problem is None:
            return
        if isinstance(self.run.sink, Writer):
            self.run.sink.forget()  # what it wrote is the original: nothing to go on with
        raise CompressError(problem)

    def covered(self) -> coverage.Coverage:
        """The share of the model that is compressed."""
        dense = self.run.sink.dense_layers() if isinstance(self.run.sink, Writer) else ()
        record = self.run.record
        names = [layer.name for layer in record.layers]
        alone, beside = record.left_alone, self.run.plan.beside
        return coverage.run_coverage(self.run.model, names, dense, alone, record.only_trained, beside)

    def complete(self, sink: Writer) -> None:
        """Put the checkpoint together: what lies outside the blocks, its configuration and the record of the run."""
        run = self.run
        schemes = sink.schemes()
        compressed = [name for name in sink.dense_layers() if name not in run.record.only_trained]
        for note in notes_on_dense(compressed, run.model, run.plan):
            self.note(note)
        for note in notes_for_readers(schemes, run.plan, run.model):
            self.note(note)
        spilled = spill.current()
        if spilled is not None:
            self.note(f"up to {spilled.peak_bytes / 1e9:.3g} GB of tensors lay in files of {spilled.folder} (spill)")
        companions = None if self.opened.source is None else companions_of(self.opened.source)
        for line in () if companions is None else companions.told():
            self.note(line)
        about_training = training_file(run.record.training)
        changed = None if self.opened.cut is None else self.opened.cut.record["config"]
        config, files = configuration(run.model, self.opened.source, changed, self.opened.headless)
        if config is None and schemes:  # a module of the caller, which `load(into=...)` reads
            config = {"architectures": [type(run.model).__name__]}
        if config is not None and (schemes or self.caches):
            config["quantization_config"] = quantization_config(
                schemes, run.model, run.plan.tables, self.caches, sink.names, [*matrices(run.plan.beside)]
            )
        blocks = [block for stack in run.plan.stacks for block in stack.blocks]
        blocks += [(table.name, table.module) for table in run.plan.tables]
        about = manifest(
            run.record,
            model=portable(self.opened.source.name) if self.opened.source is not None else type(run.model).__name__,
            identity=self.identity,
            calibration=self.data.described(),
            ranks=run.comm.world,
            training=[summary(history) for history in run.record.training],
        )
        files |= about_training
        rest = chain(self.stored(outside(run.model, blocks)), self.beside(sink.names))
        run.record.saving = sink.complete(rest, config, companions, files, about, self.opened.bytes)

    def stored(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Tensors of the model in the dtypes that it stores, where it has been widened to be trained."""
        for name, tensor in tensors:
            yield name, tensor.to(self.stores.get(name, tensor.dtype))

    def beside(self, names: DiskNames) -> Iterator[tuple[str, Tensor]]:
        """(Name in the model, tensor) of what is kept with the model, as it lies in the files. names: of the output."""
        for name in self.run.plan.beside:
            assert self.opened.source is not None
            yield names.in_model(name), self.opened.source.weights.tensor(name)

    def wants_verification(self) -> bool:
        """True if the output is to be compared: as asked, otherwise for models of at most `VERIFY_LIMIT` bytes."""
        asked = self.request.verify
        if asked is not None:
            return asked
        weights = sum(p.numel() * p.element_size() for p in self.run.model.parameters())
        return hasattr(self.run.model, "config") and weights <= VERIFY_LIMIT

    def note(self, message: str) -> None:
        """Keep a remark and say it."""
        self.run.record.note(self.run.reporter, message)


def outside(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of the model that are in none of the blocks, each gathered when its turn comes."""
    inside = {id(p) for _, block in blocks for p in block.parameters()}
    prefixes = tuple(f"{name}." if name else "" for name, _ in blocks)
    for name, parameter in model.named_parameters():
        if id(parameter) not in inside:
            yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.data
    yield from ((name, buffer) for name, buffer in stored_buffers(model) if not name.startswith(prefixes))
