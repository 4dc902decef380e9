"""Sites of a block: the layers that read one tensor; and those that it never calls, or calls more than once."""

from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from compress.base.collectives import Comm
from compress.base.errors import CompressError
from compress.engine.plan.batches import running
from compress.engine.walk.products import Products
from compress.model.calls import Call, removing, without_data
from compress.model.experts import Calibration, calibrating
from compress.model.layers import Layer
from compress.model.splitting.recurrent import is_step


@dataclass(frozen=True)
class BlockSites:
    """A block's calls of its layers: sites (names of layers that read one tensor, in call order), and the others.
    again: the sites of layers that are called several times, which read one tensor at every call.

    Convolutions are of one site if they also read the tensor in the same way: the same patches.
    """

    sites: tuple[tuple[str, ...], ...]
    unreached: tuple[str, ...]
    repeated: tuple[str, ...]
    traced: bool
    again: tuple[tuple[str, ...], ...] = ()


def structure_of(block: nn.Module, calls: Sequence[Call], layers: Sequence[Layer]) -> BlockSites:
    """The layers that share an input, by one forward of the first micro-batch on tensors without data.

    A block whose control flow depends on data is run for real instead (traced=False). So is one with layers that no
    module is, on one micro-batch after the other until one has shown two experts of a module: the others are taken to
    come in the order of their indices, in the same way.
    """
    seen, traced = _calls_of_layers(block, calls, layers)
    order: dict[tuple[Any, ...], list[str]] = {}
    counts: dict[str, int] = {}
    # An expert shares its input with other products of its own, at most.
    alike = {
        layer.name: (layer.geometry, None if layer.index is None else (layer.module, layer.index)) for layer in layers
    }
    for name, x, version in seen:
        counts[name] = counts.get(name, 0) + 1
        order.setdefault((id(x), version, alike[name]), []).append(name)
    repeated = {name for name, n in counts.items() if n > 1}
    sites = [tuple(n for n in names if n not in repeated) for names in order.values()]
    if any(layer.index is not None for layer in layers):
        sites, repeated = of_all_experts(sites, repeated, layers)
    reached = repeated.union(*sites)
    places: dict[str, list[int]] = {}
    for place, names in enumerate(order.values()):
        for name in names:
            places.setdefault(name, []).append(place)
    again: dict[tuple[int, ...], list[str]] = {}
    for name in places:
        if name in repeated and alike[name] == (None, None):  # rows of several calls are of one width
            again.setdefault(tuple(places[name]), []).append(name)
    return BlockSites(
        sites=tuple(s for s in sites if s),
        unreached=tuple(layer.name for layer in layers if layer.name not in reached),
        repeated=tuple(sorted(repeated)),
        traced=traced,
        again=tuple(map(tuple, again.values())),
    )


def _calls_of_layers(
    block: nn.Module, calls: Sequence[Call], layers: Sequence[Layer]
) -> tuple[list[tuple[str, Tensor, int]], bool]:
    """`_observe` of a micro-batch, and whether that took no data."""
    call = calls[0]
    if all(layer.is_called for layer in layers):
        try:
            with without_data(block) as mode:
                fake = tree_map(
                    lambda t: mode.from_tensor(t) if isinstance(t, Tensor) else t, (call.args, dict(call.kwargs))
                )
                return _observe(block, fake[0], fake[1], layers), True
        except Exception:  # noqa: BLE001 - whatever tracing cannot do, running can
            with running(call, 0):
                return _observe(block, call.args, call.kwargs, layers), False
    experts = {layer.name: layer for layer in layers if layer.index is not None}
    wanted = {module: min(2, len(of)) for module, of in _indices(experts.values()).items()}
    most: list[tuple[str, Tensor, int]] = []
    for i, each in enumerate(calls):
        with running(each, i):
            most = max(most, _observe(block, each.args, each.kwargs, layers), key=len)
        found = _indices(experts[name] for name, _, _ in most if name in experts)
        if all(len(found.get(module, ())) >= number for module, number in wanted.items()):
            break
    return most, False


