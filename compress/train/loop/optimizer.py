"""AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101) over weights and scales, its rates, and the length of gradients.

Weights may be FSDP's shards. Scales, and an objective's own parameters, are whole on every rank: their gradients are
summed over the ranks here, as FSDP sums those of the weights.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compress.base.collectives import Comm
from compress.train.inputs.fsdp_shards import copies
from compress.train.options import TrainingOptions

BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class Learned:
    """Trained parameters by kind, with the names under which checkpoints store them."""

    weights: dict[str, nn.Parameter]
    scales: dict[str, nn.Parameter]

    @property
    def all(self) -> dict[str, nn.Parameter]:
        return {**self.weights, **self.scales}


def optimizer(learned: Learned, options: TrainingOptions) -> torch.optim.AdamW:
    """AdamW over `parameter_groups`, of which `set_rates` sets the rates at every step."""
    groups = parameter_groups(learned, options.learning_rate, options.scale_rate, options.weight_decay)
    return torch.optim.AdamW([{**g, "rate": g["lr"]} for g in groups], lr=options.learning_rate, betas=BETAS)


def parameter_groups(
    learned: Learned, learning_rate: float, scale_rate: float, weight_decay: float
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: matrices decay, parameters of one dimension do not; scales have their own
    rate."""
    matrices = [p for p in learned.weights.values() if p.ndim > 1]
    vectors = [p for p in learned.weights.values() if p.ndim <= 1]
    return [
        {"params": params, "weight_decay": decay, "lr": rate}
        for params, decay, rate in (
            (matrices, weight_decay, learning_rate),
            (vectors, 0.0, learning_rate),
            (list(learned.scales.values()), 0.0, scale_rate),
        )
        if params
    ]


def set_learning_rate(adamw: torch.optim.AdamW, learned: Learned, learning_rate: float) -> None:
    """Set the highest rate of weights; scales keep theirs."""
    weights = {id(p) for p in learned.weights.values()}
    for group in adamw.param_groups:
        if id(group["params"][0]) in weights:
            group["rate"] = learning_rate


def share_of_rate(step: int, options: TrainingOptions) -> float:
    """The factor of the rates at a step, counted from 0: rising during the warmup, then falling by the schedule."""
    rising = round(options.warmup * options.steps)
    if step < rising:
        return (step + 1) / (rising + 1)
    if options.schedule == "constant":
        return 1.0
    gone = (step - rising) / max(1, options.steps - rising)
    return 1 - gone if options.schedule == "linear" else (1 + math.cos(math.pi * gone)) / 2


def set_rates(adamw: torch.optim.AdamW, step: int, options: TrainingOptions) -> float:
    """Set the rates of a step; returns their share."""
    share = share_of_rate(step, options)
    for group in adamw.param_groups:
        group["lr"] = group["rate"] * share
    return share


def sum_gradients(parameters: Sequence[nn.Parameter], comm: Comm) -> None:
    """Gradients of parameters that are whole on every rank, summed over the ranks; zeros where a rank has none."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    if not comm.active or not parameters:
        return
    for dtype in {p.dtype for p in parameters}:
        some = [p.grad for p in parameters if p.dtype == dtype and p.grad is not None]
        together = comm.all_reduce(torch.cat([g.flatten() for g in some]))
        for gradient, total in zip(some, together.split([g.numel() for g in some]), strict=True):
            gradient.copy_(total.view_as(gradient))


def mean_gradients(parameters: Sequence[nn.Parameter], comm: Comm) -> None:
    """Gradients of parameters that are whole on every rank as means over the ranks, as FSDP makes those of shards."""
    sum_gradients(parameters, comm)
    for parameter in parameters if comm.active else ():
        assert parameter.grad is not None
        parameter.grad /= comm.world


def average_gradients(parameters: Sequence[nn.Parameter], comm: Comm) -> Callable[[], None]:
    """Average the gradients of parameters that are whole on every rank at the end of each backward pass from now on, as
    FSDP does for its shards; returns a function that stops this. Gradients accumulated over several backward passes
    stay means: those of earlier passes are the same on every rank."""
    last = -1

    def ask(_: Tensor) -> None:
        nonlocal last
        task = torch._C._current_graph_task_id()
        if task != last:  # once in a backward pass
            last = task
            torch.autograd.Variable._execution_engine.queue_callback(lambda: mean_gradients(parameters, comm))

    handles = [p.register_post_accumulate_grad_hook(ask) for p in parameters] if comm.active else []

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


def clip(parameters: Sequence[nn.Parameter], longest: float, comm: Comm) -> Tensor:
    """Shorten gradients, of shards and whole ones, that are longer than that together; returns how long they were."""
    if not parameters:
        return torch.zeros((), dtype=torch.float64)
    gradients = [p.grad for p in parameters if p.grad is not None]
    squares = torch.zeros(2, dtype=torch.float64, device=parameters[0].device)  # of whole gradients, of shards
    for gradient in gradients:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        squares[int(isinstance(gradient, DTensor))] += local.double().square().sum() / copies(gradient)
    length = (squares[0] + comm.all_reduce(squares[1])).cpu().sqrt()
    factor = (longest / (length + 1e-6)).clamp(max=1.0)
    if factor < 1:
        for gradient in gradients:
            gradient.mul_(float(factor))
    return length
