"""`split_layers`: replaces modules that read weights without calling a layer by others made of linear layers."""

from collections.abc import Collection, Iterator
from typing import cast

from torch import nn
from torch.nn.parameter import UninitializedParameter

from compress.base.errors import InputError
from compress.model.splitting.multihead import PROJECTIONS, SplitAttention
from compress.model.splitting.recurrent import CELLS, LAYERS, Recurrent, RecurrentCell

ADVICE = "compress.split_layers(model) makes linear layers of it"


def is_whole(module: nn.Module) -> bool:
    """True for a module that `split_layers` takes apart: of one of these classes, or of a subclass that computes as
    that does."""
    kinds = (*LAYERS, *CELLS, nn.MultiheadAttention)
    return any(isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds)


def why_not_split(module: nn.Module) -> str | None:
    """The reason why a module stays as it is; None where it can be taken apart."""
    for name in _expected(module):
        held = module._parameters.get(name)
        if held is None:
            return "computes its weights from others (weight_norm, pruning, parametrizations); make them permanent"
        if isinstance(held, UninitializedParameter):
            return "has a weight without a shape; run the model once"
    return None


def _expected(module: nn.Module) -> Iterator[str]:
    """The names of the weights that a module of torch should hold."""
    if isinstance(module, nn.RNNBase):
        yield from (name for names in module._all_weights for name in names if name.startswith("weight"))
    elif isinstance(module, nn.RNNCellBase):
        yield from ("weight_ih", "weight_hh")
    elif isinstance(module, nn.MultiheadAttention):
        yield from ("in_proj_weight",) if module._qkv_same_embed_dim else (f"{name}_weight" for name in PROJECTIONS)


def _also_read(model: nn.Module, module: nn.Module) -> str | None:
    """The name of another module that has the joint weight of an attention, of which views would be made; None where
    there is none."""
    joint = module._parameters.get("in_proj_weight")
    if joint is None:
        return None
    return next(
        (n for n, m in model.named_modules() if m is not module and any(p is joint for p in m._parameters.values())),
        None,
    )


def split_layers(model: nn.Module, stored: Collection[str] | None = None) -> list[str]:
    """Replace every LSTM, GRU, RNN, their cells and MultiheadAttention by modules of linear layers that compute the
    same, in place. Returns their names. The layers hold the parameters of the modules that they replace, or views of
    them.

    stored: names of the layers of a checkpoint; only modules that have layers among these are replaced.

    Raises InputError for a model that is such a module itself, and for one whose weights cannot be taken.
    """
    whole = {n: m for n, m in model.named_modules() if is_whole(m) and (stored is None or _holds(stored, n, m))}
    if "" in whole:
        raise InputError(
            f"the model is itself an {type(model).__name__}, which cannot be replaced in place; put it into a module: "
            "torch.nn.Sequential(model)"
        )
    for name, module in whole.items():
        if stored is None and (problem := why_not_split(module)) is not None:
            raise InputError(f"{name} {problem}")
        if (other := _also_read(model, module)) is not None:
            raise InputError(f"{name} shares its in_proj_weight with {other}; give each a weight of its own")
    made = {module: _apart(module) for module in whole.values()}
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if child in made:
                parent._modules[key] = made[child]
    return list(whole)


def _apart(module: nn.Module) -> nn.Module:
    if isinstance(module, nn.RNNBase):
        return Recurrent.of(module)
    if isinstance(module, nn.MultiheadAttention):
        return SplitAttention.of(module)
    return RecurrentCell.of(cast(nn.RNNCellBase, module))


def _holds(stored: Collection[str], name: str, module: nn.Module) -> bool:
    """True where a checkpoint has a layer of a module that was taken apart. One of transformers may have its names
    behind a prefix of its own."""
    first = "ih_l0" if isinstance(module, nn.RNNBase) else "ih"
    mark = f"{name}.{PROJECTIONS[0] if isinstance(module, nn.MultiheadAttention) else first}"
    return any(f".{layer}".endswith(f".{mark}") or f".{mark}".endswith(f".{layer}") for layer in stored)


def is_apart(module: nn.Module) -> bool:
    """True for a module that `split_layers` has made."""
    return isinstance(module, Recurrent | RecurrentCell | SplitAttention)
