"""The sensitivity of the original's layers: a map and the worst ten, at the candidate nearest to a run's bits."""

import math

from compress.checkpoint.write.record import LayerRecord
from compress.evaluation.document import Evaluation, SensitivityResult, UnitSensitivity
from compress.evaluation.report import wording
from compress.evaluation.report.content import Block, ReportTable, Section, Words
from compress.evaluation.report.layer_map import WORST, Mapped, heat_map, last_of_each

KL = Mapped(
    "KL of one layer replaced",
    "KL when one unit alone is replaced",
    "KL, nats per token, of the original with these layers alone replaced; layers that read one tensor together.",
    wording.number,
)
ESTIMATE = Mapped(
    "KL of one layer replaced, estimated",
    "estimated KL when one unit alone is replaced",
    "KL, nats per token, of the original with these layers alone replaced, estimated by the layers' errors and the "
    "Fisher information of their outputs; layers that read one tensor together.",
    wording.number,
)
LOSS = Mapped(
    "Error of one layer replaced",
    "relative output error when one unit alone is replaced",
    "Mean squared error of the layers' output with the original's own inputs, as a share of its mean square.",
    wording.share,
)


def section(found: Evaluation, stored: bool = True) -> Section | None:
    """The section on sensitivity; None where it was not measured. stored: include the formats that this run chose."""
    measured = found.sensitivity
    if measured is None or not measured.units:
        return None
    name = nearest(measured, None if found.size is None else found.size.bits_per_weight)
    about = next((each for each in (KL, ESTIMATE) if any(name in _by(unit, each) for unit in measured.units)), LOSS)
    values = {unit.name: _by(unit, about)[name] for unit in measured.units if name in _by(unit, about)}
    values = {unit: value for unit, value in values.items() if math.isfinite(value)}
    records = last_of_each(found.run.layers) if stored and found.run is not None else {}
    blocks: list[Block] = [Words(_conditions(measured, name), "note")]
    if values:
        blocks += [heat_map(values, about), worst(measured, values, about, records)]
    if about is LOSS:
        blocks.append(Words("KL of one layer replaced was not measured: the budget was shared out by loss.", "note"))
    return Section("Sensitivity of the original", blocks)


def _by(unit: UnitSensitivity, about: Mapped) -> dict[str, float]:
    """The figures of a unit that a map is about, by candidate."""
    return {KL: unit.kl, ESTIMATE: unit.fisher, LOSS: unit.loss}[about]


def nearest(measured: SensitivityResult, bits: float | None) -> str:
    """The candidate whose bits per weight are nearest, or, where `bits` is None, the one of fewest bits; only
    candidates that suit as many units as any does."""
    most = max(sum(name in unit.loss for unit in measured.units) for name in measured.bits)
    whole = [name for name in measured.bits if sum(name in unit.loss for unit in measured.units) == most]
    wanted = 0.0 if bits is None else bits
    return min(whole, key=lambda name: abs(measured.bits[name] - wanted))


def _conditions(measured: SensitivityResult, name: str) -> str:
    shown = [
        f"{what} {wording.name(str(about.get('source')))}"
        for what, about in (("calibrated on", measured.calibration), ("KL on", measured.held_out or {}))
        if about.get("source")
    ]
    others = [f"{each} {bits:.3g}" for each, bits in measured.bits.items()]
    return wording.clean(
        f"Each unit alone replaced by {name} in the original ({', '.join(shown) or 'data in memory'}). "
        f"Tried, with bits per weight: {', '.join(others)}."
    )


def worst(
    measured: SensitivityResult, values: dict[str, float], about: Mapped, records: dict[str, LayerRecord]
) -> ReportTable:
    """The units that lose most, by every candidate, and the format that the run stored them in."""
    units = {unit.name: unit for unit in measured.units}
    first = sorted(values, key=lambda name: -values[name])[:WORST]
    names = list(measured.bits)
    rows = []
    for unit in map(units.__getitem__, first):
        found = _by(unit, about)
        cells = [about.said(found[name], 3) if name in found else wording.NONE for name in names]
        rows.append((wording.name(unit.name), *cells, *([_stored(unit, records)] if records else [])))
    what = {KL: "KL alone", ESTIMATE: "estimated KL alone", LOSS: "error"}[about]
    columns = ("layers", *(f"{wording.name(name)}" for name in names), *(["here"] if records else []))
    few = len(rows) if len(rows) < WORST else "ten"
    left = frozenset({len(columns) - 1}) if records else frozenset()
    return ReportTable(columns, rows, f"The {few} most sensitive: {what} by each candidate", left=left)


def _stored(unit: UnitSensitivity, records: dict[str, LayerRecord]) -> str:
    kinds = dict.fromkeys(
        records[layer].scheme or records[layer].method if layer in records else "as it was" for layer in unit.layers
    )
    return wording.name(", ".join(kinds))
