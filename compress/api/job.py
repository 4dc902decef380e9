"""A run that is ready to begin: block by block through the model, then the checkpoint."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compress.api.request import Request
from compress.api.verify import verified
from compress.checkpoint.read.source import Source
from compress.checkpoint.shown import shown
from compress.checkpoint.write import coverage
from compress.checkpoint.write.describe import configuration, quantization_config
from compress.checkpoint.write.manifest import manifest
from compress.checkpoint.write.record import Finished, RunRecord
from compress.checkpoint.write.writer import Discard, Writer
from compress.data.text import Tokens
from compress.errors import CompressError
from compress.model.buffers import stored_buffers
from compress.model.calls import Batch, evaluating
from compress.passes.protocol.recipe import describe
from compress.run.learn.training import Collected
from compress.run.pipeline import decide, run
from compress.run.plan.batches import ChainBrokenError
from compress.run.plan.matching import shared_weights
from compress.run.plan.plan import Plan, plan
from compress.run.plan.storable import notes_for_readers, notes_on_dense
from compress.run.residency import Residency
from compress.run.restore import gradients, hooks_and_buffers, naming, undone, values
from compress.run.shrink.restructure import Restructured
from compress.run.walk.remarks import nothing_done
from compress.run.walk.rewrite import FoldFinder
from compress.run.walk.state import Lessons, Run, Steps
from compress.system.comm import Comm
from compress.system.progress import Reporter
from compress.train.loop.metrics import summary, training_file

T = TypeVar("T")
VERIFY_LIMIT = 2 * 2**30  # bytes of the original up to which a result is verified without being asked


@dataclass
class Result:
    """What `quantize` did. model: the compressed model, where one is in memory. output: where it was written."""

    record: RunRecord
    model: nn.Module | None = None
    output: Path | None = None
    verification: dict[str, Any] | None = None


@dataclass
class Job:
    """Everything that a run needs. source: where the model was read, None for one that was given in memory. plan: of
    one block instead, once its blocks turn out to be no chain. batches: this rank's. identity: what a resumed run must
    have in common with it. sink: takes the finished blocks. cache: what the configuration says about key-value caches.
    lessons: what it trains with, if it does. stores: the dtypes of parameters before they were widened for that.
    restructured: what was removed of the model, before all this. before: bytes of the model
    as it was given. earlier: what has been found out about each block.
    """

    request: Request
    source: Source | None
    model: nn.Module
    plan: Plan
    batches: Sequence[Batch]
    tokens: Tokens | None
    identity: dict[str, Any]
    residency: Residency
    sink: Writer | Discard
    cache: dict[str, Any] | None
    comm: Comm
    record: RunRecord
    reporter: Reporter
    lessons: Lessons | None = None
    stores: Mapping[str, torch.dtype] = field(default_factory=dict)
    restructured: Restructured | None = None
    before: int = 0
    earlier: Mapping[str, Finished] = field(default_factory=dict)

    def run(self) -> Result:
        """Compress, and write what was asked for. Raises CompressError for work that failed or compressed nothing."""
        with self.undoing():
            return self.carry_out()

    def carry_out(self) -> Result:
        """`run`, of which nothing is undone where it fails."""
        result = Result(self.record)
        with evaluating(self.model):
            self.walk(run)
            self.check_done()
        if self.plan.decides and not self.plan.only_trains:
            self.record.coverage = self.covered()
        if isinstance(self.sink, Writer):
            self.complete(self.sink)
            if self.wants_verification():
                trusted = self.request.trust_remote_code
                result.verification = verified(self.sink.place, self.comm, self.reporter, trusted)
            self.sink.take_name()
            result.output = self.sink.output
        if self.residency.keep:
            result.model = self.model
        return result

    def decide(self) -> Collected:
        """What the passes decide about layers, whose values the model then has, for somebody who trains it."""
        with self.undoing(), evaluating(self.model):
            return self.walk(decide)

    def undoing(self) -> AbstractContextManager[None]:
        """Within: a failure leaves a model in memory as it was, or says what it is. One that was read is nobody's."""
        if self.source is not None:
            return nullcontext()
        if not self.request.work.restore:
            return naming(self.record.changed)
        before = [] if self.restructured is None else [self.restructured.undo]
        return undone(values(self.model), hooks_and_buffers(self.model), *before, gradients(self.model))

    def walk(self, how: Callable[[Run], T]) -> T:
        """Through all blocks of the plan; through the model as one block, where they do not hand the hidden state
        on."""
        try:
            return how(self.begun())
        except ChainBrokenError as why:  # with nothing changed
            if self.plan.stacks[0].container is None:
                raise
            broken = why
        self.join_blocks(broken)
        return how(self.begun())

    def begun(self) -> Run:
        """What the walk works with."""
        return Run(
            self.model,
            self.plan,
            self.batches,
            self.residency,
            self.sink,
            self.comm,
            self.record,
            self.reporter,
            FoldFinder(self.comm, shared_weights(self.model)),
            Steps.of(self.reporter, self.plan, "before training, " if self.lessons is not None else ""),
            self.lessons,
            self.earlier,
        )

    def join_blocks(self, why: ChainBrokenError) -> None:
        """Plan the whole model as one block instead."""
        extent = self.request.extent
        self.note(f"the blocks are not a simple chain ({why}); the model is treated as one block")
        whole = plan(self.model, self.request.passes, extent.ignore, one_block=True, convolutions=extent.convolutions)
        self.plan = replace(whole, earlier=self.plan.earlier)
        self.identity["recipe"] = describe(self.plan.recipe)  # of more layers: a group size may be another
        for note in self.plan.notes:
            self.note(note)

    def check_done(self) -> None:
        """Raise CompressError for a run in which a pass found nothing that it could compress."""
        problem = nothing_done(self.plan, self.record)
        if problem is None:
            return
        if isinstance(self.sink, Writer):
            self.sink.forget()  # what it wrote is the original: nothing to go on with
        raise CompressError(problem)

    def covered(self) -> coverage.Coverage:
        """How much of the model is compressed."""
        dense = self.sink.dense_layers() if isinstance(self.sink, Writer) else ()
        record = self.record
        names = [layer.name for layer in record.layers]
        return coverage.achieved(self.model, names, dense, record.left_alone, record.only_trained)

    def complete(self, sink: Writer) -> None:
        """Put the checkpoint together: what lies outside the blocks, its configuration and the record of the run."""
        schemes = sink.schemes()
        compressed = [name for name in sink.dense_layers() if name not in self.record.only_trained]
        for note in notes_on_dense(compressed, self.model, self.plan):
            self.note(note)
        for note in notes_for_readers(schemes, self.plan):
            self.note(note)
        about_training = training_file(self.record.training)
        changed = None if self.restructured is None else self.restructured.record["config"]
        config, companions = configuration(self.model, self.source, changed)
        if config is not None and (schemes or self.cache is not None):
            config["quantization_config"] = quantization_config(schemes, self.model, self.plan.tables, self.cache)
        blocks = [block for stack in self.plan.stacks for block in stack.blocks]
        blocks += [(table.name, table.module) for table in self.plan.tables]
        about = manifest(
            self.record,
            model=shown(self.source.name) if self.source is not None else type(self.model).__name__,
            identity=self.identity,
            calibration=None if self.tokens is None else self.tokens.described(),
            ranks=self.comm.world,
            training=[summary(history) for history in self.record.training],
        )
        folder = self.source.path if self.source is not None else None
        files = {**companions, **about_training}
        rest = self.stored(outside(self.model, blocks))
        self.record.saving = sink.complete(rest, config, folder, files, about, self.before)

    def stored(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Tensors of the model in the dtypes that it stores, where it has been widened to be trained."""
        for name, tensor in tensors:
            yield name, tensor.to(self.stores.get(name, tensor.dtype))

    def wants_verification(self) -> bool:
        """Whether the output is reloaded and compared: as asked, and otherwise where that takes no long time."""
        asked = self.request.delivery.verify
        if asked is not None:
            return asked
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        return hasattr(self.model, "config") and weights <= VERIFY_LIMIT

    def note(self, message: str) -> None:
        """Keep a remark and say it."""
        self.record.note(self.reporter, message)


def outside(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of the model that are in none of the blocks, each gathered when its turn comes."""
    inside = {id(p) for _, block in blocks for p in block.parameters()}
    prefixes = tuple(f"{name}." if name else "" for name, _ in blocks)
    for name, parameter in model.named_parameters():
        if id(parameter) not in inside:
            yield name, parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.data
    yield from ((name, buffer) for name, buffer in stored_buffers(model) if not name.startswith(prefixes))
