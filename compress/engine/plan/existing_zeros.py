"""Zeros that a model comes with: an earlier command pruned it, and what it rounds or trains now keeps them.

Each layer is judged by its weights (`weights.masks.zeros_of`), and by the record of the earlier command where there is
one. The judgement falls where a block is open (`engine.walk.decide`). Before any work, rows of the layers are looked at
that a pass treats which keeps no zeros.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compress.base.collectives import Comm
from compress.base.errors import CheckpointError, InputError
from compress.checkpoint.files import RECORD
from compress.checkpoint.read.source import Source
from compress.checkpoint.write.manifest import read_record
from compress.checkpoint.write.record import LayerRecord
from compress.engine.plan.plan import Plan
from compress.engine.residency import Residency
from compress.model.deferred import values_of
from compress.model.layers import Layer, find_stacks, layers_of, obstacle
from compress.passes.protocol.base import Pass
from compress.passes.protocol.stages import Restructure
from compress.weights.decision import Decision
from compress.weights.formats.dense import dense
from compress.weights.masks import CAME, OTHERS, Earlier, zeros_in
from compress.weights.rounded_zeros import evidence, explained

# Rows of a layer that are looked at before any work.
LOOKED_AT = 64


def recorded_sparsity(source: Source | None) -> dict[str, float]:
    """{layer: the share of zeros that the record beside a model says it has}."""
    if source is None or not (source.path / RECORD).is_file():
        return {}
    try:
        layers: Sequence[Mapping[str, Any]] = read_record(source.path)["layers"]
    except CheckpointError:
        return {}  # of somebody else, or of nothing: the weights say what there is
    found = {each["name"]: each["figures"].get("sparsity") for each in layers}
    return {name: float(share) for name, share in found.items() if isinstance(share, int | float) and share > 0}


def check_keeps(layers: Iterable[Layer], p: Pass, earlier: Earlier, instead: str = OTHERS) -> None:
    """Raises InputError for a layer with zeros of an earlier pruning, which the pass would give other values. A
    collective of a sharded model."""
    for layer in layers:
        share = earlier.share(layer.name, *_count_zeros(layer, LOOKED_AT))
        if share is not None:
            raise InputError(earlier.problem(layer.name, share, p.name, instead))


def check_plan(plan: Plan, earlier: Earlier) -> None:
    """`check_keeps` of every pass of a plan that keeps no zeros."""
    for p in plan.passes:
        if not p.keeps_zeros:
            check_keeps([layer for layer in plan.all_layers if p.wants(layer.name)], p, earlier)


def check_restructured(model: nn.Module, p: Pass, stage: Restructure, earlier: Earlier) -> None:
    """`check_keeps` of a pass that edits the whole model."""
    if not stage.keeps_zeros:
        blocks = [each for stack in find_stacks(model) for each in stack.blocks]
        layers = [layer for name, block in blocks for layer in layers_of(block, name, convolutions=True)]
        treatable = [layer for layer in layers if obstacle(layer.module) is None]
        check_keeps(treatable, p, earlier, stage.otherwise)


def decisions_on_zeros(plan: Plan, residency: Residency, layers: Sequence[Layer]) -> dict[str, Decision]:
    """Decisions about layers that came with zeros: to be trained without them."""
    masks: dict[str, Tensor] = {}
    names = {layer.name for layer in layers}
    for stack in plan.stacks if plan.earlier.kept else ():
        for name, block in stack.blocks:
            with residency.open(block, keep=False):
                for layer in plan.layers[name]:
                    mask = plan.earlier.mask(layer.name, layer.weight) if layer.name in names else None
                    masks |= {} if mask is None else {layer.name: mask.cpu()}
    return {
        layer.name: Decision(dense(layer.weight), {CAME: 1 - float(mask.double().mean())}, kept=mask)
        for layer in layers
        if (mask := masks.get(layer.name)) is not None
    }


def remark_on_zeros(layers: Sequence[LayerRecord]) -> str | None:
    """A remark about the zeros that layers came with; None where none did."""
    shares = {layer.name: float(layer.figures[CAME]) for layer in layers if CAME in layer.figures}
    if not shares:
        return None
    mean = sum(shares.values()) / len(shares)
    return (
        f"{len(shares)} of {len({layer.name for layer in layers})} layers came pruned, {mean:.1%} of their weights on "
        "average: these stay zero; --drop-zeros (Python: drop_zeros=True) lets go of them"
    )


def _count_zeros(layer: Layer, rows: int) -> tuple[int, int, bool]:
    """(Zeros, weights) in rows that hold anything else, of so many rows; whether a grid explains the zeros. A
    collective of a sharded layer."""
    parameter = values_of(layer.parameter)
    sharded = isinstance(parameter, DTensor)
    weight_NK = _local(layer, parameter) if isinstance(parameter, DTensor) else layer.matrix(parameter)
    wanted = min(rows, len(weight_NK))
    first = torch.arange(wanted) * len(weight_NK) // max(wanted, 1)
    looked_at = weight_NK[first.to(weight_NK.device)]
    counts = torch.cat([torch.tensor(zeros_in(looked_at)), evidence(looked_at).cpu()])
    if sharded:
        counts = Comm().all_reduce(counts.to(parameter.device)).cpu()
    zeros, weights = counts[:2].tolist()
    return zeros, weights, explained(counts[2:])


def _local(layer: Layer, parameter: DTensor) -> Tensor:
    """Rows of a sharded layer's weight that this rank has, as they are stored: shards are parts of the first dimension,
    which for an expert is that of experts."""
    local = parameter.to_local()
    if layer.index is None:
        return local.flatten(1)
    each = -(-len(parameter) // parameter.device_mesh.size())
    place = layer.index - each * parameter.device_mesh.get_local_rank()
    return local[place] if 0 <= place < len(local) else local.new_empty(0, local.shape[-1])
