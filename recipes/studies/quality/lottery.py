"""A lottery ticket of a small network: four of five weights zero, as good as all of them, and better than the same mask
over another initialization.

    python recipes/studies/quality/lottery.py [--seeds 3] [--rewind weights] [--to 40] [--steps 400] [--json OUT]

Data: scikit-learn's 1797 handwritten digits of 8x8 pixels, 1200 to train on and 597 to judge by. Network: two
convolutions of 3x3 and a linear layer, 21280 weights in all. Per seed: the dense network is trained; round by round the
smallest fifth of what is left of all layers becomes zero and the rest is rewound
(`recipes/studies/quality/tickets.py`), down to a fifth of all weights; then networks with the mask of that ticket are
trained in full from other initializations.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d

from compress.model.layers import Layer, is_layer
from compress.passes.train import Train
from compress.recipes.studies.figures import asked, made_by
from compress.recipes.studies.quality.tickets import Lesson, Lottery, draw, lesson, train_masked
from compress.train.inputs.samples import Rows

SPARSITY = 0.8
TRAINED_ON = 1200
WIDTHS = (32, 64)
ROWS, RATE = 60, 1e-2
OTHERS = 2  # initializations under the mask of a ticket


class Small(nn.Module):
    """Two convolutions, each followed by pooling of 2x2 pixels, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, WIDTHS[0], 3, padding=1)
        self.second = nn.Conv2d(WIDTHS[0], WIDTHS[1], 3, padding=1)
        self.head = nn.Linear(WIDTHS[1] * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, 1, 8, 8]; logits [B, 10]."""
        for layer in (self.first, self.second):
            x = max_pool2d(torch.relu(layer(x)), 2)
        logits: Tensor = self.head(x.flatten(1))
        return logits


def digits() -> tuple[Rows, Rows]:
    """Samples to train on, and to judge by."""
    found = import_module("sklearn.datasets").load_digits()
    x, labels = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16, torch.tensor(found.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    rows = Rows(Rows({"x": x, "labels": labels}).take(order))
    return Rows(rows.take(range(TRAINED_ON))), Rows(rows.take(range(TRAINED_ON, len(rows))))


def network(seed: int) -> Small:
    """A network as torch initializes it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Small()


def lesson_of(model: nn.Module, rows: Rows, steps: int, seed: int) -> Lesson:
    """The training that all networks here share, with its samples."""
    options = Train(
        teacher="none",
        logits=0,
        task=1,
        steps=steps,
        rows=ROWS,
        learning_rate=RATE,
        held_out=0,
        save_every=0,
        seed=seed,
    )
    return lesson([Layer(name, module) for name, module in model.named_modules() if is_layer(module)], rows, options)


@torch.no_grad()
def right(model: nn.Module, rows: Rows) -> float:
    """Percent of samples that are classified right."""
    return 100 * float((model(rows.tensors["x"]).argmax(1) == rows.tensors["labels"]).double().mean())


@dataclass(frozen=True)
class Drawn:
    """Accuracies of one ticket. rounds: of the dense network and after each round; others: of its mask over other
    initializations."""

    seed: int
    rounds: list[float]
    others: list[float]

    @property
    def dense(self) -> float:
        return self.rounds[0]

    @property
    def ticket(self) -> float:
        return self.rounds[-1]


def drawn(seed: int, how: Lottery, steps: int) -> Drawn:
    """One ticket."""
    seen, unseen = digits()
    model = network(seed)
    rounds: list[float] = []
    ticket = draw(model, lesson_of(model, seen, steps, seed), how, lambda share: rounds.append(right(model, unseen)))
    others = []
    for i in range(OTHERS):
        other = network(1000 * (seed + 1) + i)
        train_masked(other, ticket.masks, lesson_of(other, seen, steps, seed))
        others.append(right(other, unseen))
    return Drawn(seed, rounds, others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rewind", choices=["weights", "learning-rate"], default="weights")
    parser.add_argument("--to", type=int, default=40, help="the step that rewinding goes back to")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    how = Lottery(sparsity=SPARSITY, per="model", rewind=arguments.rewind, to=arguments.to)
    found = []
    for seed in range(arguments.seeds):
        one = drawn(seed, how, arguments.steps)
        found.append(one)
        told = ", ".join(f"{accuracy:.2f}" for accuracy in one.others)
        print(f"seed {seed}: dense {one.dense:.2f}, ticket {one.ticket:.2f}, others {told}", flush=True)
        if arguments.json is not None:
            record = {
                "command": asked(__file__),
                **made_by(),
                "rewind": how.rewind,
                "to": how.to,
                "steps": arguments.steps,
                "sparsities": how.shares,
                "rows": [{**asdict(one), "dense": one.dense, "ticket": one.ticket} for one in found],
            }
            arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(
        f"mean: dense {mean(one.dense for one in found):.2f}, ticket {mean(one.ticket for one in found):.2f}, others "
        f"{mean(mean(one.others) for one in found):.2f}"
    )


if __name__ == "__main__":
    main()
