"""The best of a run: the parameters with which the loss on held-out samples was the smallest."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from compress.train.options import TrainingOptions

MEASUREMENTS = 8  # in a run, the one before it not counted
APART = 10  # steps between two of them, at least
COST = 0.05  # of the time of all steps, at most: a step goes back through the student, too
WORK = 2.0  # of a sample that is trained on, in units of one that is measured
LEAST = 8  # held-out samples of a measurement, where there are so many


def measured_samples(options: TrainingOptions) -> int:
    """Held-out samples that a measurement takes, at most: so many that two of them take `COST` of the time."""
    return max(LEAST, int(COST * options.steps * options.rows))


def interval(options: TrainingOptions, held_out: int) -> int:
    """Steps between two measurements on so many samples; 0: the last step alone is worth one."""
    affordable = int(COST * WORK * options.steps * options.rows / max(1, held_out))
    count = min(MEASUREMENTS, affordable)
    return 0 if count < 2 else max(APART, -(-options.steps // count))


class Best:
    """Keeps a copy of parameters (of the shards that a rank has). since: the first step whose parameters may be kept;
    None: no copy is made, and the last ones stay."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], since: int | None) -> None:
        self.parameters, self.since = parameters, since
        self.copies = {} if since is None else {name: p.detach().clone() for name, p in parameters.items()}
        self.at = torch.tensor([-1.0, math.inf], dtype=torch.float64)  # step, loss

    @property
    def fixed(self) -> dict[str, Tensor]:
        """The tensors that a checkpoint of the run needs."""
        return {} if self.since is None else {"best": self.at, **{f"best.{n}": t for n, t in self.copies.items()}}

    @torch.no_grad()
    def offer(self, step: int, loss: float) -> None:
        """Keep the parameters as they are after a step, if none were better."""
        if self.since is None or step < self.since or not loss <= float(self.at[1]):
            return
        self.at[0], self.at[1] = step, loss
        for name, p in self.parameters.items():
            self.copies[name].copy_(p)

    @property
    def step(self) -> int | None:
        """The step of the stored parameters; None where none are stored."""
        return None if self.at[0] < 0 else int(self.at[0])

    @torch.no_grad()
    def put_back(self) -> None:
        """Give parameters the stored values."""
        for name, p in self.parameters.items():
            p.copy_(self.copies[name])
