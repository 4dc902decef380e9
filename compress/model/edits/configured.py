"""The configuration of a model whose structure was edited: what it must say for transformers to make that model again.

Found by trying: a model made from a configuration without memory for its weights (on the meta device) must have
parameters of the same shapes, and modules with the same plain attributes, as the edited one. Numbers of the
configuration are changed, one after the other, as long as fewer things differ: from what the made model has to what
the edited one has (`intermediate_size` 64 -> 48), or in the same ratio (q has 16 of 32 rows: 4 heads -> 2).
"""

import copy
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.initialization import no_init_weights

from compress.errors import InputError, first_line
from compress.model.edits.changes import Applied, change, changing
from compress.model.edits.keep import Coupling

PLAIN = (bool, int, float, str, tuple, type(None))
PASSING = ("training", "gradient_checkpointing")  # attributes that say how a model is used, not what it is
Facts = dict[tuple[str, str], Any]  # {(parameter or module, "" for its shape or the attribute): value}
Differing = dict[tuple[str, str], tuple[Any, Any]]
Pair = tuple[int, int]
MOST_FIELDS = 4  # numbers of a configuration that are changed together: heads, key-value heads, head size, blocks
STATES = 4  # of the search, that are followed at a time


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


Fields = tuple[Field, ...]


def configure(
    model: nn.Module,
    unread: Collection[tuple[str, str]] = (),
    pairs: Collection[Pair] = (),
    kept: Sequence[int] | None = None,
    known: Fields = (),
    like: nn.Module | None = None,
) -> Applied:
    """Make a model's configuration say what the model is now. Nothing happens for a model without one.

    unread: (module, attribute) of copies of the configuration's numbers that may be out of date (`unread_of`).
    pairs: numbers (before, after) that no shape shows, of blocks. kept: which blocks of how many (pairs) are left;
    lists of the configuration with an element for each are cut. known: numbers that are to be so, whatever others are.
    like: a model that was edited in the same way; what its configuration says is tried before anything else.
    Raises InputError where no configuration was found.
    """
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        return Applied(())
    search = _Search(model, frozenset(unread))
    lists = () if kept is None else tuple(f for before, _ in pairs for f in _lists(config, before, kept))
    start = (*known, *lists)
    if like is not None and search.differing(likely := (*start, *_between(config, like.config, start))) == {}:
        return search.written(likely)
    states = {start: search.differing(start)}
    for _ in range(MOST_FIELDS):
        fields, differing = next(iter(states.items()))
        if differing is not None and not differing:
            return search.written(fields)
        tried = {}
        for fields, differing in states.items():
            for move in _moves(config, fields, differing, pairs):
                found = search.differing((*fields, move))
                if found is not None and (differing is None or len(found) < len(differing)):
                    tried[(*fields, move)] = found
        best = sorted(tried, key=lambda each: len(tried[each]))[:STATES]
        if not best:
            break
        states = {each: tried[each] for each in best}
    fields, differing = next(iter(states.items()))
    if differing is not None and not differing:
        return search.written(fields)
    raise InputError(search.refusal(search.differing(start)))


def unread_of(prefix: str, coupling: Coupling) -> list[tuple[str, str]]:
    """`Coupling.unread` of a block with the name `prefix`, under the names that its modules have in the model."""
    return [(".".join(filter(None, (prefix, name))), attribute) for name, attribute in coupling.unread]


