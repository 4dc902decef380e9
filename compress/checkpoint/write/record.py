"""What a run leaves behind: what was decided about each block, and what the report says about it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from compress.calibration.calibrators import Range
from compress.calibration.histogram import merged, merged_edge, pooled
from compress.checkpoint.saving import Saving
from compress.checkpoint.write.coverage import Coverage
from compress.model.edits.folds import FoldRecord
from compress.model.known_edits import Edit
from compress.model.layers import Layer
from compress.model.opened import Opened
from compress.system.progress import Reporter
from compress.weights.caches import CacheCodes
from compress.weights.decision import Decision

TRAIN = "train"  # the method of a layer that training alone has changed


@dataclass
class LayerRecord:
    """What the report says about one compressed layer. figures: whatever its passes measured."""

    name: str
    method: str
    scheme: str
    grid: str
    group_size: int | None
    shape: tuple[int, int]
    figures: dict[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class HistogramRecord:
    """How often a tensor had which value: exact counts by sign and magnitude, kept coarse.

    negative, rest: counts of the values below zero and of the others, from zero outwards, up to the last bin that holds
    something. Bin i of either holds edges[i] <= |x| < edges[i + 1]; the edges are those of `histogram.merged_edge`, in
    units of `width`, which is a power of two. At most 128 bins a side.
    """

    width: float
    negative: list[int]
    rest: list[int]

    @property
    def edges(self) -> list[float]:
        """Where the bins of the longer side begin, and where its last one ends."""
        return [self.width * merged_edge(i) for i in range(max(len(self.negative), len(self.rest)) + 1)]


@dataclass(frozen=True)
class RangeRecord:
    """What the report says about a range that calibration fixed.

    tensor, role: what it is about, the `input` of the layer of that name, say. also: other layers that read the same
    tensor. low, high: the range that the codes cover, before a scale is rounded to the dtype it is stored in. lowest,
    highest: what was observed. clipped: the share of the values beyond low or high (None: not counted; of a moving
    average at least so many). ranges: how many there are; where it is more than one (a range per channel), low, high,
    lowest and highest are the outermost of them, the share and the histogram those of all values. histogram: where the
    run was asked for it (`histograms`).
    """

    tensor: str
    role: str
    calibrator: str
    low: float
    high: float
    lowest: float
    highest: float
    clipped: float | None
    tokens: int
    ranges: int = 1
    also: list[str] = field(default_factory=list)
    histogram: HistogramRecord | None = None

    @classmethod
    def restored(cls, noted: Mapping[str, Any]) -> "RangeRecord":
        """From what `dataclasses.asdict` made of one."""
        histogram = noted.get("histogram")
        return cls(**{**noted, "histogram": None if histogram is None else HistogramRecord(**histogram)})


@dataclass
class RunRecord:
    """What a run did, for the report. caches: how each attention keeps keys and values. ranges: what calibration fixed,
    in the order of the model. not_folded: producers into which no scale can go, and why. changed: the blocks and tables
    that have new values by now. structure: what was removed, and the sizes before and after. coverage: how much of the
    model is compressed, at the end (None: it was only cut or trained). saving: bytes before and after, of a run that
    writes. training: what each training measured, and its options. spent: of the seconds, those that went to
    forwards, statistics, solving and writing."""

    layers: list[LayerRecord] = field(default_factory=list)
    caches: dict[str, str] = field(default_factory=dict)
    ranges: list[RangeRecord] = field(default_factory=list)
    folds: list[FoldRecord] = field(default_factory=list)
    not_folded: list[str] = field(default_factory=list)
    left_alone: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    structure: dict[str, Any] | None = None
    coverage: Coverage | None = None
    saving: Saving | None = None
    training: list[dict[str, Any]] = field(default_factory=list)
    block_forwards: int = 0
    seconds: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)

    def take(self, done: "Finished") -> None:
        """Enter a finished block, of this run or of one that was stopped."""
        self.layers.extend(done.records)
        self.caches |= {attention: str(codes.scheme) for attention, codes in done.caches.items()}
        self.ranges.extend(done.ranges)
        self.folds.extend(done.fold_records)
        self.left_alone.update(done.left_alone)
        self.not_folded += [reason for reason in done.not_folded if reason not in self.not_folded]

    def forget(self) -> None:
        """Drop what finished blocks have entered: they are gone through once more."""
        for entered in (self.layers, self.caches, self.ranges, self.folds, self.not_folded):
            entered.clear()

    @property
    def only_trained(self) -> set[str]:
        """Layers that were trained and neither pruned nor rounded."""
        other = {layer.name for layer in self.layers if layer.method != TRAIN or "sparsity" in layer.figures}
        return {layer.name for layer in self.layers} - other

    def note(self, reporter: Reporter, message: str) -> None:
        """Keep a remark once and say it."""
        if message not in self.notes:
            self.notes.append(message)
            reporter.note(message)


@dataclass(frozen=True)
class Finished:
    """A block that is done: its decisions (the weight as it is stored, where that is all that is known of one), the
    edits before them, records, reasons and ranges, how its attentions keep keys and values, and producers into which no
    scale can go."""

    decided: Mapping[str, Decision | Tensor]
    records: list[LayerRecord]
    left_alone: Mapping[str, str]
    edits: Sequence[Edit] = ()
    fold_records: Sequence[FoldRecord] = ()
    ranges: Sequence[RangeRecord] = ()
    caches: Mapping[str, CacheCodes] = field(default_factory=dict)
    not_folded: Sequence[str] = ()


class Sink(Protocol):
    """Takes finished blocks; knows which are finished already."""

    def finished(self, block: str) -> Finished | None:
        """What an earlier run wrote for a block; None where it did not."""
        ...

    def write(
        self,
        block: str,
        opened: Opened,
        layers: Mapping[str, Layer],
        finished: Finished,
    ) -> None:
        """Write a finished block. Called on every rank while the block is open."""
        ...


def range_record(found: Range, tensor: str, role: str, also: Sequence[str] = ()) -> RangeRecord:
    """What the report says about the fixed range of a tensor, with its histogram where it was kept."""
    histogram = None
    if found.counts is not None and found.width is not None:
        counts, width = pooled(found.counts, found.width)
        histogram = HistogramRecord(width, *merged(counts))
    return RangeRecord(
        tensor,
        role,
        found.method,
        low=float(found.lo.min()),
        high=float(found.hi.max()),
        lowest=float(found.lowest.min()),
        highest=float(found.highest.max()),
        clipped=None if found.clipped is None else float(found.clipped.mean()),
        tokens=found.tokens,
        ranges=len(found.lo),
        also=list(also),
        histogram=histogram,
    )


def range_figures(found: RangeRecord) -> dict[str, float | int | str]:
    """What the report of a layer says about the range of its input or output."""
    bounds = {key: getattr(found, key) for key in ("low", "high", "lowest", "highest", "clipped")}
    figures = {f"{found.role}_{key}": value for key, value in bounds.items() if value is not None}
    return {**figures, "calibrator": found.calibrator}
