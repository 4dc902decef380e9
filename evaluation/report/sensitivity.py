"""The sensitivity of the original's layers: a map and the worst ten, at the candidate nearest to a run's bits."""

import math

from compress.checkpoint.write.record import LayerRecord
from compress.evaluation.document import Evaluation, SensitivityResult, UnitSensitivity
from compress.evaluation.report import wording
from compress.evaluation.report.content import Block, ReportTable, Section, Words
from compress.evaluation.report.layer_map import WORST, Mapped, heat_map, last_of_each

ESTIMATE = Mapped(
    "KL of one layer replaced, estimated",
    "estimated KL when one unit alone is replaced",
    "KL, nats per token, of the original with these layers alone replaced, estimated by the layers' errors and the "
    "Fisher information of their outputs; layers that read one tensor together.",
    wording.number,
)


def section(evaluation: Evaluation, stored: bool = True) -> Section | None:
    """The section on sensitivity; None where it was not measured. stored: include the formats that this run chose."""
    measured = evaluation.sensitivity
    if measured is None or not measured.units:
        return None
    name = nearest(measured, None if evaluation.size is None else evaluation.size.bits_per_weight)
    values = {unit.name: unit.fisher[name] for unit in measured.units if name in unit.fisher}
    values = {unit: value for unit, value in values.items() if math.isfinite(value)}
    records = last_of_each(evaluation.run.layers) if stored and evaluation.run is not None else {}
    blocks: list[Block] = [Words(_conditions(measured, name), "note")]
    if values:
        blocks += [heat_map(values, ESTIMATE), worst(measured, values, records)]
    return Section("Sensitivity of the original", blocks)


def nearest(measured: SensitivityResult, bits: float | None) -> str:
    """The candidate whose bits per weight are nearest, or, where `bits` is None, the one of fewest bits; only
    candidates that suit as many units as any does."""
    most = max(sum(name in unit.fisher for unit in measured.units) for name in measured.bits)
    whole = [name for name in measured.bits if sum(name in unit.fisher for unit in measured.units) == most]
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


def worst(measured: SensitivityResult, values: dict[str, float], records: dict[str, LayerRecord]) -> ReportTable:
    """The units that lose most, by every candidate, and the format that the run stored them in."""
    units = {unit.name: unit for unit in measured.units}
    first = sorted(values, key=lambda name: -values[name])[:WORST]
    names = list(measured.bits)
    rows = []
    for unit in map(units.__getitem__, first):
        found = unit.fisher
        cells = [ESTIMATE.said(found[name], 3) if name in found else wording.NONE for name in names]
        rows.append((wording.name(unit.name), *cells, *([_stored(unit, records)] if records else [])))
    columns = ("layers", *(f"{wording.name(name)}" for name in names), *(["here"] if records else []))
    few = len(rows) if len(rows) < WORST else "ten"
    left = frozenset({len(columns) - 1}) if records else frozenset()
    return ReportTable(columns, rows, f"The {few} most sensitive: estimated KL alone by each candidate", left=left)


def _stored(unit: UnitSensitivity, records: dict[str, LayerRecord]) -> str:
    kinds = dict.fromkeys(
        records[layer].scheme or records[layer].method if layer in records else "as it was" for layer in unit.layers
    )
    return wording.name(", ".join(kinds))
