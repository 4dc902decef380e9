"""Training of a block that is open, towards what the original block returns (`passes.reconstruct`)."""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from compress.base.collectives import Comm
from compress.base.errors import CompressError, InputError
from compress.engine.layer_versions import Versions
from compress.model.calls import Call, hidden_of
from compress.model.layers import Layer
from compress.model.open_block import Opened
from compress.passes.protocol.stages import Reconstruction
from compress.train.inputs.samples import SampleOrder
from compress.train.loop.optimizer import BETAS, sum_gradients
from compress.train.rounding.latents import places_of, start_weight
from compress.train.rounding.quantizers import FixedScales, WeightQuantizer
from compress.train.rounding.swapped_layers import PARTS, decision_after, requiring, rounding
from compress.weights.decision import Decision

NARROW = 4  # bytes: parameters of fewer are widened, and products are of their dtype still


@dataclass(frozen=True)
class ReconstructionTask:
    """A block, the calls that it is given now, and what the original makes of its own, on this rank."""

    block: nn.Module
    calls: Sequence[Call]
    targets: Sequence[Tensor]
    comm: Comm


def reconstruct(
    opened: Opened,
    calls: Sequence[Call],
    reference: Sequence[Call],
    layers: Mapping[str, Layer],
    decisions: Mapping[str, Decision],
    stage: Reconstruction,
    versions: Versions,
    comm: Comm,
) -> dict[str, Decision]:
    """The trained decisions about a block's layers, the same on every rank. figures: `block_loss` and, before training,
    `block_loss_before`, each a share of the mean square of the original block's outputs."""
    with torch.no_grad(), versions.original():
        targets = [_output(opened.block, call) for call in reference]
    task = ReconstructionTask(opened.block, calls, targets, comm)
    # Inputs and outputs are rounded already.
    weights = {name: replace(decision, inputs=None, outputs=None) for name, decision in decisions.items()}
    frozen = requiring(opened.block.parameters(), lambda p: False)
    with frozen, rounding(layers.values(), weights, "anchored") as trained:
        if not stage.rate:
            trained = [layer for layer in trained if isinstance(layer.module._modules[PARTS[0]], WeightQuantizer)]
        if not trained:
            return {}
        for layer in trained:
            quantizer = layer.module._modules[PARTS[0]]
            if not stage.rate and isinstance(quantizer, FixedScales):
                raise InputError(f"{layer.name}: {quantizer.why_fixed}; give reconstruct a rate, by which codes train")
            _start(layer, decisions[layer.name], versions, stage.rate > 0)
        before, after = _train(task, trained, stage)
        figures = {"block_loss": after, "block_loss_before": before}
        reconstructed = {}
        for layer in trained:
            decision = decisions[layer.name]
            weight = decision_after(layer, layer.weight, decision, opened.dtype_of(layer.parameter)).weight
            reconstructed[layer.name] = replace(decision, weight=weight, figures=figures)
        for layer in trained:  # as their block computes
            layer.parameter.data = layer.parameter.data.to(versions.weights[layer.parameter][0].dtype)
        return reconstructed


def _output(block: nn.Module, call: Call) -> Tensor:
    output = block(*call.args, **call.kwargs)
    if call.key is None:  # the model as one block
        output = getattr(output, "logits", output)
    return hidden_of(output)


def _start(layer: Layer, decision: Decision, versions: Versions, learns: bool) -> None:
    """Make the weight of a layer one that can be trained: wide enough, and as close to the original as its codes let
    it."""
    weight = layer.parameter
    original = versions.weights[weight][0]
    weight.data = weight.data.to(torch.promote_types(weight.dtype, torch.float32))
    places = places_of(decision, layer.matrix(original))
    if places is not None:
        weight.data = layer.stored(start_weight(decision, places, weight.dtype)).to(weight.device)
    weight.requires_grad_(learns)


def _groups(layers: Sequence[Layer], stage: Reconstruction) -> list[dict[str, Any]]:
    """The optimizer's groups: each layer's weights, at `stage.rate` steps of its grid, and all scales."""
    groups: list[dict[str, Any]] = []
    scales: list[nn.Parameter] = []
    for layer in layers:
        quantizer = layer.module._modules[PARTS[0]]
        step = 1.0
        if isinstance(quantizer, WeightQuantizer):
            step = float(quantizer.start.abs().mean())
            scales += [p for p in quantizer.parameters() if p.requires_grad]
        if stage.rate:
            groups.append({"params": [layer.parameter], "rate": stage.rate * step})
    return [*groups, *([{"params": scales, "rate": stage.scale_rate}] if scales else [])]


def _train(task: ReconstructionTask, layers: Sequence[Layer], stage: Reconstruction) -> tuple[float, float]:
    """Train; returns the loss before, and that of the best, which the layers have afterwards."""
    comm = task.comm
    groups = _groups(layers, stage)
    parameters = [p for group in groups for p in group["params"]]
    adam = torch.optim.Adam(groups, betas=BETAS)
    first = task.calls[0]
    size = max(comm.gather_objects(1 if first.key is None else len(first.hidden)))  # samples of a micro-batch
    total = sum(comm.gather_objects(len(task.calls)))
    order = SampleOrder(total, max(1, min(total, stage.rows // size)), stage.seed)
    scale = _measure(task)
    before = best = _loss(task, scale)
    best_parameters = [p.detach().clone() for p in parameters]
    every = max(1, math.ceil(stage.steps / stage.checks))
    for step in range(stage.steps):
        for group in adam.param_groups:
            group["lr"] = group["rate"] * (1 - step / stage.steps)
        for index in order.of_step(step):
            if index % comm.world == comm.rank:
                with torch.enable_grad():
                    (_error(task, index // comm.world) / scale).backward()
        sum_gradients(parameters, comm)
        adam.step()
        adam.zero_grad(set_to_none=True)
        if (step + 1) % every == 0 or step + 1 == stage.steps:
            loss = _loss(task, scale)
            if not math.isfinite(loss):
                raise CompressError(f"the loss of a block is {loss} at step {step + 1}; give reconstruct a lower rate")
            if loss < best:
                best, best_parameters = loss, [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for parameter, value in zip(parameters, best_parameters, strict=True):
            parameter.copy_(value)
    return before, best


def _error(task: ReconstructionTask, index: int) -> Tensor:
    """The sum of the squared errors of a call, over the tokens that count."""
    call, target = task.calls[index], task.targets[index]
    narrow = target.dtype.itemsize < NARROW
    with torch.autocast(target.device.type, target.dtype) if narrow else nullcontext():
        returned = _output(task.block, call)
    work = torch.promote_types(target.dtype, torch.float32)
    error = returned.to(work) - target.to(work)
    if call.tokens is not None and error.shape[: call.tokens.ndim] == call.tokens.shape:
        error = error[call.tokens.to(error.device)]
    return error.square().sum()


@torch.no_grad()
def _measure(task: ReconstructionTask) -> float:
    """The sum of squares of what the original returns, on all ranks: by it the loss is divided."""
    squares = [float(target.double().square().sum()) for target in task.targets]
    return max(math.fsum(task.comm.gather_objects(math.fsum(squares))), torch.finfo(torch.float32).tiny)


@torch.no_grad()
def _loss(task: ReconstructionTask, scale: float) -> float:
    """On all calls of all ranks."""
    errors = [float(_error(task, i)) for i in range(len(task.calls))]
    return math.fsum(task.comm.gather_objects(math.fsum(errors))) / scale
