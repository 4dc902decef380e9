"""A block whose parameters are temporarily plain full tensors (`engine.residency`)."""

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from compress.model.tensors import stored_buffers


@dataclass(frozen=True)
class Opened:
    """A block whose parameters are full working copies of those in `home`.

    home: {name inside the block: tensor}, in the dtype in which the model stores it; a model in training holds a wider
    dtype there, and `stores` gives the stored one.
    """

    block: nn.Module
    home: dict[str, Tensor]
    stores: Mapping[str, torch.dtype] = field(default_factory=dict)

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

    def drop(self, parameter: nn.Parameter) -> None:
        """Give up the working copy of a parameter that nothing reads any more: its data are those of `home` again."""
        parameter.data = self.home[self._names[id(parameter)]]

    def value(self, name: str, parameter: nn.Parameter) -> Tensor:
        """The value of a parameter in its stored dtype; that of `home`, unchanged, where the parameter was not
        edited."""
        before = self.home[name]
        if torch.equal(before.to(parameter.device, parameter.dtype), parameter.data):
            return before.to(self.dtypes[name])  # from `home`: never rounded to the compute dtype
        return parameter.data.to(self.dtypes[name])

    def inside(self, module: nn.Module) -> "Opened":
        """The opened part for a module inside the block."""
        inner = {name: self._names[id(p)] for name, p in module.named_parameters()}
        home = {name: self.home[outer] for name, outer in inner.items()}
        return Opened(module, home, {name: self.stores[o] for name, o in inner.items() if o in self.stores})

    def stored(self, without: Container[str] = ()) -> Iterator[tuple[str, Tensor]]:
        """(Name inside the block, value in the stored dtype) of every parameter and persistent buffer, except those in
        `without`."""
        # Not state_dict(): FSDP2 reshards in a hook of it.
        for name, parameter in self.block.named_parameters():
            if name in self.home and name not in without:
                yield name, self.value(name, parameter)
        yield from ((name, buffer) for name, buffer in stored_buffers(self.block) if name not in without)
