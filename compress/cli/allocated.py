"""Tables of a shared-out budget: units by candidate, the predicted KL, and the result of the run."""

from collections import Counter

from compress.checkpoint.sensitivity import Sensitivity
from compress.cli import run_results
from compress.evaluation.report.content import ReportTable
from compress.evaluation.report.terminal import show
from compress.search.budget import Allocation
from compress.search.within import Mixed
from compress.system.terminal import console


def all_of(
    found: Sensitivity, made: Allocation, mixed: Mixed | None, model: str, recipe: str | None, output: str | None
) -> None:
    """The result of a run where there is one, the allocation, and where the recipe lies."""
    if mixed is not None:
        run_results.result(mixed.result, model, str(output))
    allocation(found, made)
    if mixed is not None:
        achieved(mixed)
    if recipe is not None:
        words = f"{recipe}: run it with compress quantize {model} --recipe {recipe} --calibration ... --output ..."
        console().print(words, soft_wrap=True)


def allocation(found: Sensitivity, made: Allocation) -> None:
    """Units by kind and candidate, and the KL of uniform models beside that predicted."""
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


def achieved(made: Mixed) -> None:
    """The KL of the checkpoint, beside the one that was predicted."""
    if made.achieved_kl is None:
        return
    rows = made.sensitivity.held_out or {}
    where = "the calibration text (give --text for held-out text)" if made.seen else f"{rows.get('source')}"
    show(
        f"achieved KL {made.achieved_kl:.4g}, predicted {made.allocation.predicted_kl:.4g}, on {rows.get('samples')} "
        f"windows of {where}"
    )
