"""Lottery tickets: the part of a network that would have been enough from the start.

Frankle & Carbin 2019, arXiv 1803.03635.

    for n rounds:  train  ->  the smallest `rate` of what is left becomes zero, up to `sparsity`  ->  rewind
    weights          those of step `to` come back, and the rates of the steps from there on (Frankle et al. 2020, arXiv
                     1912.05671; `to` = 0 is the first paper's way back to the initialization)
    learning-rate    weights go on from where they are, with the rates from step `to` on (Renda et al. 2020, arXiv
                     2003.02389)

Departs from the papers: samples and optimizer are those of `TrainingOptions` (AdamW, whose moments begin anew with each
round); the last layer is pruned as all others are (the first paper: at half the rate; leave layers out by `layers`).

Under FSDP2 masks are those of one process.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from compress.base.collectives import Comm
from compress.base.errors import InputError, one_of
from compress.base.progress import Reporter, Silent
from compress.model.calls import evaluating
from compress.model.layers import Layer
from compress.train.inputs.fsdp_shards import reshard
from compress.train.inputs.samples import Rows
from compress.train.loop.loop import History, Training, train
from compress.train.loop.optimizer import Learned
from compress.train.objective.objective import Objective
from compress.train.options import TrainingOptions
from compress.train.rounding.pruning import Prunable, prune_to, zeros_of
from compress.train.rounding.sparsity_options import Per
from compress.train.rounding.swapped_layers import attach, detach
from compress.weights.decision import Decision
from compress.weights.formats.dense import dense

Rewind = Literal["weights", "learning-rate"]
RATE = 1e-4  # of a lesson that gives none
Masks = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Lottery:
    """The options of drawing a ticket. sparsity: above 0, below 1: the share of zeros in the end. rate: above 0, below
    1: the share of the remaining weights that become zero in a round; the last round prunes only up to `sparsity`.
    rewind: the state restored after each round. to: 0 or more: the step whose state is restored. per: the scope in
    which the smallest weights are sought: each output, each layer, or all of them together."""

    sparsity: float = 0.8
    rate: float = 0.2
    rewind: Rewind = "weights"
    to: int = 0
    per: Per = "layer"

    def __post_init__(self) -> None:
        one_of("rewind", self.rewind, get_args(Rewind))
        one_of("per", self.per, get_args(Per))
        for name in ("sparsity", "rate"):
            if not 0 < getattr(self, name) < 1:
                raise InputError(f"{name} {getattr(self, name)}; allowed: above 0, below 1")
        if self.to < 0:
            raise InputError(f"to {self.to}; allowed: 0 or more steps")

    @property
    def shares(self) -> list[float]:
        """The share of zeros after each round."""
        rounds = math.ceil(math.log(1 - self.sparsity) / math.log(1 - self.rate) - 1e-9)
        return [*(1 - (1 - self.rate) ** i for i in range(1, rounds)), self.sparsity]


@dataclass(frozen=True)
class Lesson:
    """The training of a network on its own samples, without a teacher. layers: those to prune."""

    layers: Sequence[Layer]
    rows: Rows
    options: TrainingOptions
    comm: Comm
    reporter: Reporter


@dataclass
class Ticket:
    """masks: bool [N, K] of each layer, True for weights that stay. start: the parameters that it is trained from, by
    name. histories: of every training, of the dense network first."""

    masks: dict[str, Tensor]
    start: dict[str, Tensor]
    histories: list[History]


def lesson(
    layers: Sequence[Layer],
    rows: Rows,
    options: TrainingOptions,
    comm: Comm | None = None,
    reporter: Reporter | None = None,
) -> Lesson:
    """Samples and options of all trainings, at a rate of 1e-4 where none is given. Raises InputError for options that
    rewinding does not work with."""
    if options.taught or options.trains != "all":
        raise InputError(
            f"teacher={options.teacher}, trains={options.trains}; a ticket is trained as a whole on its own samples: "
            "give teacher=none and trains=all"
        )
    if not layers:
        raise InputError("no layers to prune; give those of the model (compress.model.layers)")
    if not options.learning_rate:  # one rate for all rounds; a range test of the dense network would fit only the first
        options = replace(options, learning_rate=RATE)
    return Lesson(layers, rows, options, Comm() if comm is None else comm, reporter or Silent())


def draw(model: nn.Module, lesson: Lesson, how: Lottery, trained: Callable[[float], None] | None = None) -> Ticket:
    """Find a ticket, and leave the model as its last training made it. trained: called after every training with the
    model's share of zeros. A collective."""
    if how.to >= lesson.options.steps:
        raise InputError(f"to {how.to}; allowed: below steps, which are {lesson.options.steps}")
    ticket = Ticket({}, {}, [])

    def remember(step: int) -> dict[str, float]:
        if step == how.to:
            ticket.start = {name: p.detach().clone() for name, p in model.named_parameters()}
        return {}

    masks: Masks = {each.name: torch.ones(each.shape, dtype=torch.bool) for each in lesson.layers}
    ticket.histories.append(train_masked(model, masks, lesson, before=remember))
    tell = trained or (lambda share: None)
    tell(0.0)
    for share in how.shares:
        masks = _pruned(masks, lesson, share, how.per)
        if how.rewind == "weights":
            rewind(model, ticket.start)
        else:
            ticket.start = {name: p.detach().clone() for name, p in model.named_parameters()}
        ticket.histories.append(train_masked(model, masks, lesson, first=how.to))
        tell(zeros_of(list(masks.values())))
    ticket.masks = dict(masks)
    return ticket


