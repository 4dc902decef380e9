"""State of a run, and the calls of the next block, which flow through it."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor, nn

from compress.base.collectives import Comm
from compress.base.host_memory import aside
from compress.base.progress import Reporter
from compress.checkpoint.write.record import Finished, RunRecord
from compress.checkpoint.write.writer import InMemory, Writer
from compress.engine.plan.plan import Plan
from compress.engine.residency import Residency
from compress.engine.walk.rewrite import FoldFinder
from compress.model.calls import Batch, Call, hidden_of
from compress.model.sharing import shared_parameters
from compress.passes.protocol.stages import LossCurvature
from compress.train.inputs.samples import Rows
from compress.train.inputs.teacher_predictions import TopKRows

Activity = Literal["forward", "statistics", "solve", "write"]
T = TypeVar("T")


class Spending:
    """Adds seconds to `spent` of a record, by activity. Each counts once, for the innermost activity; what is left is
    reading weights and everything else. A GPU is waited for where one activity follows another."""

    def __init__(self, record: RunRecord, device: torch.device) -> None:
        self.spent, self.waits = record.spent, device.type == "cuda"
        self.inside: list[Activity] = []
        self.since = 0.0

    @contextmanager
    def on(self, activity: Activity) -> Iterator[None]:
        """Count the time inside the context as this activity, except for contexts of `on` inside it."""
        self._turn()
        self.inside.append(activity)
        try:
            yield
        finally:
            self._turn()
            self.inside.pop()

    def each(self, activity: Activity, values: Iterable[T]) -> Iterator[T]:
        """Values that are made one by one, which is what counts."""
        made = iter(values)
        while True:
            try:
                with self.on(activity):
                    value = [next(made)]
            except StopIteration:
                return
            yield value.pop()  # large, and not to be held here while the next one is made

    def _turn(self) -> None:
        if self.waits:
            torch.cuda.synchronize()
        now = time.monotonic()
        if self.inside:
            current = self.inside[-1]
            self.spent[current] = self.spent.get(current, 0.0) + now - self.since
        self.since = now


@dataclass(frozen=True)
class Lessons:
    """Training data and teachers. rows: all samples, the same on every rank. micro: the number of samples that go
    through at once. teacher: the model of that name, ready to be called, or a file's top k of one. place: the folder
    of checkpoints (None: nowhere)."""

    rows: Rows
    micro: int
    teacher: Callable[[str], nn.Module | TopKRows]
    place: Path | None
    resume: bool


class Steps:
    """Counts tables and blocks for the person who waits."""

    def __init__(self, reporter: Reporter, total: int, phase: str = "") -> None:
        self.reporter, self.total, self.phase, self.done = reporter, total, phase, 0

    def begin(self) -> None:
        """The next begins now."""
        self.reporter.step(self.done, self.total, "")

    def finish(self, name: str, usual: bool) -> None:
        """One more is done. usual: it took the time that the others will take, too."""
        self.done += 1
        if not usual:
            self.reporter.step(self.done, self.total, "")
        self.reporter.step(self.done, self.total, f"{self.phase}{name}")


@dataclass(frozen=True)
class MemoryMode:
    """The ways in which a run takes less memory of its device, and more time.

    repeats: forwards of a block are repeated for its sites (`engine.walk.forward`). offloads: hidden states, and the
    statistics of the site that is solved, wait in the host's memory; rows are solved in runs. at_once: the most samples
    of a forward (None: a micro-batch).
    """

    repeats: bool = False
    offloads: bool = False
    at_once: int | None = None

    def __str__(self) -> str:
        words = ["forwards are repeated for each group of layers that share an input"] if self.repeats else []
        if self.offloads:
            words.append("hidden states and statistics wait in the host's memory, and rows are solved in runs")
        return "; ".join([*words, *([] if self.at_once is None else [f"at most {self.at_once} samples run at once"])])


@dataclass(frozen=True, kw_only=True)
class Run:
    """A walk over the blocks of a model: what is done to them, and where the results go.

    batches: this rank's micro-batches (none where no pass needs calibration). lessons: training data, where the run
    trains. phase: the walk's name for messages, where a run has several. earlier: results of a walk before this one,
    which this one begins with: {block or table: what was decided about it, trained since}. places: filled with each
    layer's places of weights within their codes, for a training that begins there (None: unkept). memory_mode: what is
    done for lack of memory; leaner_modes: what else may be, where memory runs out all the same. parts: of each
    micro-batch, the number of `batches` that it is split into (empty: 1 each). curvature: of the loss by the outputs of
    layers, where a pass asks for it (`engine.walk.curvature`). shares_tokens: whether ranks share out micro-batches;
    otherwise each has all of them (`engine.plan.experts_by_rank`).
    """

    model: nn.Module
    plan: Plan
    batches: Sequence[Batch]
    residency: Residency
    sink: Writer | InMemory
    comm: Comm
    record: RunRecord
    reporter: Reporter
    lessons: Lessons | None = None
    phase: str = ""
    earlier: Mapping[str, Finished] = field(default_factory=dict)
    places: dict[str, Tensor] | None = None
    memory_mode: MemoryMode = field(default_factory=MemoryMode)
    leaner_modes: Sequence[MemoryMode] = ()
    parts: Sequence[int] = ()
    curvature: Mapping[str, LossCurvature] = field(default_factory=dict)
    shares_tokens: bool = True

    @property
    def token_comm(self) -> Comm:
        """The ranks that have the calibration tokens together."""
        return self.comm if self.shares_tokens else Comm.alone()

    def settled(self, outputs: Any) -> Any:
        """Outputs of a block as they wait for the next: on the host in a mode that offloads them."""
        return aside(outputs) if self.memory_mode.offloads else outputs

    @cached_property
    def folds(self) -> FoldFinder:
        """Finds the folds of one block after the other."""
        return FoldFinder(self.comm, shared_parameters(self.model))

    @cached_property
    def steps(self) -> Steps:
        """Reports a walk through the tables and blocks of the plan."""
        total = sum(len(stack.blocks) for stack in self.plan.stacks) + len(self.plan.tables)
        return Steps(self.reporter, total, self.phase)

    @cached_property
    def spending(self) -> Spending:
        """Counts what the seconds of this walk go to."""
        return Spending(self.record, self.residency.device)


def split_batches(run: Run) -> Run:
    """The run with its micro-batches in parts of as many samples as it may have at once."""
    most = run.memory_mode.at_once
    if most is None:
        return run
    counts = [max(len(value) for value in batch.values() if isinstance(value, Tensor)) for batch in run.batches]
    batches = [
        {key: value[i : i + most] if isinstance(value, Tensor) else value for key, value in batch.items()}
        for batch, count in zip(run.batches, counts, strict=True)
        for i in range(0, count, most)
    ]
    return replace(run, batches=batches, parts=[-(-count // most) for count in counts])


@dataclass(frozen=True)
class Calls(Sequence[Call]):
    """Calls of which the arguments may wait on the host (`held`); each is on the device as long as it is looked at."""

    held: Sequence[Call]

    @classmethod
    def of(cls, calls: Sequence[Call]) -> "Calls":
        return calls if isinstance(calls, Calls) else cls(calls)

    def __len__(self) -> int:
        return len(self.held)

    @overload
    def __getitem__(self, i: int) -> Call: ...

    @overload
    def __getitem__(self, i: slice) -> "Calls": ...

    def __getitem__(self, i: int | slice) -> "Call | Calls":
        return Calls(self.held[i]) if isinstance(i, slice) else self.held[i].here()


@dataclass(frozen=True)
class Streams:
    """The calls of a block on the compressed model's hidden states, and on those of the original model (`reference`;
    empty where no pass compares with it). outputs, others: all that the block before has returned for each of them;
    none before the first block."""

    calls: Sequence[Call]
    reference: Sequence[Call]
    outputs: Sequence[Any] = ()
    others: Sequence[Any] = ()

    def __post_init__(self) -> None:
        for name in ("calls", "reference"):
            object.__setattr__(self, name, Calls.of(getattr(self, name)))

    @property
    def end(self) -> bool:
        """True if the block is the whole model, which hands nothing on."""
        return bool(self.calls) and Calls.of(self.calls).held[0].key is None

    def called_as(self, own: Sequence[Call], original: Sequence[Call] | None = None) -> "Streams":
        """These hidden states in a block's own calls: masks and rotary tables differ between blocks. original: the
        block's calls in the original model, where they differ in more."""
        if self.end:
            return self
        theirs = (own if original is None else original)[: len(self.reference)]
        return Streams(_own_calls(own, self.calls, self.outputs), _own_calls(theirs, self.reference, self.others))

    def after(self, outputs: Sequence[Any], others: Sequence[Any]) -> "Streams":
        """The same calls on what the block returned for each of them."""
        if self.end:
            return self
        return Streams(_onto(self.calls, outputs), _onto(self.reference, others), outputs, others)


def _own_calls(own: Sequence[Call], before: Sequence[Call], outputs: Sequence[Any]) -> list[Call]:
    """The block's own calls on what comes out of the block before; of the first block, on the hidden states given."""
    if outputs:
        return [call.following(output) for call, output in zip(own, outputs, strict=True)]
    return [call.with_hidden(given.hidden) for call, given in zip(own, Calls.of(before).held, strict=True)]


def _onto(calls: Sequence[Call], outputs: Sequence[Any]) -> list[Call]:
    return [call.with_hidden(hidden_of(output)) for call, output in zip(Calls.of(calls).held, outputs, strict=True)]
