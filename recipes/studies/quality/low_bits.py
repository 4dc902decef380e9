"""Weights and inputs of 2, 3 and 4 bits in every layer of a small network: ranges that are learned beside ranges that
are not.

    python recipes/studies/quality/low_bits.py [--seeds 3] [--steps 100] [--json OUT]

Data and network are those of `recipes/studies/quality/lottery.py`: scikit-learn's digits, two convolutions and a linear
layer. Per seed and width the trained network is rounded: a scale per output channel, inputs by a fixed unsigned range
per tensor. Then

    rounded     as it is, ranges of least squared error
    min-max     trained, straight-through: weights by their range at each step, inputs by the calibrated one
    learned     trained, ranges too: LSQ (Esser et al. 2020, arXiv 1902.08153), from those of least squared error
    anchored    the same, while codes of weights are chosen by the ranges of the beginning
"""

import argparse
import copy
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import nn

import compress
from compress.passes.protocol.base import Pass
from compress.passes.train import Train
from compress.recipes.studies.figures import asked, made_by
from compress.recipes.studies.quality.lottery import ROWS, Small, digits, lesson_of, network, right
from compress.recipes.studies.quality.tickets import train_masked
from compress.train.inputs.samples import Rows

WIDTHS = (2, 3, 4)
FLOAT_STEPS = 400
RATE, SCALE_RATE = 1e-3, 3e-3
Percent = float
WAYS = ("float", "rounded", "minmax", "learned", "anchored")
TASK: dict[str, Any] = {"teacher": "none", "logits": 0.0, "task": 1.0, "rows": ROWS, "held_out": 0.0, "save_every": 0}


@dataclass(frozen=True)
class LowBitsResult:
    """Percent of digits that are right."""

    seed: int
    bits: int
    float: Percent
    rounded: Percent
    minmax: Percent
    learned: Percent
    anchored: Percent


def rounding(bits: int, calibrator: str) -> Pass:
    """Weights and inputs of so many bits."""
    return compress.RTN(
        scheme=f"w{bits}a{bits}",
        group_size=-1,
        clip=calibrator == "mse",
        activations="static",
        activation_grid="unsigned",
        calibrator=calibrator,
    )


def trained(seed: int, seen: Rows) -> Small:
    """The network in floats."""
    model = network(seed)
    lesson = lesson_of(model, seen, FLOAT_STEPS, seed)
    train_masked(model, {layer.name: torch.ones(layer.shape, dtype=torch.bool) for layer in lesson.layers}, lesson)
    return model


def compressed(model: nn.Module, seen: Rows, passes: list[Pass]) -> nn.Module:
    """A copy of the network, treated so."""
    batch = seen.take(range(len(seen)))
    calibration = [{"x": batch["x"]}]
    made = compress.quantize(copy.deepcopy(model), passes, calibration=calibration, training=[dict(batch)]).model
    assert made is not None
    return made


def found(seed: int, bits: int, steps: int, model: nn.Module, seen: Rows, unseen: Rows) -> LowBitsResult:
    """One row."""
    how = {**TASK, "steps": steps, "seed": seed, "learning_rate": RATE}
    ways = [
        [rounding(bits, "mse")],
        [rounding(bits, "minmax"), Train(**how, scales="fitted")],
        [rounding(bits, "mse"), Train(**how, scales="learned", scale_rate=SCALE_RATE)],
        [rounding(bits, "mse"), Train(**how, scales="anchored", scale_rate=SCALE_RATE)],
    ]
    accuracies = [right(compressed(model, seen, passes), unseen) for passes in ways]
    return LowBitsResult(seed, bits, right(model, unseen), *accuracies)


def measure(seeds: int, steps: int) -> list[LowBitsResult]:
    """All rows, printed as they come."""
    seen, unseen = digits()
    rows = []
    for seed in range(seeds):
        model = trained(seed, seen)
        for bits in WIDTHS:
            row = found(seed, bits, steps, model, seen, unseen)
            rows.append(row)
            said = ", ".join(f"{name} {getattr(row, name):.2f}" for name in WAYS)
            print(f"seed {seed}, w{bits}a{bits}: {said}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows = measure(arguments.seeds, arguments.steps)
    for bits in WIDTHS:
        mine = [row for row in rows if row.bits == bits]
        means = {name: mean(getattr(row, name) for row in mine) for name in WAYS}
        print(f"| w{bits}a{bits} | " + " | ".join(f"{value:.2f}" for value in means.values()) + " |")
    if arguments.json is not None:
        record = {
            "command": asked(__file__),
            **made_by(),
            "steps": arguments.steps,
            "rows": [asdict(row) for row in rows],
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
