"""The configuration of a model whose structure was edited: what it must say for transformers to make that model again.

Found by trying: a model made from a configuration without memory for its weights (on the meta device) must have
parameters of the same shapes, and modules with the same plain attributes, as the edited one. Numbers of the
configuration are changed, one after the other, as long as fewer things differ: from what the made model has to what
the edited one has (`intermediate_size` 64 -> 48), or in the same ratio (q has 16 of 32 rows: 4 heads -> 2).
"""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from compress.errors import InputError, first_line
from compress.model.changes import Applied, Change, change, changing

PLAIN = (bool, int, float, str, tuple, type(None))
PASSING = ("training", "gradient_checkpointing")  # attributes that say how a model is used, not what it is
Facts = dict[tuple[str, str], Any]  # {(parameter or module, "" for its shape or the attribute): value}
Pair = tuple[int, int]


@dataclass(frozen=True)
class Field:
    """A number of a configuration (path: of the configuration inside) and what it is to be."""

    path: tuple[str, ...]
    name: str
    value: Any

    def owner(self, config: Any) -> Any:
        """The configuration that has it."""
        for name in self.path:
            config = getattr(config, name)
        return config


def configure(model: nn.Module, pairs: Collection[Pair] = (), kept: Sequence[int] | None = None) -> Applied:
    """Make a model's configuration say what the model is now. Nothing happens for a model without one.

    pairs: numbers (before, after) that no shape shows, of blocks. kept: which blocks of how many are left (pairs);
    lists of the configuration with an element for each are cut. Raises InputError where no configuration was found.
    """
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        return Applied(())
    ours = facts_of(model)
    fields = [] if kept is None else [f for before, _ in pairs for f in _lists(config, before, kept)]
    differing, said = _differing(model, ours, fields)
    while differing is None or differing:
        best: tuple[int, Field] | None = None
        for moves in _moves(config, fields, differing, pairs):
            for move in moves:
                left, problem = _differing(model, ours, [*fields, move])
                said = said or problem
                if left is not None and (best is None or len(left) < best[0]):
                    best = len(left), move
            if best is not None and (differing is None or best[0] < len(differing)):
                break
        if best is None or (differing is not None and best[0] >= len(differing)):
            raise InputError(_refusal(model, differing, said))
        fields.append(best[1])
        differing, _ = _differing(model, ours, fields)
    return _written(model, config, fields)


def facts_of(model: nn.Module) -> Facts:
    """What a configuration decides about a model: shapes and plain attributes."""
    found: Facts = {(name, ""): tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if not attribute.startswith("_") and attribute not in PASSING and type(value) in PLAIN:
                found[name, attribute] = value
    return found


def _made(model: nn.Module, fields: Sequence[Field]) -> nn.Module:
    """The model that transformers makes of the configuration with these numbers, without weights."""
    config = copy.deepcopy(model.config)
    for field in fields:
        setattr(field.owner(config), field.name, field.value)
    with torch.device("meta"):
        return type(model)(config)


def _differing(model: nn.Module, ours: Facts, fields: Sequence[Field]) -> tuple[dict[Any, Any] | None, str]:
    """({what differs: (in the made model, in ours)}, ""), or (None, why no model can be made)."""
    try:
        made = facts_of(_made(model, fields))
    except Exception as error:  # noqa: BLE001 - a configuration that its class refuses is none
        return None, f"{type(error).__name__}: {first_line(error)}"
    copied = {(getattr(f.owner(model.config), f.name, None), f.value) for f in fields}
    differing = {}
    for key in ours.keys() | made.keys():
        own, other = ours.get(key), made.get(key)
        # A module's copy of a number that nothing reads may be the old one: `_written` mends it.
        if own != other and not (key[1] and (own, other) in copied):
            differing[key] = (other, own)
    return differing, ""


def _configs(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, config
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            yield from _configs(value, (*path, name))


def _lists(config: Any, count: int, kept: Sequence[int]) -> list[Field]:
    """Lists with an element for each block, cut. Those of tokens and classes are about something else."""
    return [
        Field(path, name, [value[i] for i in kept])
        for path, owner in _configs(config)
        for name, value in vars(owner).items()
        if isinstance(value, list) and len(value) == count and "token" not in name and name != "architectures"
    ]


def _moves(
    config: Any, fields: Sequence[Field], differing: Mapping[Any, Any] | None, pairs: Collection[Pair]
) -> Iterator[list[Field]]:
    """Numbers that could be changed, the likeliest first: those that are what differs, those that may count it."""
    wanted = dict.fromkeys(pairs)
    named: dict[str, Any] = {}
    for (_, attribute), (made, own) in (differing or {}).items():
        sizes = zip(made, own, strict=False) if type(made) is type(own) is tuple else [(made, own)]
        wanted |= dict.fromkeys((a, b) for a, b in sizes if type(a) is type(b) is int and a != b and a > 0)
        if attribute and type(own) is int:
            named[attribute] = own
    taken = {(field.path, field.name) for field in fields}
    same, counted = [], []
    for path, owner in _configs(config):
        for name, value in vars(owner).items():
            if name.startswith("_") or (path, name) in taken:
                continue
            for before, after in wanted:
                if value is None or (type(value) is int and value == before):
                    same.append(Field(path, name, after))
                elif type(value) is int and value > 1 and value * after % before == 0 and value * after:
                    counted.append(Field(path, name, value * after // before))
        same += [Field(path, n, v) for n, v in named.items() if not hasattr(owner, n) and (path, n) not in taken]
    yield list(dict.fromkeys(same))
    yield list(dict.fromkeys(counted))


def _written(model: nn.Module, config: Any, fields: Sequence[Field]) -> Applied:
    made = facts_of(_made(model, fields))
    modules = dict(model.named_modules())
    with changing() as done:
        for (name, attribute), own in facts_of(model).items():
            if attribute and made[name, attribute] != own:
                done.append(change(modules[name], attribute, made[name, attribute]))
        for field in fields:
            done.append(_set(field.owner(config), field))
    return Applied(tuple(done))


def _set(owner: Any, field: Field) -> Change:
    if not hasattr(owner, field.name):
        setattr(owner, field.name, None)
    return change(owner, field.name, field.value)


def _refusal(model: nn.Module, differing: Mapping[Any, Any] | None, said: str) -> str:
    kind = type(model).__name__
    if differing is None:
        return f"no configuration of {kind} describes the edited model ({said}); undo the edit, or keep something else"
    (name, attribute), (made, own) = min(differing.items())
    what = f"{name}.{attribute}" if attribute else f"the shape of {name}"
    return (
        f"no configuration of {kind} describes the edited model: {what} is {own}, and would be {made}; cut every block "
        "alike, in heads and channels that its configuration can count"
    )
