"""Removes experts of a mixture: the experts, the rows of the router that choose them, and the numbers that count them.

The router stands next to the experts: the module there whose weight has a row for each. What else has as many entries
as there are experts goes along: a bias of the router, numbers that are added to its scores.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from compress.base.errors import InputError
from compress.model.edits.changes import DATA, Applied, change, changing
from compress.model.experts import Experts


@dataclass(frozen=True)
class KeepExperts:
    """An edit of the module around experts: keeps those of the numbers `kept`, in ascending order. name: of the experts
    in it. told: figures for the record."""

    kind: ClassVar[str] = "keep-experts"

    name: str
    kept: tuple[int, ...]
    told: tuple[tuple[str, Any], ...] = ()

    def apply(self, module: nn.Module, stored_dtypes: Mapping[str, torch.dtype] | None = None) -> Applied:
        """Cut the experts and their router. Raises InputError, before any change, for a module that has no such
        experts, or no router for them."""
        experts = module.get_submodule(self.name)
        count = len(experts.numbers) if isinstance(experts, Experts) else 0
        if not self.kept or list(self.kept) != sorted(set(self.kept)) or not 0 <= self.kept[0] <= self.kept[-1] < count:
            raise InputError(
                f"experts to keep of {self.name}: {list(self.kept)}; it has {count}: give at least one, each once and "
                "in order"
            )
        assert isinstance(experts, Experts)
        routers = routers_of(module, experts)
        if not routers:
            raise InputError(f"there is no router beside {self.name}: no module has a row for each of its experts")
        staying = torch.tensor(self.kept)
        with changing() as done:
            others = {key: value for key, value in experts._modules.items() if not key.isdecimal()}
            kept = {str(new): experts._modules[str(old)] for new, old in enumerate(self.kept)}
            done.append(change(experts, "_modules", {**others, **kept}))
            for owner in (module, experts, *routers):
                for tensor in (*owner.parameters(recurse=False), *owner.buffers(recurse=False)):
                    if tensor.ndim > 0 and len(tensor) == count:
                        cut = tensor.data.index_select(0, staying.to(tensor.device)).contiguous()
                        done.append(change(tensor, DATA, cut))
                for key, value in list(vars(owner).items()):
                    counts = not key.startswith("_") and ("expert" in key or key == "out_features")
                    if counts and type(value) is int and value == count:
                        done.append(change(owner, key, len(self.kept)))
        return Applied(tuple(done))

    def entry(self) -> dict[str, Any]:
        return {"edit": self.kind, "experts": self.name, "kept": list(self.kept), **dict(self.told)}

    def parts(self) -> dict[str, Tensor]:
        return {}


def counts_of(model: nn.Module) -> list[tuple[str, str]]:
    """(Module, attribute) of the numbers that may count experts, also outside of the blocks: a model holds one for a
    loss of its router."""
    return [
        (name, key)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if type(value) is int and not key.startswith("_") and "expert" in key
    ]


def mixtures_of(model: nn.Module) -> Iterator[tuple[str, str, Experts]]:
    """(Name of the module around experts, their name in it, the experts) of all experts of a model."""
    for name, module in model.named_modules():
        if isinstance(module, Experts):
            around, _, own = name.rpartition(".")
            yield around, own, module


def routers_of(around: nn.Module, experts: Experts) -> list[nn.Module]:
    """The modules beside experts that weigh each of them."""
    count = len(experts.numbers)
    beside = [child for child in around.children() if child is not experts]
    weights = [(child, child._parameters.get("weight")) for child in beside]
    return [child for child, weight in weights if weight is not None and weight.ndim == 2 and len(weight) == count]