def _pruned(masks: Masks, lesson: Lesson, share: float, per: Per) -> dict[str, Tensor]:
    """Masks with so many zeros, chosen by the layers' weights after training."""
    found = {each.name: Prunable(each, each.parameter, masks[each.name].clone()) for each in lesson.layers}
    prune_to(found, share, per, lesson.comm)
    return {name: each.kept for name, each in found.items()}


@torch.no_grad()
def rewind(model: nn.Module, start: Mapping[str, Tensor]) -> None:
    """Give parameters the values of a `Ticket.start`."""
    for name, parameter in model.named_parameters():
        parameter.copy_(start[name])


def train_masked(
    model: nn.Module,
    masks: Masks,
    lesson: Lesson,
    first: int = 0,
    before: Callable[[int], Mapping[str, float]] | None = None,
) -> History:
    """Train a network with some weights fixed at zero, with the rates and samples from step `first` on; `before` as in
    `Training`. A collective."""
    options, comm = lesson.options, lesson.comm
    reshard(model)
    weights = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
    requiring = {name: p.requires_grad for name, p in weights.items()}
    with evaluating(model), ExitStack() as undo:
        undo.callback(lambda: [p.requires_grad_(requiring[name]) for name, p in weights.items()])
        undo.enter_context(_masked(lesson.layers, masks))
        for p in weights.values():
            p.requires_grad_(True)
        this = Training(
            options,
            Objective(options, model, None),
            Learned(weights, {}),
            {},
            lesson.rows,
            -(-options.rows // comm.world),
            comm,
            lesson.reporter,
            first=first,
        )
        history = train(this if before is None else replace(this, before=before))
        reshard(model)
    return history


@contextmanager
def _masked(layers: Sequence[Layer], masks: Masks) -> Iterator[None]:
    """Hold masked weights at zero inside a context, without a gradient; at its end they are set to zero for good."""
    parameters = {each.name: each.parameter for each in layers}
    for each in layers:
        attach(each, Decision(dense(each.weight), kept=masks[each.name]), "fixed")
    try:
        yield
    finally:
        for each in layers:
            detach(each.module)
            _zero(parameters[each.name], each.stored(masks[each.name]))


@torch.no_grad()
def _zero(parameter: nn.Parameter, kept: Tensor) -> None:
    """Set pruned weights of a parameter, or of this rank's shard of it, to zero."""
    local, here = parameter.detach(), kept.to(parameter.device)
    if isinstance(local, DTensor):
        shard = distribute_tensor(here, local.device_mesh, local.placements, src_data_rank=None)
        assert isinstance(shard, DTensor)
        local, here = local.to_local(), shard.to_local()
    local.masked_fill_(~here, 0.0)
