"""Finds the channels of the hidden state in a whole model, and makes the model with fewer of them.

Found by trial: transformers makes a model from the same configuration with twice the hidden size (on the meta device).
The dimensions that are twice as long either hold these channels, or others that the configuration derives from them:
query rows of hidden / heads each, an MLP of four times the hidden size. The derived ones are known beforehand, since
they are coupled inside a block (`model.structure.couplings`).
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig

from compress.base.errors import InputError, first_line
from compress.model.edits.changes import DATA, Applied, Change, change, changing
from compress.model.edits.configuration_search import Field, configs_of, facts_of, model_of
from compress.model.edits.keep_channels import Coupling, dimension_of, number_of
from compress.model.layers import is_layer

FIELD = "hidden_size"  # its usual name in configurations of transformers; some have another name for it, too
Place = tuple[str, int | str]  # (parameter, dimension), or (module, attribute)


@dataclass(frozen=True)
class Width:
    """The places of the hidden state's channels in a model.

    size: the number of channels. axes: {parameter: its dimensions with the channels}. numbers: (module, attribute) that
    count them. owner: the path to the configuration with the field. also: other fields of the same configuration that
    must be the same number (OPT's word_embed_proj_dim).
    """

    size: int
    axes: Mapping[str, tuple[int, ...]]
    numbers: tuple[tuple[str, str], ...]
    owner: tuple[str, ...] = ()
    field: str = FIELD
    also: tuple[str, ...] = ()

    def configured(self, size: int) -> tuple[Field, ...]:
        """The configuration's fields for `size` channels."""
        return tuple(Field(self.owner, name, size) for name in (self.field, *self.also))

    def inside(self, module: str) -> "Width":
        """The places inside a module of the model."""
        start = f"{module}."
        axes = {name.removeprefix(start): dims for name, dims in self.axes.items() if name.startswith(start)}
        return Width(self.size, axes, tuple(("", name) for owner, name in self.numbers if owner == module))

    def norms(self, model: nn.Module) -> dict[str, nn.Module]:
        """{name: module} of the modules that multiply every channel by a weight."""
        return {
            name: module
            for name, module in model.named_modules()
            if self.axes.get(f"{name}.weight") == (0,) and module.get_parameter("weight").ndim == 1
        }


def taken_by(name: str, block: nn.Module, coupling: Coupling) -> Iterator[Place]:
    """The places that a coupling of a block cuts. name: of the block in the model."""

    def full(inside: str) -> str:
        return ".".join(filter(None, (name, inside)))

    for role, member in coupling.members():
        module = block.get_submodule(member.name)
        if role == "between":
            yield from ((f"{full(member.name)}.{tensor}", 0) for tensor, _ in module.named_parameters(recurse=False))
            yield from (
                (full(member.name), attribute) for attribute, value in vars(module).items() if type(value) is int
            )
            continue
        yield f"{full(member.name)}.weight", dimension_of(module, role)
        yield full(member.name), number_of(module, role)
        if role == "producers":
            yield f"{full(member.name)}.bias", 0
    yield from ((full(number.module), number.attribute) for number in coupling.numbers)
    yield from ((full(module), attribute) for module, attribute in coupling.unread)


def width_of(model: nn.Module, taken: Collection[Place], blocks: Collection[str]) -> Width:
    """The places of the hidden state's channels. taken: places of other channels; blocks: names of the blocks, whose
    other channels are all in `taken`.

    Raises InputError for a model without a hidden size in its configuration, and where the places cannot be determined.
    """
    config = getattr(model, "config", None)
    owner = config.get_text_config() if isinstance(config, PretrainedConfig) else None
    size = getattr(owner, FIELD, None)
    if not isinstance(config, PretrainedConfig) or owner is None or type(size) is not int:
        raise InputError(f"{type(model).__name__} has no configuration that says its {FIELD}; leave hidden out")
    path = next((path for path, each in configs_of(config) if each is owner), ())
    field = getattr(owner, "attribute_map", {}).get(FIELD, FIELD)
    ours, also = facts_of(model), _as_wide(model, owner, path, field)
    wider = facts_of(_wider(model, *(Field(path, name, 2 * size) for name in (field, *also))))
    axes: dict[str, tuple[int, ...]] = {}
    numbers: list[tuple[str, str]] = []
    for (name, attribute), own in ours.items():
        other = wider.get((name, attribute))
        if attribute:
            if (name, attribute) not in taken and _counts(own, other, size):
                numbers.append((name, attribute))
        elif dims := tuple(_dimensions(name, own, other, size, taken)):
            axes[name] = dims
    for name, dims in axes.items():
        layer = model.get_submodule(name.rpartition(".")[0])
        if len(dims) > 1 and is_layer(layer) and any(name.startswith(f"{block}.") for block in blocks):
            raise InputError(
                f"{name} is {list(ours[name, ''])}, and nothing tells which of it are channels of the hidden state "
                "(its block has no heads or channels that can be cut); leave hidden out"
            )
    return Width(size, axes, tuple(numbers), path, field, also)


def _as_wide(model: nn.Module, owner: PretrainedConfig, path: tuple[str, ...], field: str) -> tuple[str, ...]:
    """Other fields of the configuration that must equal the hidden size: without them, a wider model has additional
    parameters, like a projection between both widths."""
    size, own = getattr(owner, field), {name for name, _ in model.named_parameters(remove_duplicate=False)}

    def same(*names: str) -> bool:
        wider = _wider(model, *(Field(path, name, 2 * size) for name in names))
        return {name for name, _ in wider.named_parameters(remove_duplicate=False)} == own

    if same(field):
        return ()
    alike = [n for n, value in vars(owner).items() if n != field and type(value) is int and value == size]
    return next(((name,) for name in alike if same(field, name)), ())


def _wider(model: nn.Module, *fields: Field) -> nn.Module:
    """`model_of` these fields. Raises InputError where its class refuses."""
    try:
        return model_of(model, fields)
    except Exception as error:  # noqa: BLE001 - the class may refuse these numbers with any error
        raise InputError(
            f"no {type(model).__name__} has another {fields[0].name} ({first_line(error)}); leave hidden out"
        ) from None


def _counts(own: Any, other: Any, size: int) -> bool:
    """True for an attribute that counts the channels: `size` in the model (own), 2 * size in the wider one (other)."""
    if type(own) is int:
        return bool(own == size and other == 2 * size)
    return type(own) is tuple and type(other) is tuple and (size, 2 * size) in zip(own, other, strict=False)


def _dimensions(name: str, own: Any, other: Any, size: int, taken: Collection[Place]) -> Iterator[int]:
    """The dimensions of a tensor that have the channels. Raises InputError for one that is longer for another
    reason."""
    if own == other:
        return
    if other is None or len(own) != len(other):
        raise InputError(f"{name} is there, or has its dimensions, for one {FIELD} alone; leave hidden out")
    for dimension, (length, longer) in enumerate(zip(own, other, strict=True)):
        if length == longer or (name, dimension) in taken:
            continue
        if (length, longer) != (size, 2 * size):
            raise InputError(
                f"{name} is {list(own)}, and {list(other)} where the hidden state has {2 * size} channels instead of "
                f"{size}, which does not say which of it are these; leave hidden out"
            )
        yield dimension


def narrow(model: nn.Module, width: Width, kept_N: Tensor) -> Applied:
    """Cut every tensor and count to the kept channels, in order. Parameters stay the same objects; the configuration is
    not changed."""
    parameters, modules = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_modules())
    each = {id(parameters[name]): (parameters[name], dims) for name, dims in width.axes.items()}
    with changing() as done:
        for parameter, dims in each.values():
            value = parameter.data
            for dimension in dims:
                value = value.index_select(dimension, kept_N.to(value.device))
            done.append(change(parameter, DATA, value.contiguous()))
        for name, attribute in width.numbers:
            done.append(_renumbered(modules[name], attribute, width.size, len(kept_N)))
    return Applied(tuple(done))


def _renumbered(module: nn.Module, attribute: str, size: int, staying: int) -> Change:
    value = getattr(module, attribute)
    after = tuple(staying if n == size else n for n in value) if type(value) is tuple else staying
    return change(module, attribute, after)
