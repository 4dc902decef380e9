"""Training of the recipe that `fit` chose, in the time that it may take: taken where held-out text shows a gain."""

from dataclasses import replace
from typing import TYPE_CHECKING

from compress.passes.train import Train
from compress.search.fitting.deadline import MARGIN
from compress.search.fitting.paired_kl import compared
from compress.search.fitting.proof import said
from compress.search.trial import MODEL

if TYPE_CHECKING:
    from compress.search.fitting.work import Fitting

LEAST = 0.1  # minutes: in less nothing is learned


def recovered(work: "Fitting", name: str, minutes: float) -> str:
    """The name of the better recipe: the one of this name, or the same with training on the calibration data behind it.
    By KL on held-out text, of those that meet the target if either does."""
    time = minutes
    if work.watch.limit is not None:
        left = work.watch.limit - work.watch.seconds - MARGIN * work.seconds_of_run
        time = min(minutes, left / 60 / MARGIN)
    if time < LEAST:
        work.note("no time was left to recover what was lost")
        return name
    choice = replace(work.choices[name], recovery=(Train(minutes=time),))
    made = work.run(choice, f"{name}-recovered")
    if made not in work.runs:
        work.note("the time was up before training was done")
        return name
    one, two = (work.beside / each / MODEL for each in (made, name))
    difference = compared(work.asked.model, one, two, work.asked.texts.rows, work.asked.shared["trust_remote_code"])
    better = difference.value < 0 and work.meets(made) >= work.meets(name)
    end = "it is taken" if better else "the recipe stays without it"
    work.note(f"training for {time:.3g} min changes the KL by {said(difference)}: {end}")
    return made if better else name
