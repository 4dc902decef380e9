"""Sensitivities of the original's layers to several schemes, read from the latest measurement of `fit`."""

from compress.checkpoint.read.source import Source
from compress.checkpoint.sensitivity import Sensitivity, sensitivity_of_model
from compress.evaluation.document import SensitivityResult, UnitSensitivity
from compress.evaluation.quality.language import Model

NOT_MEASURED = "nothing is kept of it: `compress fit` measures it"
NOT_READ = "nothing was read that is kept of the original"
IN_MEMORY = "the original was in memory, where nothing is kept of it"


def sensitivity_of(original: Model) -> SensitivityResult | str:
    """The latest sensitivity measurement of an original, or the reason why there is none."""
    if not isinstance(original, Source):
        return IN_MEMORY
    found = sensitivity_of_model(original.fingerprint())
    return NOT_MEASURED if found is None else result_of(found)


def result_of(found: Sensitivity) -> SensitivityResult:
    """A table of sensitivities as the result shown in a report."""
    units = [
        UnitSensitivity(
            unit.name,
            unit.layers,
            {name: tried.fisher for name, tried in unit.tried.items()},
        )
        for unit in found.units
    ]
    bits = {}
    for name in found.candidates:
        tried = [(unit.tried[name].bytes, unit.weights) for unit in found.units if name in unit.tried]
        if tried:
            bits[name] = 8 * sum(size for size, _ in tried) / sum(weights for _, weights in tried)
    return SensitivityResult(bits, units, found.uniform_kl, found.calibration, found.held_out)
