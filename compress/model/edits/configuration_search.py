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
Fact = tuple[str, str]  # (parameter, "") for its shape, or (module, attribute)
Mismatch = dict[Fact, tuple[Any, Any]]  # {fact: its value in the made model, and in the edited one}
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
    search = _ConfigurationSearch(model, frozenset(unread), pairs)
    lists = () if kept is None else tuple(f for before, _ in pairs for f in _lists(config, before, kept))
    start = (*known, *lists)
    if like is not None:
        likely = (*start, *_differences(config, like.config, start))
        if search.mismatch(likely) == {}:
            return search.write(likely)
    return search.write(search.solve(start))


def unread_of(prefix: str, coupling: Coupling) -> list[tuple[str, str]]:
    """`Coupling.unread` of the block named `prefix`, with the full names of its modules."""
    return [(".".join(filter(None, (prefix, name))), attribute) for name, attribute in coupling.unread]


def facts_of(model: nn.Module) -> dict[Fact, Any]:
    """The facts about a model that its configuration decides: shapes of parameters and plain attributes of modules."""
    facts: dict[Fact, Any] = {(name, ""): tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if not attribute.startswith("_") and attribute not in PASSING and type(value) in PLAIN:
                facts[name, attribute] = value
    return facts


def model_of(model: nn.Module, fields: Fields) -> nn.Module:
    """The model, without values, that transformers makes of the configuration with these numbers."""
    with torch.device("meta"), no_init_weights():
        made: nn.Module = type(model)(_configuration(model, fields))
    split_experts(made, model.state_dict().keys())
    return made


def _configuration(model: nn.Module, fields: Fields) -> PretrainedConfig:
    config: PretrainedConfig = copy.deepcopy(model.config)
    for field in fields:
        setattr(field.owner(config), field.name, as_list(field.value))
    return config


class _ConfigurationSearch:
    """Compares an edited model with those that transformers would make."""

    def __init__(self, model: nn.Module, unread: frozenset[tuple[str, str]], pairs: Collection[Pair]) -> None:
        self.model, self.unread, self.pairs = model, unread, pairs
        self.ours = facts_of(model)
        self.error = ""

    def solve(self, start: Fields) -> Fields:
        """Fields, among them those of the start, of a configuration that describes the model. A beam search: each step
        changes one more number, so that fewer facts differ."""
        states = {start: self.mismatch(start)}
        for step in range(MOST_FIELDS + 1):
            fields, mismatch = next(iter(states.items()))
            if mismatch == {}:
                return fields
            after: dict[Fields, Mismatch] = {}
            for fields, mismatch in states.items() if step < MOST_FIELDS else ():
                for move in _moves(self.model.config, fields, mismatch, self.pairs):
                    moved, remaining = self.extend(fields, move, mismatch)
                    if remaining is not None and (mismatch is None or len(remaining) < len(mismatch)):
                        after[moved] = remaining
            if not after:
                break
            states = {each: after[each] for each in sorted(after, key=lambda each: len(after[each]))[:STATES]}
        raise InputError(self.refusal(self.mismatch(start)))

    def mismatch(self, fields: Fields) -> Mismatch | None:
        """The facts that differ with these numbers; None where no model can be made."""
        try:
            theirs = facts_of(model_of(self.model, fields))
        except Exception as error:  # noqa: BLE001 - the class may refuse the configuration with any error
            self.error = f"{type(error).__name__}: {first_line(error)}"
            return None
        keys = (self.ours.keys() | theirs.keys()) - self.unread
        return {k: (theirs.get(k), self.ours.get(k)) for k in keys if theirs.get(k) != self.ours.get(k)}

    def extend(self, fields: Fields, move: Field, before: Mismatch | None) -> tuple[Fields, Mismatch | None]:
        """(Fields with one more, what differs then). A number that followed from the changed one, and that the class
        also reads from the configuration (the size of a head), keeps its value, if the move changes what differed."""
        moved = (*fields, move)
        after = self.mismatch(moved)
        if before and after is not None and before.items() <= after.items():
            return moved, after
        followed = {a: own for (name, a), (_, own) in (after or {}).items() if (name, a) not in (before or {})}
        for pin in _unnamed(self.model.config, followed):
            pinned = self.mismatch((*moved, pin))
            if after is not None and pinned is not None and len(pinned) < len(after):
                moved, after = (*moved, pin), pinned
        return moved, after

    def write(self, fields: Fields) -> Applied:
        """Change the model's configuration, and the copies of its numbers in the modules. Raises InputError where the
        configuration's class would not read the result from a file."""
        self.check_readable(fields)
        theirs, modules = facts_of(model_of(self.model, fields)), dict(self.model.named_modules())
        with changing() as done:
            for name, attribute in sorted(self.unread & theirs.keys()):
                if self.ours[name, attribute] != theirs[name, attribute]:
                    done.append(change(modules[name], attribute, theirs[name, attribute]))
            for field in fields:
                owner = field.owner(self.model.config)
                if not hasattr(owner, field.name):
                    setattr(owner, field.name, None)
                done.append(change(owner, field.name, as_list(field.value)))
        return Applied(tuple(done))

    def check_readable(self, fields: Fields) -> None:
        """Raises InputError for numbers that the class refuses when it reads them. Some classes allow to set numbers
        that they refuse to read: heads that do not divide the hidden size."""
        config = _configuration(self.model, fields)
        try:
            type(config).from_dict(config.to_dict())
        except Exception as error:  # noqa: BLE001 - with any error here, transformers would not load the model
            numbers = ", ".join(f"{field.name} {as_list(field.value)}" for field in fields)
            why = first_line(error.__cause__ or error).rstrip(".")
            raise InputError(f"{type(config).__name__} takes no {numbers}: {why}; give another share") from None

    def refusal(self, mismatch: Mismatch | None) -> str:
        """The message for no configuration, with one difference to the model that the present one would make."""
        start = f"no configuration of {type(self.model).__name__} describes the edited model"
        if not mismatch:
            return f"{start} ({self.error}); leave this edit out"
        (name, attribute), (theirs, own) = min(mismatch.items(), key=lambda each: (each[0][1] != "", each[0]))
        what = f"{name}.{attribute}" if attribute else f"the shape of {name}"
        return (
            f"{start}: {what} is {own}, and would be {theirs}; cut every block alike, in heads and channels that the "
            "configuration counts"
        )


def as_list(value: Any) -> Any:
    """A field's value as the configuration holds it: a list in the place of a tuple."""
    return list(value) if isinstance(value, tuple) else value


def configs_of(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, configuration) of a configuration and of all nested ones."""
    yield path, config
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            yield from configs_of(value, (*path, name))


def _numbers(config: Any) -> Iterator[tuple[tuple[str, ...], str, Any]]:
    """(Path, name, value) of everything in a configuration and the nested ones."""
    for path, owner in configs_of(config):
        yield from ((path, name, value) for name, value in vars(owner).items())


def _lists(config: Any, count: int, kept: Sequence[int]) -> Fields:
    """Fields for lists with one element per block, cut to the kept blocks. Lists of tokens or class names of the same
    length are left out."""
    return tuple(
        Field(path, name, tuple(value[i] for i in kept))
        for path, name, value in _numbers(config)
        if isinstance(value, list) and len(value) == count and "token" not in name and name != "architectures"
    )


def _differences(config: Any, other: Any, taken: Fields) -> Fields:
    """Fields for the numbers of another configuration that differ from this one's, except those in `taken`."""
    ours, places = {each[:2]: each[2] for each in _numbers(config)}, {(field.path, field.name) for field in taken}
    return tuple(
        Field(path, name, value)
        for path, name, value in _numbers(other)
        if type(value) is int and (path, name) not in places and value != ours.get((path, name))
    )


def _moves(config: Any, fields: Fields, mismatch: Mismatch | None, pairs: Collection[Pair]) -> Iterator[Field]:
    """Candidates for the next change: numbers that equal or are in ratio to one that differs, and missing numbers."""
    wanted = dict.fromkeys(pairs)
    named: dict[str, Any] = {}
    for (_, attribute), (theirs, own) in (mismatch or {}).items():
        sizes = zip(theirs, own, strict=False) if type(theirs) is type(own) is tuple else [(theirs, own)]
        wanted |= dict.fromkeys((a, b) for a, b in sizes if type(a) is type(b) is int and a != b and a > 0)
        named[attribute] = own
    taken = {(field.path, field.name) for field in fields}
    moves: dict[Field, None] = {}
    for path, name, value in _numbers(config):
        if name.startswith("_") or (path, name) in taken:
            continue
        for before, after in wanted:
            if value is None:
                moves[Field(path, name, after)] = None
            elif type(value) is int and value > 1 and value * after % before == 0 and value * after:
                moves[Field(path, name, value * after // before)] = None
    yield from moves
    yield from (field for field in _unnamed(config, named) if field not in moves)


def _unnamed(config: Any, named: Mapping[str, Any]) -> Iterator[Field]:
    """Fields for those attributes of modules that are whole numbers, and that a configuration does not have."""
    for path, owner in configs_of(config):
        lacking = (name for name, value in named.items() if name and type(value) is int)
        yield from (Field(path, name, named[name]) for name in lacking if getattr(owner, name, None) is None)
