"""Finds the configuration of a model whose structure was edited, from which transformers makes the same model again.

By trial: a model is made from a configuration, without memory for its weights (on the meta device). Its parameters must
have the same shapes, and its modules the same plain attributes, as those of the edited one. Numbers of the
configuration are changed one after the other, as long as the differences become fewer: from the number of the made
model to that of the edited one (`intermediate_size` 64 -> 48), or in the same ratio (q: 16 of 32 rows, 4 heads -> 2).
"""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.initialization import no_init_weights

from compress.base.errors import InputError, first_line
from compress.model.edits.changes import Applied, change, changing
from compress.model.edits.keep_channels import Coupling
from compress.model.split_experts import split_experts

PLAIN = (bool, int, float, str, tuple, type(None))
PASSING = ("training", "gradient_checkpointing")  # attributes of a model's use, not of its structure
Facts = dict[tuple[str, str], Any]  # {(parameter or module, "" for its shape or the attribute): value}
Differing = dict[tuple[str, str], tuple[Any, Any]]
Pair = tuple[int, int]
MOST_FIELDS = 4  # most numbers changed together: heads, key-value heads, head size, blocks
STATES = 4  # beam width of the search


@dataclass(frozen=True)
class Field:
    """A new value for a number of a configuration. path: the attributes that lead to a nested configuration."""

    path: tuple[str, ...]
    name: str
    value: Any

    def owner(self, config: Any) -> Any:
        """The (nested) configuration that holds the number."""
        for name in self.path:
            config = getattr(config, name)
        return config


Fields = tuple[Field, ...]


@dataclass(frozen=True)
class Configure:
    """An edit of a whole model: its configuration becomes one that describes it. The fields are those of
    `configure`."""

    unread: Collection[tuple[str, str]] = ()
    pairs: Collection[Pair] = ()
    known: Fields = ()
    like: nn.Module | None = None

    def apply(self, module: nn.Module, stored_dtypes: Mapping[str, torch.dtype] | None = None) -> Applied:
        """`configure` the model."""
        return configure(module, self.unread, self.pairs, known=self.known, like=self.like)


def configure(
    model: nn.Module,
    unread: Collection[tuple[str, str]] = (),
    pairs: Collection[Pair] = (),
    kept: Sequence[int] | None = None,
    known: Fields = (),
    like: nn.Module | None = None,
) -> Applied:
    """Update a model's configuration so that it describes the edited model. Returns the changes; none for a model
    without a configuration.

    unread: (module, attribute) of copies of the configuration's numbers that may be out of date (`unread_of`).
    pairs: (before, after) counts that no shape shows, of blocks. kept: indices of the blocks that are left, of the
    counts in `pairs`; lists of the configuration with one element per block are cut. known: fields with given values.
    like: a model that was edited in the same way, whose numbers are tried first. Raises InputError where no
    configuration is found.
    """
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        return Applied(())
    search = _ConfigurationSearch(model, frozenset(unread))
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
                moved, found = search.moved(fields, move, differing)
                if found is not None and (differing is None or len(found) < len(differing)):
                    tried[moved] = found
        best = sorted(tried, key=lambda each: len(tried[each]))[:STATES]
        if not best:
            break
        states = {each: tried[each] for each in best}
    fields, differing = next(iter(states.items()))
    if differing is not None and not differing:
        return search.written(fields)
    raise InputError(search.refusal(search.differing(start)))


def unread_of(prefix: str, coupling: Coupling) -> list[tuple[str, str]]:
    """`Coupling.unread` of the block named `prefix`, with the full names of its modules."""
    return [(".".join(filter(None, (prefix, name))), attribute) for name, attribute in coupling.unread]


