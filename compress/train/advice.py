"""Advice for a training that recovered little of the lost quality."""

from dataclasses import asdict

from compress.train.loop.loop import History, Training
from compress.train.loop.metrics import ends

LITTLE = 1 / 5  # of what was lost
NOTHING = 1e-3  # nats a token: so little divergence that there is nothing to take back


def little_gain(history: History, this: Training) -> str | None:
    """Advice where a training took back less than a fifth of the divergence from the teacher; None where it
    was more, and where it was not measured."""
    found = ends(asdict(history))
    if found is None or "logits" not in this.objective.weights:
        return None
    before, after = (float(losses["logits"]) for losses in found)
    if before < NOTHING or before - after >= LITTLE * before:
        return None
    options = this.options
    if history.kept == options.steps:
        first = f"more steps (now {options.steps}), as the divergence still fell at the end"
    else:
        first = f"more text to train on, or a smaller learning_rate (now {options.learning_rate:.2g})"
    return (
        f"training took back {max(0.0, 1 - after / before):.0%} of the divergence from the teacher ({before:.3g} -> "
        f"{after:.3g} nats on held-out samples); try {first}, or lose less before it: more bits, or smaller groups"
    )