def facts_of(model: nn.Module) -> Facts:
    """What a configuration decides about a model: shapes and plain attributes."""
    found: Facts = {(name, ""): tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if not attribute.startswith("_") and attribute not in PASSING and type(value) in PLAIN:
                found[name, attribute] = value
    return found


class _Search:
    """Compares an edited model with those that transformers would make."""

    def __init__(self, model: nn.Module, unread: frozenset[tuple[str, str]]) -> None:
        self.model, self.unread = model, unread
        self.ours = facts_of(model)
        self.said = ""

    def made(self, fields: Fields) -> nn.Module:
        """The model of the configuration with these numbers, without weights."""
        with torch.device("meta"), no_init_weights():
            return type(self.model)(self.configuration(fields))

    def configuration(self, fields: Fields) -> PretrainedConfig:
        """The model's, with these numbers."""
        config = copy.deepcopy(self.model.config)
        for field in fields:
            setattr(field.owner(config), field.name, listed(field.value))
        return config

    def differing(self, fields: Fields) -> Differing | None:
        """{what differs: (in the made model, in ours)}; None where no model can be made."""
        try:
            made = facts_of(self.made(fields))
        except Exception as error:  # noqa: BLE001 - a configuration that its class refuses is none
            self.said = f"{type(error).__name__}: {first_line(error)}"
            return None
        keys = (self.ours.keys() | made.keys()) - self.unread
        return {k: (made.get(k), self.ours.get(k)) for k in keys if made.get(k) != self.ours.get(k)}

    def written(self, fields: Fields) -> Applied:
        """Change the model's configuration, and the copies that its modules have of it. Raises InputError where its
        class would not read that from a file."""
        self.check_readable(fields)
        made, modules = facts_of(self.made(fields)), dict(self.model.named_modules())
        with changing() as done:
            for name, attribute in sorted(self.unread & made.keys()):
                if self.ours[name, attribute] != made[name, attribute]:
                    done.append(change(modules[name], attribute, made[name, attribute]))
            for field in fields:
                owner = field.owner(self.model.config)
                if not hasattr(owner, field.name):
                    setattr(owner, field.name, None)
                done.append(change(owner, field.name, listed(field.value)))
        return Applied(tuple(done))

    def check_readable(self, fields: Fields) -> None:
        """Some classes refuse, when they are read, what they let one set: heads that do not divide the hidden size."""
        config = self.configuration(fields)
        try:
            type(config).from_dict(config.to_dict())
        except Exception as error:  # noqa: BLE001 - whatever it says, transformers would not load the model
            said = ", ".join(f"{field.name} {listed(field.value)}" for field in fields)
            why = first_line(error.__cause__ or error).rstrip(".")
            raise InputError(f"{type(config).__name__} takes no {said}: {why}; give another share") from None

    def refusal(self, differing: Differing | None) -> str:
        """Why there is no configuration, with one thing that differs from what today's would make."""
        start = f"no configuration of {type(self.model).__name__} describes the edited model"
        if not differing:
            return f"{start} ({self.said}); leave this edit out"
        (name, attribute), (made, own) = min(differing.items(), key=lambda each: (each[0][1] != "", each[0]))
        what = f"{name}.{attribute}" if attribute else f"the shape of {name}"
        return (
            f"{start}: {what} is {own}, and would be {made}; cut every block alike, in heads and channels that the "
            "configuration counts"
        )


def listed(value: Any) -> Any:
    """A field's value as the configuration has it."""
    return list(value) if isinstance(value, tuple) else value


def configs_of(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, configuration) of a configuration and those inside of it."""
    yield path, config
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            yield from configs_of(value, (*path, name))


def _lists(config: Any, count: int, kept: Sequence[int]) -> Fields:
    """Lists with an element for each block, cut. Those of tokens and classes are about something else."""
    return tuple(
        Field(path, name, tuple(value[i] for i in kept))
        for path, owner in configs_of(config)
        for name, value in vars(owner).items()
        if isinstance(value, list) and len(value) == count and "token" not in name and name != "architectures"
    )


def _between(config: Any, other: Any, taken: Fields) -> Fields:
    """The numbers of another configuration that this one has not, beside those that are taken."""
    owners, places = dict(configs_of(config)), {(field.path, field.name) for field in taken}
    return tuple(
        Field(path, name, value)
        for path, owner in configs_of(other)
        for name, value in vars(owner).items()
        if type(value) is int and (path, name) not in places and value != getattr(owners[path], name, None)
    )


def _moves(config: Any, fields: Fields, differing: Differing | None, pairs: Collection[Pair]) -> Iterator[Field]:
    """Numbers that could be changed: those that are what differs, those that may count it, those that are missing."""
    wanted = dict.fromkeys(pairs)
    named: dict[str, int] = {}
    for (_, attribute), (made, own) in (differing or {}).items():
        sizes = zip(made, own, strict=False) if type(made) is type(own) is tuple else [(made, own)]
        wanted |= dict.fromkeys((a, b) for a, b in sizes if type(a) is type(b) is int and a != b and a > 0)
        if attribute and type(own) is int:
            named[attribute] = own
    taken = {(field.path, field.name) for field in fields}
    found: dict[Field, None] = {}
    for path, owner in configs_of(config):
        for name, value in vars(owner).items():
            if name.startswith("_") or (path, name) in taken:
                continue
            for before, after in wanted:
                if value is None:
                    found[Field(path, name, after)] = None
                elif type(value) is int and value > 1 and value * after % before == 0 and value * after:
                    found[Field(path, name, value * after // before)] = None
        found |= dict.fromkeys(Field(path, n, v) for n, v in named.items() if not hasattr(owner, n))
    yield from found