def facts_of(model: nn.Module) -> Facts:
    """The facts about a model that its configuration decides: shapes of parameters and plain attributes of modules."""
    found: Facts = {(name, ""): tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if not attribute.startswith("_") and attribute not in PASSING and type(value) in PLAIN:
                found[name, attribute] = value
    return found


class _ConfigurationSearch:
    """Compares an edited model with those that transformers would make."""

    def __init__(self, model: nn.Module, unread: frozenset[tuple[str, str]]) -> None:
        self.model, self.unread = model, unread
        self.ours = facts_of(model)
        self.names = model.state_dict().keys()
        self.said = ""

    def made(self, fields: Fields) -> nn.Module:
        """The model, without weights, of the configuration with these numbers."""
        with torch.device("meta"), no_init_weights():
            made = type(self.model)(self.configuration(fields))
        split_experts(made, self.names)
        return made

    def configuration(self, fields: Fields) -> PretrainedConfig:
        """A copy of the model's configuration with these numbers."""
        config = copy.deepcopy(self.model.config)
        for field in fields:
            setattr(field.owner(config), field.name, listed(field.value))
        return config

    def differing(self, fields: Fields) -> Differing | None:
        """{fact that differs: (in the made model, in ours)}; None where no model can be made."""
        try:
            made = facts_of(self.made(fields))
        except Exception as error:  # noqa: BLE001 - the class may refuse the configuration with any error
            self.said = f"{type(error).__name__}: {first_line(error)}"
            return None
        keys = (self.ours.keys() | made.keys()) - self.unread
        return {k: (made.get(k), self.ours.get(k)) for k in keys if made.get(k) != self.ours.get(k)}

    def moved(self, fields: Fields, move: Field, before: Differing | None) -> tuple[Fields, Differing | None]:
        """(Fields with one more, what differs then). A number that followed from the changed one, and that the class
        also reads from the configuration (the size of a head), keeps its value, if the move changes what differed."""
        moved = (*fields, move)
        found = self.differing(moved)
        if before and found is not None and before.items() <= found.items():
            return moved, found
        followed = {a: own for (name, a), (_, own) in (found or {}).items() if (name, a) not in (before or {})}
        for pin in _unnamed(self.model.config, followed):
            pinned = self.differing((*moved, pin))
            if found is not None and pinned is not None and len(pinned) < len(found):
                moved, found = (*moved, pin), pinned
        return moved, found

    def written(self, fields: Fields) -> Applied:
        """Change the model's configuration, and the copies of its numbers in the modules. Raises InputError where the
        configuration's class would not read the result from a file."""
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
        """Raises InputError for numbers that the class refuses when it reads them. Some classes allow to set numbers
        that they refuse to read: heads that do not divide the hidden size."""
        config = self.configuration(fields)
        try:
            type(config).from_dict(config.to_dict())
        except Exception as error:  # noqa: BLE001 - with any error here, transformers would not load the model
            said = ", ".join(f"{field.name} {listed(field.value)}" for field in fields)
            why = first_line(error.__cause__ or error).rstrip(".")
            raise InputError(f"{type(config).__name__} takes no {said}: {why}; give another share") from None

    def refusal(self, differing: Differing | None) -> str:
        """The message for no configuration, with one difference to the model that the present one would make."""
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
    """A field's value as the configuration holds it: a list in the place of a tuple."""
    return list(value) if isinstance(value, tuple) else value


def configs_of(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, configuration) of a configuration and of all nested ones."""
    yield path, config
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            yield from configs_of(value, (*path, name))


def _lists(config: Any, count: int, kept: Sequence[int]) -> Fields:
    """Fields for lists with one element per block, cut to the kept blocks. Lists of tokens or class names of the same
    length are left out."""
    return tuple(
        Field(path, name, tuple(value[i] for i in kept))
        for path, owner in configs_of(config)
        for name, value in vars(owner).items()
        if isinstance(value, list) and len(value) == count and "token" not in name and name != "architectures"
    )


def _between(config: Any, other: Any, taken: Fields) -> Fields:
    """Fields for the numbers of another configuration that differ from this one's, except those in `taken`."""
    owners, places = dict(configs_of(config)), {(field.path, field.name) for field in taken}
    return tuple(
        Field(path, name, value)
        for path, owner in configs_of(other)
        for name, value in vars(owner).items()
        if type(value) is int and (path, name) not in places and value != getattr(owners[path], name, None)
    )


def _moves(config: Any, fields: Fields, differing: Differing | None, pairs: Collection[Pair]) -> Iterator[Field]:
    """Candidates for the next change: numbers that equal or are in ratio to one that differs, and missing numbers."""
    wanted = dict.fromkeys(pairs)
    named: dict[str, Any] = {}
    for (_, attribute), (made, own) in (differing or {}).items():
        sizes = zip(made, own, strict=False) if type(made) is type(own) is tuple else [(made, own)]
        wanted |= dict.fromkeys((a, b) for a, b in sizes if type(a) is type(b) is int and a != b and a > 0)
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
    yield from found
    yield from (field for field in _unnamed(config, named) if field not in found)


def _unnamed(config: Any, named: Mapping[str, Any]) -> Iterator[Field]:
    """Fields for those attributes of modules that are whole numbers, and that a configuration does not have."""
    for path, owner in configs_of(config):
        lacking = (name for name, value in named.items() if name and type(value) is int)
        yield from (Field(path, name, named[name]) for name in lacking if getattr(owner, name, None) is None)
