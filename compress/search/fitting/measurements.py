"""Measurements of `fit` before recipes are run: of a rotation by one scheme, and of every layer under every scheme."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from compress.base.errors import InputError
from compress.base.progress import Reporter
from compress.checkpoint.sensitivity import Sensitivity
from compress.passes.whole_model.rotate import Rotation
from compress.search.candidate import Candidate
from compress.search.fitting.choice import with_sizes, with_usual
from compress.search.fitting.recipe_space import Offered
from compress.search.fitting.request import FitAsked
from compress.search.sensitivity import measure_sensitivity

PROBE = "w3"  # the scheme by which a rotation is judged: trellis codes, where there are such
ENOUGH = 0.8  # of the KL without a rotation
# {method: options with which layers are measured}. Trellis codes of 2^10 states take a quarter of the time of those of
# 2^12 that are run. Of normal numbers they have 5, 8 and 12 % more error for 2, 3 and 4 bits (tests/kernels/layouts).
SWEEP_ALONE = {"refit": 0, "sweeps": 0}
FAST = {"gptq": SWEEP_ALONE, "k-quants": SWEEP_ALONE, "trellis": {**SWEEP_ALONE, "state_bits": 10}}


def as_measured(schemes: Sequence[Candidate]) -> list[Candidate]:
    """Candidates as layers are measured with them."""
    return [Candidate(c.name, tuple(replace(p, **dict[str, Any](FAST[p.name])) for p in c.passes)) for c in schemes]


def with_or_without_rotation(asked: FitAsked, found: Offered, reporter: Reporter) -> Offered:
    """The same, with the rotation only where the model takes one that lowers the KL of 3 bits by a fifth, as it costs
    time whenever the model runs. Its notes say what was measured."""
    probe = next(c for c in as_measured(found.schemes) if c.name.startswith(PROBE))
    without = _measured(asked, [probe], (), reporter).uniform_kl[probe.name]
    try:
        made = _measured(asked, [probe], found.rotation, reporter)
    except InputError as error:
        return found.without_rotation(str(error))
    rotated = made.uniform_kl[probe.name]
    told = f"{probe.name} has KL {rotated:.3g} with a rotation and {without:.3g} without"
    if not rotated <= ENOUGH * without:
        return found.without_rotation(told)
    notes = [f"the model is rotated: {told}", *(note for note in made.notes if note.startswith("rotate:"))]
    return replace(found, notes=[*found.notes, *notes])


def measured(asked: FitAsked, found: Offered, reporter: Reporter) -> Sensitivity:
    """Losses of every layer under every scheme, which are the schemes of recipes as they are run."""
    made = _measured(asked, as_measured(found.schemes), found.rotation, reporter)
    made = replace(made, candidates=with_usual(made.candidates, FAST))
    for c in found.schemes:
        if any("state_bits" in FAST[p.name] for p in c.passes):  # what is measured is smaller than what is run
            layers = asked.planned(c.passes).layers
            made = with_sizes(made, c.name, {layer.name: layer.bytes for layer in layers})
    return made


def _measured(
    asked: FitAsked, candidates: Sequence[Candidate], first: Sequence[Rotation], reporter: Reporter
) -> Sensitivity:
    return measure_sensitivity(
        asked.model,
        candidates,
        first=first,
        calibration=asked.texts.calibration,
        text=asked.texts.rows,
        ignore=asked.ignore,
        batch_size=asked.batch_size,
        reporter=reporter,
        **asked.texts.how,
        **asked.shared,
    )
