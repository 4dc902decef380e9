"""What the layers of the original lose by each of several schemes, where that has been measured for a budget."""

from compress.checkpoint.read.source import Source
from compress.checkpoint.sensitivity import Sensitivity, sensitivity_of_model
from compress.evaluation.document import SensitivityResult, UnitSensitivity
from compress.evaluation.quality.language import Model

NOT_MEASURED = "nothing is kept of it: `compress allocate` measures it"
NOT_READ = "nothing was read that is kept of the original"
IN_MEMORY = "the original was in memory, where nothing is kept of it"


def sensitivity_of(original: Model) -> SensitivityResult | str:
    """What was measured last of an original, or why there is nothing."""
    if not isinstance(original, Source):
        return IN_MEMORY
    found = sensitivity_of_model(original.fingerprint())
    return NOT_MEASURED if found is None else result_of(found)


def result_of(found: Sensitivity) -> SensitivityResult:
    """What a report has of a table."""
    units = [
        UnitSensitivity(
            unit.name,
            unit.layers,
            {name: tried.relative_loss for name, tried in unit.tried.items()},
            {name: tried.kl for name, tried in unit.tried.items() if tried.kl is not None},
        )
        for unit in found.units
    ]
    bits = {}
    for name in found.candidates:
        tried = [(unit.tried[name].bytes, unit.weights) for unit in found.units if name in unit.tried]
        if tried:
            bits[name] = 8 * sum(size for size, _ in tried) / sum(weights for _, weights in tried)
    return SensitivityResult(bits, units, found.uniform_kl, found.calibration, found.held_out)