def _indices(experts: Iterable[Layer]) -> dict[nn.Module, set[int | None]]:
    """The experts of each module among layers."""
    found: dict[nn.Module, set[int | None]] = {}
    for layer in experts:
        found.setdefault(layer.module, set()).add(layer.index)
    return found


def of_all_experts(
    sites: Sequence[tuple[str, ...]], repeated: set[str], layers: Sequence[Layer]
) -> tuple[list[tuple[str, ...]], set[str]]:
    """Sites and repeated layers of all experts of modules, from those of some of them.

    An expert's products come one after the other, then those of the next; or the products of all experts with one
    parameter come before those with the next.
    """
    experts = {layer.name: layer for layer in layers if layer.index is not None}
    twice = {(experts[name].module, experts[name].key) for name in repeated if name in experts}
    repeated = repeated | {name for name, layer in experts.items() if (layer.module, layer.key) in twice}
    all_sites: list[tuple[str, ...]] = []
    done: set[nn.Module] = set()
    for site in sites:
        if not site or site[0] not in experts:
            all_sites.append(site)
        elif (module := experts[site[0]].module) not in done:
            done.add(module)
            own = [[experts[name] for name in each] for each in sites if each and each[0] in experts]
            own = [each for each in own if each[0].module is module]
            all_sites += _sites_of_experts(own, [layer for layer in experts.values() if layer.module is module])
    return [tuple(name for name in site if name not in repeated) for site in all_sites], repeated


def _sites_of_experts(sites: Sequence[Sequence[Layer]], layers: Sequence[Layer]) -> list[tuple[str, ...]]:
    """The sites of all experts of a module (`layers`) from those of some."""
    names = {(layer.key, layer.index): layer.name for layer in layers}
    kinds = list(dict.fromkeys(tuple(layer.key for layer in site) for site in sites))
    seen = [site[0].index for site in sites]
    indices = list(dict.fromkeys(layer.index for layer in layers))
    one_by_one = 1 + sum(a != b for a, b in pairwise(seen)) == len({*seen})
    places = [(kind, i) for i in indices for kind in kinds] if one_by_one else [(k, i) for k in kinds for i in indices]
    return [tuple(names[key, i] for key in kind if (key, i) in names) for kind, i in places]


def same_on_all_ranks(structure: BlockSites, comm: Comm, by_rank: Collection[str] = ()) -> BlockSites:
    """The structure, which every rank has found, or a CompressError on every rank. by_rank: layers that one rank holds,
    and is alone to find; the structure returned has all of them, in the order in which one process finds them."""
    structures = comm.gather_objects(structure)
    common = [
        replace(
            each,
            sites=tuple(site for site in each.sites if site[0] not in by_rank),
            unreached=tuple(name for name in each.unreached if name not in by_rank),
        )
        for each in structures
    ]
    if any(other != common[0] for other in common):
        raise CompressError(
            "ranks disagree on which layers a block calls (its control flow depends on the data); run it in one process"
        )
    if not by_rank:
        return structure
    waiting = [[*each.sites] for each in structures]
    sites: list[tuple[str, ...]] = []
    for site in (*common[0].sites, ()):
        for own in waiting:
            while own and own[0] != site:
                sites.append(own.pop(0))
            del own[:1]
        sites += [site] if site else []
    unreached = {name: None for each in structures for name in each.unreached}
    return replace(structure, sites=tuple(sites), unreached=tuple(unreached))


def _observe(block: nn.Module, args: Any, kwargs: Any, layers: Sequence[Layer]) -> list[tuple[str, Tensor, int]]:
    """(layer, its input, the input's version) in call order; inputs are kept alive so that identity means something."""
    seen: list[tuple[str, Tensor, int]] = []

    def note(name: str, x: Tensor) -> None:
        if not is_step():
            seen.append((name, x, x._version))

    hooks = [
        layer.module.register_forward_pre_hook(lambda _, a, name=layer.name: note(name, a[0]))
        for layer in layers
        if layer.is_called
    ]
    inside = [layer for layer in layers if not layer.is_called]
    products = Products(inside, lambda layer, x: seen.append((layer.name, x, x._version))) if inside else nullcontext()
    with removing(hooks), torch.no_grad(), products, calibrating(Calibration()):  # every expert is called
        block(*args, **kwargs)
    return seen
