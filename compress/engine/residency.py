"""Residency of a block's weights: their home while the block is closed, plain full tensors while it is open.

    with residency.open(block) as opened:     # every parameter: a full tensor on the device, in the compute dtype
        opened.stored()                       # (name, value to write), in the dtype the model stores
    # edits were kept if `keep`, dropped otherwise; the block is back home

`Local`: the parameters sit in RAM or in a lazily mapped file, or are made of codes in files (`model.deferred`).
`Sharded`: FSDP2 shards, one per rank; opening gathers one block and nothing else, and of experts that ranks share out
nothing: each opens its own. Code under `open` cannot tell which.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.weak import WeakTensorKeyDictionary

from compress.base.errors import InputError
from compress.model.deferred import at_home, fill
from compress.model.experts import Expert, apart_in, by_rank
from compress.model.layers import Stack
from compress.model.open_block import Opened
from compress.train.inputs.fsdp_shards import reshard

Stores = MutableMapping[Tensor, torch.dtype]


@contextmanager
def _working_copies(
    block: nn.Module,
    named: dict[str, nn.Parameter],
    buffers: list[tuple[nn.Module, str, Tensor]],
    stores: Mapping[str, torch.dtype],
    device: torch.device,
    dtype: torch.dtype | None,
) -> Iterator[Opened]:
    """Swap every parameter's data for a copy on the device in the compute dtype: those of experts that are apart, when
    these compute."""
    inside = set(named.values())
    experts = {p: expert for p, expert in apart_in(block).items() if p in inside}
    home = {name: at_home(parameter) for name, parameter in named.items()}
    opened = Opened(block, home, stores, device, dtype, experts)
    try:
        for parameter in inside - experts.keys():
            opened.take(parameter)
        for expert in set(experts.values()):
            expert.opening = partial(opened.expert, expert)
        for module, name, buffer in buffers:
            module._buffers[name] = buffer.to(device)
        yield opened
    finally:
        for expert in set(experts.values()):
            expert.opening = Expert.opening
        for name, parameter in named.items():
            parameter.data = home[name].data
        for module, name, buffer in buffers:
            module._buffers[name] = buffer


def _parameters(block: nn.Module, excluded: set[nn.Module]) -> dict[str, nn.Parameter]:
    """Those of a block that are not excluded, nor on another rank alone."""
    inside = {id(p) for module in excluded for p in module.parameters()}
    return {name: p for name, p in block.named_parameters() if id(p) not in inside and not p.is_meta}


def _buffers(block: nn.Module, excluded: set[nn.Module]) -> list[tuple[nn.Module, str, Tensor]]:
    skipped = {m for module in excluded for m in module.modules()}
    return [
        (m, name, b) for m in block.modules() if m not in skipped for name, b in m._buffers.items() if b is not None
    ]


def is_narrow(parameter: nn.Parameter) -> bool:
    """True if a parameter has too few bits to be trained: a step is often smaller than the distance of two numbers."""
    return parameter.is_floating_point() and parameter.dtype.itemsize < torch.float32.itemsize


class Local:
    """One process holds the model. keep=False leaves the model untouched: edits live only while a block is open.
    stores: the dtypes in which the model stores parameters that have been widened to be trained."""

    def __init__(self, device: torch.device, dtype: torch.dtype | None = None, keep: bool = True) -> None:
        self.device, self.dtype, self.keep = device, dtype, keep
        self.stores: Stores = WeakTensorKeyDictionary()  # parameters that are sharded meanwhile may go

    def widen(self, model: nn.Module) -> Callable[[], None]:
        """Move the model to the device, and leave it no parameters of fewer than 32 bits; returns what gives them their
        devices and dtypes back. Not while a block is open."""
        self.stores.update((p, p.dtype) for p in model.parameters() if is_narrow(p))
        # By name: what is sharded meanwhile has other parameters, and these ones may go.
        before = {name: (p.device, p.dtype) for name, p in model.named_parameters()}
        buffers = [(module, name, buffer.device) for module, name, buffer in _buffers(model, set())]
        for p in model.parameters():
            # A copy: what was there before is changed by nobody (`engine.restore`), and training changes in place.
            p.data = p.data.to(self.device, torch.float32 if is_narrow(p) else p.dtype, copy=True)
        for module, name, _ in buffers:
            module._buffers[name] = module._buffers[name].to(self.device)  # type: ignore[union-attr]

        def back() -> None:
            for name, p in model.named_parameters():
                if name in before and not isinstance(p, DTensor):
                    p.data = p.data.to(*before[name])
            for module, name, device in buffers:
                module._buffers[name] = module._buffers[name].to(device)  # type: ignore[union-attr]

        return back

    @contextmanager
    def open(
        self, block: nn.Module, excluded: set[nn.Module] | None = None, keep: bool | None = None
    ) -> Iterator[Opened]:
        """Working copies of the block's parameters, without those of the `excluded` modules inside it, which are then
        read-only. keep: whether edits are kept, where that is not as said above."""
        keep = self.keep and excluded is None if keep is None else keep
        named = _parameters(block, excluded or set())
        copies: dict[str, Tensor] = {}
        stores = {name: self.stores[p] for name, p in named.items() if p in self.stores}
        buffers = _buffers(block, excluded or set())
        with _working_copies(block, named, buffers, stores, self.device, self.dtype) as opened:
            yield opened
            if keep:
                copies = {name: opened.value(name, p).to(opened.home[name].device) for name, p in named.items()}
        for name, value in copies.items():
            named[name].data = value


class Sharded:
    """A model under `fully_shard` (FSDP2), by `shard` below or by whoever trained it. Edits are always kept."""

    keep = True

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        dtype: torch.dtype | None = None,
        stores: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        """stores: by name, the dtypes in which the model stores parameters that have been widened to be trained."""
        if not isinstance(model, FSDPModule):
            raise InputError(f"{type(model).__name__} is not sharded; call fully_shard on its blocks and on it first")
        self.require()
        self.model, self.device, self.dtype = model, device, dtype
        named = dict(model.named_parameters())
        self.stores: Stores = WeakTensorKeyDictionary()
        self.stores.update((named[name], stored) for name, stored in (stores or {}).items())

    def widen(self, model: nn.Module) -> Callable[[], None]:
        """Check that the model was widened before it was sharded. Raises InputError otherwise."""
        narrow = next((name for name, p in model.named_parameters() if is_narrow(p)), None)
        if narrow is not None:
            raise InputError(f"{narrow} has 16 bits, and training needs 32: call model.float() before fully_shard")
        reshard(model)
        return lambda: None

    @staticmethod
    def require() -> None:
        """Raise InputError where this torch cannot run sharded."""
        if not hasattr(FSDPModule, "reset_iter_state"):
            raise InputError(f"sharded runs need torch >= 2.13; this is {torch.__version__}: run without --fsdp")

    @contextmanager
    def open(
        self, block: nn.Module, excluded: set[nn.Module] | None = None, keep: bool | None = None
    ) -> Iterator[Opened]:
        """Gather the block's units, yield working copies, write this rank's slice of every edit back, reshard."""
        keep = excluded is None if keep is None else keep
        skipped = {m for module in excluded or set() for m in module.modules()}
        units = [m for m in block.modules() if isinstance(m, FSDPModule) and m not in skipped]
        if not units:
            raise InputError(f"{type(block).__name__} is no FSDP unit; call fully_shard on every block, then the model")
        shards = {name: p for name, p in _parameters(block, excluded or set()).items() if isinstance(p, DTensor)}
        for unit in units:
            unit.unshard()
        try:
            named = _parameters(block, excluded or set())
            if any(shards[name].dtype != named[name].dtype for name in shards):
                raise InputError(
                    "the model is sharded with a mixed-precision policy, which hides its full weights: "
                    "call fully_shard without MixedPrecisionPolicy(param_dtype=...)"
                )
            buffers = _buffers(block, excluded or set())
            stores = {name: self.stores[p] for name, p in shards.items() if p in self.stores}
            how = block, named, buffers, stores, self.device, self.dtype
            with _without_fsdp_hooks(units), _working_copies(*how) as opened:
                yield opened
                if keep:
                    with torch.no_grad():
                        for name, shard in shards.items():
                            value = opened.value(name, named[name]).to(shard.device)
                            # The local slice only: every rank holds the full value, nothing is sent.
                            mine = distribute_tensor(value, shard.device_mesh, shard.placements, src_data_rank=None)
                            shard.to_local().copy_(mine.to_local())
        finally:
            for unit in units:
                unit.reshard()


# The contract of both is in `tests/contracts/test_residency.py` and `tests/engine/ranks/test_sharded.py`.
Residency = Local | Sharded


@contextmanager
def widened(residency: Residency, model: nn.Module) -> Iterator[None]:
    """Makes a model trainable inside the context: on the device, in 32 bits. Restores devices and dtypes after it."""
    back = residency.widen(model)
    try:
        yield
    finally:
        back()


def _is_fsdp_hook(hook: object) -> bool:
    owner = getattr(hook, "__self__", None) or getattr(getattr(hook, "__wrapped__", None), "__self__", None)
    return type(owner).__module__.startswith("torch.distributed.fsdp")


@contextmanager
def _without_fsdp_hooks(units: Sequence[FSDPModule]) -> Iterator[None]:
    """Run the units as plain modules: FSDP's hooks would reshard them after the first of several suspended forwards,
    and a forward that is stopped half-way would leave FSDP's state behind (later training is then silently wrong)."""
    removed: list[tuple[dict[int, Any], dict[int, Any]]] = []
    for unit in units:
        assert isinstance(unit, nn.Module)
        for hooks in (unit._forward_pre_hooks, unit._forward_hooks):
            of_fsdp = {key: hook for key, hook in hooks.items() if _is_fsdp_hook(hook)}
            assert of_fsdp, "FSDP's hooks are where this torch version keeps them"
            for key in of_fsdp:
                del hooks[key]
            removed.append((hooks, of_fsdp))
    try:
        yield
    finally:
        for hooks, of_fsdp in removed:
            others = dict(hooks)
            hooks.clear()
            hooks.update(of_fsdp)
            hooks.update(others)


def shard(model: nn.Module, stacks: list[Stack], mesh: DeviceMesh) -> nn.Module:
    """Apply FSDP2: every block is a unit, what is left is the root's. Each rank keeps 1/world of every parameter, of
    experts that ranks share out (`model.experts.share_experts`) all of its own."""
    whole = by_rank(model)
    for stack in stacks:
        for _, block in stack.blocks:
            if block is not model:
                fill(block.parameters(), without=whole)
                fully_shard(block, mesh=mesh, ignored_params=whole)
    fill(model.parameters(), without=whole)
    fully_shard(model, mesh=mesh, ignored_params=whole)
    return model
