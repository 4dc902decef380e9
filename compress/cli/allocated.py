"""Tables of a shared-out budget: units by candidate, and the predicted KL."""

from collections import Counter

from compress.checkpoint.sensitivity import Sensitivity
from compress.evaluation.report.content import ReportTable
from compress.evaluation.report.terminal import show
from compress.search.budget import Allocation
from compress.system.terminal import console


def allocation(found: Sensitivity, made: Allocation, model: str, recipe: str) -> None:
    """Units by kind and candidate, the KL of uniform models beside that predicted, and where the recipe lies."""
    kinds = list(dict.fromkeys(unit.kind for unit in found.units))
    used = [name for name in found.candidates if name in made.chosen.values()]
    counts = Counter((unit.kind, made.chosen[unit.name]) for unit in found.units)
    rows = [(kind, *(str(counts[kind, name] or "-") for name in used)) for kind in kinds]
    kl = f"predicted KL {made.predicted_kl:.4g}"
    lines = [f"{made.bits_per_weight:.4g} bits per weight, weight files of {made.total_bytes:,} bytes; {kl}"]
    for name, uniform in found.uniform_kl.items():
        if all(name in unit.tried for unit in found.units):
            bits = 8 * sum(unit.tried[name].bytes for unit in found.units) / found.weights
            lines.append(f"  all layers {name}: {bits:.4g} bits per weight, KL {uniform:.4g}")
    lines += [f"  left as it is: {layer} ({why})" for layer, why in found.left_out.items()]
    show(ReportTable(("", *used), rows, "layers by what they got"), *lines)

    words = f"{recipe}: run it with compress quantize {model} --recipe {recipe} --calibration ... --output ..."
    console().print(words, soft_wrap=True)
