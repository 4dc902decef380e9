"""What a run leaves behind: what was decided about each block, and what the report says about it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from compress.architecture import Layer
from compress.cache import CacheCodes
from compress.calibrators import Range
from compress.coverage import Coverage
from compress.histogram import merged, merged_edge, pooled
from compress.passes.base import Decision, Pass
from compress.plan import Plan
from compress.progress import Reporter
from compress.rescale import Folded, FoldRecord
from compress.residency import Opened


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
    that have new values by now. coverage: how much of the model is compressed, when the run is done."""

    layers: list[LayerRecord] = field(default_factory=list)
    caches: dict[str, str] = field(default_factory=dict)
    ranges: list[RangeRecord] = field(default_factory=list)
    folds: list[FoldRecord] = field(default_factory=list)
    not_folded: list[str] = field(default_factory=list)
    left_alone: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    coverage: Coverage | None = None
    block_forwards: int = 0
    seconds: float = 0.0

    def take(self, done: "Finished") -> None:
        """Enter a finished block, of this run or of one that was stopped."""
        self.layers.extend(done.records)
        self.caches |= {attention: str(codes.scheme) for attention, codes in done.caches.items()}
        self.ranges.extend(done.ranges)
        self.folds.extend(done.fold_records)
        self.left_alone.update(done.left_alone)

    def note(self, reporter: Reporter, message: str) -> None:
        """Keep a remark once and say it."""
        if message not in self.notes:
            self.notes.append(message)
            reporter.note(message)


@dataclass(frozen=True)
class Finished:
    """A block that is done: its decisions (values [N, K] where the codes are not kept), the folds before them, records,
    reasons and ranges, and how its attentions keep keys and values."""

    decided: Mapping[str, Decision | Tensor]
    records: list[LayerRecord]
    left_alone: Mapping[str, str]
    folded: Sequence[Folded] = ()
    fold_records: Sequence[FoldRecord] = ()
    ranges: Sequence[RangeRecord] = ()
    caches: Mapping[str, CacheCodes] = field(default_factory=dict)


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


def nothing_done(plan: Plan, record: RunRecord) -> str | None:
    """Which pass compressed nothing at all, and why; None where every one did something."""
    made = {layer.name for layer in record.layers}
    for p in plan.passes:
        wanted = sorted(name for name in plan.treated if p.wants(name))
        if p.rounds and not made & set(wanted):
            reasons = Counter(record.left_alone.get(name, "no reason known") for name in wanted)
            told = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
            return f"{p.innermost.name} compressed nothing: of its layers, like {wanted[0]}, {told}"
    if plan.kv is not None and not record.caches:
        return "kv-cache compressed nothing: no attention keeps keys and values of its own"
    if plan.passes and not any(p.rounds for p in plan.passes) and not record.folds:
        why = f" ({record.not_folded[0]})" if record.not_folded else ""
        return f"{plan.passes[0].innermost.name} did nothing: there is no fold in this model{why}"
    return None


def few_tokens(layers: Sequence[LayerRecord]) -> str | None:
    """A remark about layers that saw fewer calibration tokens than they have inputs; None where none did."""
    seen = [(int(layer.figures["tokens"]), layer.shape[1]) for layer in layers if "tokens" in layer.figures]
    few = [(tokens / inputs, tokens, inputs) for tokens, inputs in seen if tokens < inputs]
    if not few:
        return None
    _, tokens, inputs = min(few)
    return (
        f"{len(few)} of {len(seen)} layers saw fewer calibration tokens than they have inputs "
        f"(at worst {tokens} for {inputs}); more calibration data would serve them better (--samples)"
    )


def held_back(layers: Sequence[LayerRecord]) -> str | None:
    """A remark about layers that a method did less to than asked, their tokens not bearing it out; None where none."""
    solutions = [str(layer.figures["solution"]) for layer in layers if "solution" in layer.figures]
    less = {name: solutions.count(name) for name in sorted(set(solutions)) if name != "gptq"}
    if not less:
        return None
    shares = ", ".join(f"{name} for {count}" for name, count in less.items())
    return (
        f"{sum(less.values())} of {len(solutions)} layers get less than GPTQ with all that was asked for ({shares}): "
        "what one half of their calibration tokens suggests does not hold on the other; give more calibration data"
    )


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


def layer_record(p: Pass, layer: Layer, decision: Decision) -> LayerRecord:
    inner = p.innermost
    grid = decision.weight.grid
    return LayerRecord(
        layer.name,
        inner.name,
        getattr(inner, "scheme", ""),
        getattr(inner, "grid", ""),
        grid.group_size,
        layer.shape,
        dict(decision.figures),
    )
