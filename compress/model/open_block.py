"""A block whose parameters are temporarily plain full tensors (`engine.residency`)."""

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from compress.base.memory import give_back
from compress.model.deferred import values_of
from compress.model.experts import Expert
from compress.model.tensors import stored_buffers


@dataclass(frozen=True)
class Opened:
    """A block whose parameters are full working copies of those in `home`.

    home: {name inside the block: tensor}, for `values_of`, in the dtype in which the model stores it; a model in
    training holds a wider dtype there, and `stores` gives the stored one. device, dtype: of working copies; None: as
    they are at home. experts: of parameters that have working copies only while their expert computes; then `on_open`
    and `on_close` are called for each.
    """

    block: nn.Module
    home: Mapping[str, Tensor]
    stores: Mapping[str, torch.dtype] = field(default_factory=dict)
    device: torch.device | None = None
    dtype: torch.dtype | None = None
    experts: Mapping[nn.Parameter, Expert] = field(default_factory=dict)
    on_open: list[Callable[[nn.Parameter], None]] = field(default_factory=list)
    on_close: list[Callable[[nn.Parameter], None]] = field(default_factory=list)
    _inside: Counter[Expert] = field(default_factory=Counter)

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtype in which the model stores each parameter."""
        return {name: self.stores.get(name, value.dtype) for name, value in self.home.items()}

    @cached_property
    def _names(self) -> dict[int, str]:
        return {id(p): name for name, p in self.block.named_parameters() if name in self.home}

    @cached_property
    def _dtype_of(self) -> dict[int, torch.dtype]:
        return {id(p): self.dtypes[name] for name, p in self.block.named_parameters() if name in self.dtypes}

    def dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        """The dtype in which the model stores a parameter of the block."""
        return self._dtype_of[id(parameter)]

    def take(self, parameter: nn.Parameter) -> None:
        """Give a parameter its working copy."""
        values = values_of(self.home[self._names[id(parameter)]])
        dtype = self.dtype if self.dtype is not None and values.is_floating_point() else values.dtype
        parameter.data = values.to(self.device, dtype, copy=True)

    def drop(self, parameter: nn.Parameter) -> None:
        """Give up the working copy of a parameter that nothing reads any more."""
        parameter.data = self.home[self._names[id(parameter)]].data

    def is_open(self, parameter: nn.Parameter) -> bool:
        """True for a parameter with a working copy, unless that was dropped."""
        return parameter not in self.experts or self._inside[self.experts[parameter]] > 0

    @contextmanager
    def expert(self, expert: Expert) -> Iterator[None]:
        """Working copies of an expert of `experts` inside the context, in which several forwards may be at once."""
        first, self._inside[expert] = not self._inside[expert], self._inside[expert] + 1
        try:
            for p in expert.parameters() if first else ():
                self.take(p)
                for call in self.on_open:
                    call(p)
            yield
        finally:
            self._inside[expert] -= 1
            if not self._inside[expert]:
                for p in expert.parameters():
                    self.drop(p)
                    for call in self.on_close:
                        call(p)
                give_back()  # the fragments of hundreds of experts would pile up until the block ends

    def value(self, name: str, parameter: nn.Parameter) -> Tensor:
        """The value of a parameter in its stored dtype; that of `home`, unchanged, where the parameter was not
        edited."""
        before = values_of(self.home[name])
        if not self.is_open(parameter) or torch.equal(before.to(parameter.device, parameter.dtype), parameter.data):
            return before.to(self.dtypes[name])  # from `home`: never rounded to the compute dtype
        return parameter.data.to(self.dtypes[name])

    def inside(self, module: nn.Module) -> "Opened":
        """The opened part for a module inside the block."""
        inner = {name: self._names[id(p)] for name, p in module.named_parameters()}
        home = {name: self.home[outer] for name, outer in inner.items()}
        stores = {name: self.stores[o] for name, o in inner.items() if o in self.stores}
        return Opened(module, home, stores, self.device, self.dtype)

    def stored(self, without: Container[str] = ()) -> Iterator[tuple[str, Tensor]]:
        """(Name inside the block, value in the stored dtype) of every parameter and persistent buffer, except those in
        `without`."""
        # Not state_dict(): FSDP2 reshards in a hook of it.
        for name, parameter in self.block.named_parameters():
            if name in self.home and name not in without:
                yield name, self.value(name, parameter)
        yield from ((name, buffer) for name, buffer in stored_buffers(self.block) if name not in without)
