"""How a block calls its layers: which of them read one tensor, which are never called, which more than once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from compress.errors import CompressError
from compress.model.calls import Call, without_data
from compress.model.layers import Layer
from compress.run.plan.batches import running
from compress.system.comm import Comm


@dataclass(frozen=True)
class Structure:
    """How a block calls its layers: sites (names of layers that read one tensor, in call order), and the others.

    Convolutions are of one site if they also read the tensor in the same way: the same patches.
    """

    sites: tuple[tuple[str, ...], ...]
    unreached: tuple[str, ...]
    repeated: tuple[str, ...]
    traced: bool


def structure_of(block: nn.Module, call: Call, layers: Sequence[Layer]) -> Structure:
    """Which layers share an input, from one forward on tensors without data.

    A block whose control flow depends on data is run for real on the micro-batch instead (traced=False).
    """
    try:
        with without_data() as mode:
            fake = tree_map(
                lambda t: mode.from_tensor(t) if isinstance(t, Tensor) else t, (call.args, dict(call.kwargs))
            )
            seen = _observe(block, fake[0], fake[1], layers)
        traced = True
    except Exception:  # noqa: BLE001 - whatever tracing cannot do, running can
        with running(call, 0):
            seen = _observe(block, call.args, call.kwargs, layers)
        traced = False
    order: dict[tuple[Any, ...], list[str]] = {}
    counts: dict[str, int] = {}
    geometry = {layer.name: layer.geometry for layer in layers}
    for name, x, version in seen:
        counts[name] = counts.get(name, 0) + 1
        order.setdefault((id(x), version, geometry[name]), []).append(name)
    repeated = {name for name, n in counts.items() if n > 1}
    sites = [tuple(n for n in names if n not in repeated) for names in order.values()]
    return Structure(
        sites=tuple(s for s in sites if s),
        unreached=tuple(layer.name for layer in layers if layer.name not in counts),
        repeated=tuple(sorted(repeated)),
        traced=traced,
    )


def same_on_all_ranks(structure: Structure, comm: Comm) -> Structure:
    """The structure, which every rank has found, or a CompressError on every rank."""
    if any(other != structure for other in comm.gather_objects(structure)):
        raise CompressError(
            "ranks disagree on which layers a block calls (its control flow depends on the data); run it in one process"
        )
    return structure


def _observe(block: nn.Module, args: Any, kwargs: Any, layers: Sequence[Layer]) -> list[tuple[str, Tensor, int]]:
    """(layer, its input, the input's version) in call order; inputs are kept alive so that identity means something."""
    seen: list[tuple[str, Tensor, int]] = []
    hooks = [
        layer.module.register_forward_pre_hook(lambda _, a, name=layer.name: seen.append((name, a[0], a[0]._version)))
        for layer in layers
    ]
    try:
        with torch.no_grad():
            block(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return seen
