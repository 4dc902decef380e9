"""What a run leaves behind: what was decided about each block, and what the report says about it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from compress.architecture import Layer
from compress.calibrators import Range
from compress.passes.base import Decision, Pass
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


@dataclass
class RunRecord:
    """What a run did, for the report. not_folded: producers into which no scale can go, and why."""

    layers: list[LayerRecord] = field(default_factory=list)
    folds: list[FoldRecord] = field(default_factory=list)
    not_folded: list[str] = field(default_factory=list)
    left_alone: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    block_forwards: int = 0
    seconds: float = 0.0

    def note(self, reporter: Reporter, message: str) -> None:
        """Keep a remark once and say it."""
        if message not in self.notes:
            self.notes.append(message)
            reporter.note(message)


@dataclass(frozen=True)
class Finished:
    """A block that is done: its decisions (values [N, K] where the codes are not kept), the folds before them, records
    and reasons."""

    decided: Mapping[str, Decision | Tensor]
    records: list[LayerRecord]
    left_alone: Mapping[str, str]
    folded: Sequence[Folded] = ()
    fold_records: Sequence[FoldRecord] = ()


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


def range_figures(found: Range) -> dict[str, float | int | str]:
    """What the report says about the fixed range of an input, which is one for the whole tensor."""
    figures: dict[str, float | int | str] = {
        "input_low": float(found.lo),
        "input_high": float(found.hi),
        "input_lowest": float(found.lowest),
        "input_highest": float(found.highest),
        "calibrator": found.method,
    }
    return figures if found.clipped is None else {**figures, "input_clipped": float(found.clipped)}


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
