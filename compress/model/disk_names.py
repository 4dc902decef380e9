"""Names of a model's tensors in checkpoint files, where these differ from its own.

transformers renames tensors of some architectures while it loads them: `model.layers.0.block_sparse_moe.gate.weight` of
a file is `model.layers.0.mlp.gate.weight` in the model. Other programs know the names of the files alone.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from compress.model.split_experts import loading_steps

if TYPE_CHECKING:
    from transformers.core_model_loading import WeightRenaming


class DiskNames:
    """Names in a model and in files, for tensors of the model and for those that come in their places.

    `mlp.gate.weight_packed` of a file is called after `mlp.gate.weight`: the longest module name in front of it that
    stands for one other name says what it becomes.
    """

    def __init__(self, pairs: Iterable[tuple[str, str]] = ()) -> None:
        """pairs: (name in the model, name in a file) of tensors."""
        known = list(pairs)
        self._written, self._own = _table(known), _table([(file, own) for own, file in known])

    def on_disk(self, name: str) -> str:
        """The name in files of a tensor or module of the model."""
        found = _renamed(self._written, name)
        return found if _renamed(self._own, found) == name else name

    def in_model(self, name: str) -> str:
        """The inverse of `on_disk`."""
        found = _renamed(self._own, name)
        return found if _renamed(self._written, found) == name else name


def _table(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """{name: other name} of tensors and of the modules in front of them, without modules that stand for several."""
    tensors: dict[str, str] = {}
    modules: dict[str, set[str]] = {}
    for name, other in pairs:
        tensors[name] = other
        parts, others = name.split("."), other.split(".")
        while parts[-1] == others[-1] and len(parts) > 1 and len(others) > 1:
            parts, others = parts[:-1], others[:-1]
            modules.setdefault(".".join(parts), set()).add(".".join(others))
    return {**{name: next(iter(found)) for name, found in modules.items() if len(found) == 1}, **tensors}


def _renamed(table: Mapping[str, str], name: str) -> str:
    first, rest = name, ""
    while first not in table:
        first, dot, last = first.rpartition(".")
        if not dot:
            return name
        rest = f".{last}{rest}"
    return table[first] + rest


def disk_names(model: nn.Module, stored: Collection[str] | None = None) -> DiskNames:
    """The names in files of a model's tensors. stored: those of the checkpoint that it was read from; without them, the
    names that transformers writes."""
    steps, known = renamings(model), model.state_dict().keys()
    if not steps:
        return DiskNames()
    if stored is not None:
        files = {*stored, *map(_dense, stored)}
        found = ((name if name in known else _forward(steps, name), name) for name in files)
        return DiskNames((own, file) for own, file in found if own in known)
    back = [step.reverse_transform() for step in reversed(_written(steps))]
    found = ((name, _forward(back, name)) for name in known)
    return DiskNames((own, file) for own, file in found if _forward(steps, file) == own)


def _dense(name: str) -> str:
    """The name that a stored tensor had before its weight was compressed: `a.weight` of `a.weight_packed`."""
    head, dot, last = name.rpartition(".")
    return f"{head}{dot}weight" if last.startswith("weight_") else name


def renamings(model: nn.Module) -> "list[WeightRenaming]":
    """The steps by which transformers renames a checkpoint's tensors for a model."""
    from transformers.core_model_loading import WeightRenaming

    return [step for step in loading_steps(model) if isinstance(step, WeightRenaming)]


def _written(steps: "Sequence[WeightRenaming]") -> "list[WeightRenaming]":
    """The steps that transformers takes back when it saves a model that was read from no checkpoint."""
    from transformers.core_model_loading import PrefixChange

    return [step for step in steps if not isinstance(step, PrefixChange)]


def _forward(steps: "Sequence[WeightRenaming]", name: str) -> str:
    for step in steps:
        name = step.rename_source_key(name)[0]
    return name


def places_in(model: nn.Module) -> Callable[[Collection[str], str], str]:
    """A function (names in the model, name in the checkpoint) -> name in the model (`_place`)."""
    return partial(_place, getattr(model, "base_model_prefix", ""), renamings(model))


def _place(base: str, steps: "Sequence[WeightRenaming]", known: Collection[str], name: str) -> str:
    """The name in a model of the checkpoint's `name`, of a tensor or a module: transformers renames some, and lets a
    base model and one with a head read each other's checkpoints. `name` itself where the model knows no variant of it.
    """
    of_module = _forward(steps, f"{name}.weight").removesuffix(".weight")  # patterns may end in a module's dot
    names = (name, _forward(steps, name), of_module)
    candidates = (f for n in names for f in (n, n.removeprefix(f"{base}."), f"{base}.{n}"))
    return next((found for found in candidates if found in known), name)
