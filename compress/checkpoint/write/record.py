"""The results of a run: decisions about each block, and the figures for the report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from compress.base.progress import Reporter
from compress.checkpoint.byte_savings import Saving
from compress.checkpoint.write.coverage import Coverage
from compress.model.edits.folds import FoldRecord
from compress.model.known_edits import Edit
from compress.solvers.statistics.calibrators import Range
from compress.solvers.statistics.histogram import merge_bins, merged_edge, pool
from compress.weights.decision import Decision
from compress.weights.kv_cache_codes import CacheCodes

TRAIN = "train"  # the method of a layer that training alone has changed


@dataclass
class LayerRecord:
    """The report's entry about one compressed layer. figures: measured by its passes."""

    name: str
    method: str
    scheme: str
    grid: str
    group_size: int | None
    shape: tuple[int, int]
    figures: dict[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class HistogramRecord:
    """A histogram of a tensor's values: exact counts by sign and magnitude, in coarse bins.

    negative, rest: counts of the values below zero and of the others, from zero outwards, up to the last bin that is
    not empty. Bin i of either holds edges[i] <= |x| < edges[i + 1]; the edges are those of `histogram.merged_edge`, in
    units of `width`, which is a power of two. At most 128 bins a side.
    """

    width: float
    negative: list[int]
    rest: list[int]

    @property
    def edges(self) -> list[float]:
        """The lower edges of the longer side's bins, and the upper edge of the last."""
        return [self.width * merged_edge(i) for i in range(max(len(self.negative), len(self.rest)) + 1)]


@dataclass(frozen=True)
class RangeRecord:
    """The report's entry about a range that calibration fixed.

    tensor, role: the layer or module, and its tensor, like `input`. also: other layers that read the same tensor. low,
    high: the range that the codes cover, before the scale is rounded to its stored dtype. lowest, highest: the observed
    range. clipped: the share of values beyond low or high (None: not counted; a lower bound for a moving average).
    ranges: their number; with more than one (a range per channel), low, high, lowest and highest are the outermost, and
    the share and the histogram are over all values. histogram: only where the run was asked for it (`histograms`).
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
        """Inverse of `dataclasses.asdict`."""
        histogram = noted.get("histogram")
        return cls(**{**noted, "histogram": None if histogram is None else HistogramRecord(**histogram)})


# In the note of a run that began with the values of codes.
ROUNDED = "was rounded before"


@dataclass
class RunRecord:
    """The results of a run, for the report.

    caches: {attention: scheme of its cache}. ranges: fixed by calibration, in the order of the model. not_folded:
    producers that take no scale, with reasons. changed: blocks and tables with new values so far. structure: the parts
    removed, and the sizes before and after. coverage: at the end; None for a run that only cut or trained. saving:
    bytes before and after, of a run that writes. training: measurements and options of each training. spent: {activity:
    seconds} in forwards, statistics, solving and writing.
    """

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
        """Add a finished block, of this run or of the stopped run that it resumes."""
        self.layers.extend(done.records)
        self.caches |= {attention: str(codes.scheme) for attention, codes in done.caches.items()}
        self.ranges.extend(done.ranges)
        self.folds.extend(done.fold_records)
        self.left_alone.update(done.left_alone)
        self.not_folded += [reason for reason in done.not_folded if reason not in self.not_folded]

    def apart(self) -> "RunRecord":
        """A record for a walk before a training: its entries of blocks are its own, remarks and seconds go in here."""
        return replace(self, layers=[], caches={}, ranges=[], folds=[], not_folded=[])

    @property
    def only_trained(self) -> set[str]:
        """Layers that were trained and neither pruned nor rounded."""
        other = {layer.name for layer in self.layers if layer.method != TRAIN or "sparsity" in layer.figures}
        return {layer.name for layer in self.layers} - other

    def note(self, reporter: Reporter, message: str) -> None:
        """Keep a remark and report it, once."""
        if message not in self.notes:
            self.notes.append(message)
            reporter.note(message)


@dataclass(frozen=True)
class Finished:
    """The results of a finished block. decided: {layer: its decision, or only its stored dense weight in a resumed
    run}. edits: applied before the decisions. left_alone: {layer: reason}. caches: {attention: codes of its cache}.
    not_folded: producers that take no scale, with reasons."""

    decided: Mapping[str, Decision | Tensor]
    records: list[LayerRecord]
    left_alone: Mapping[str, str]
    edits: Sequence[Edit] = ()
    fold_records: Sequence[FoldRecord] = ()
    ranges: Sequence[RangeRecord] = ()
    caches: Mapping[str, CacheCodes] = field(default_factory=dict)
    not_folded: Sequence[str] = ()


def range_record(fitted: Range, tensor: str, role: str, also: Sequence[str] = ()) -> RangeRecord:
    """The report's entry about the fixed range of a tensor, with its histogram where it was kept. also: other layers
    that read the tensor."""
    histogram = None
    if fitted.counts is not None and fitted.width is not None:
        counts, width = pool(fitted.counts, fitted.width)
        histogram = HistogramRecord(width, *merge_bins(counts))
    return RangeRecord(
        tensor,
        role,
        fitted.method,
        low=float(fitted.lo.min()),
        high=float(fitted.hi.max()),
        lowest=float(fitted.lowest.min()),
        highest=float(fitted.highest.max()),
        clipped=None if fitted.clipped is None else float(fitted.clipped.mean()),
        tokens=fitted.tokens,
        ranges=len(fitted.lo),
        also=list(also),
        histogram=histogram,
    )


def range_figures(found: RangeRecord) -> dict[str, float | int | str]:
    """Figures for the report of a layer about the range of its input or output."""
    bounds = {key: getattr(found, key) for key in ("low", "high", "lowest", "highest", "clipped")}
    figures = {f"{found.role}_{key}": value for key, value in bounds.items() if value is not None}
    return {**figures, "calibrator": found.calibrator}
