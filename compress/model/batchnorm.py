"""Folding batch norms into the layers before them, which leaves the function as it was and a layer less to compute.

In evaluation a batch norm is a scale and a shift of each channel, so with the layer y = W x + b before it,

    gamma (y - mean) / sqrt(var + eps) + beta  =  W' x + b'        f = gamma / sqrt(var + eps)
    W'_n = f_n W_n                b'_n = beta_n + f_n (b_n - mean_n)                        (Jacob et al. 2018, 3.2)

Which norm follows which layer is seen in one forward pass, not read from names: the norm's input is, as an object, the
layer's output, and no other operation and not the model's output ever touches that tensor. Fold before quantizing.

A folded model has no batch norms, and biases where there were none: it is for memory, or to be saved whole. A library
that rebuilds the model from a configuration and then looks for its parameters has no place for them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from compress.errors import CompressError, InputError
from compress.model.calls import evaluating
from compress.model.layers import Layer, is_layer

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# The fold rounds once per weight and bias; a forward pass adds that up over the layers.
STEPS = 2**12


@dataclass(frozen=True)
class BatchNormFolds:
    """folded: {norm: the layer that it went into}; left_alone: {norm: why it stays}."""

    folded: Mapping[str, str] = field(default_factory=dict)
    left_alone: Mapping[str, str] = field(default_factory=dict)


class _Watch(TorchDispatchMode):
    """Who reads the outputs of layers: the batch norm that is running, or an operation outside of any."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_of: dict[int, str] = {}
        self.kept: list[Tensor] = []  # alive, so that identity means something
        self.calls: dict[str, int] = {}
        self.inputs: dict[str, str | None] = {}
        self.readers: dict[str, set[str]] = {}
        self.running: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.note((args, kwargs), self.running or f"an operation ({func})")
        return func(*args, **(kwargs or {}))

    def note(self, values: Any, reader: str) -> None:
        for value in tree_flatten(values)[0]:
            layer = self.layer_of.get(id(value)) if isinstance(value, Tensor) else None
            if layer is not None:
                self.readers.setdefault(layer, set()).add(reader)

    def layer_done(self, name: str, output: Any) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        if isinstance(output, Tensor):
            self.layer_of[id(output)] = name
            self.kept.append(output)

    def norm_begins(self, name: str, args: tuple[Any, ...]) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        x = args[0] if args else None
        layer = self.layer_of.get(id(x))
        # Channels are dimension 1 of the norm, and of the layer's output unless it is linear and has tokens.
        self.inputs[name] = layer if isinstance(x, Tensor) else None
        self.running = name

    def norm_ends(self) -> None:
        self.running = None


def fold_batch_norm(model: nn.Module, batch: Mapping[str, Any]) -> BatchNormFolds:
    """Fold every batch norm of a model in memory that can be, in place, and say why the others stay.

    batch: a few samples as the model's inputs, like {"pixel_values": images}; what they are does not matter, only
    that the model runs through the same layers as it always does. Raises CompressError, with the model as it was,
    where the fold would change what it computes.
    """
    if not isinstance(batch, Mapping):
        raise InputError(f"a batch is {type(batch).__name__}; give a dictionary of the model's inputs")
    with evaluating(model), torch.no_grad():
        before = _tensors(model(**batch))
        watch = _watch(model, batch)
        found = _matches(model, watch)
        undo = _State(model)
        for norm, layer in found.folded.items():
            fold_into(Layer(layer, model.get_submodule(layer)), model.get_submodule(norm))
            _replace(model, model.get_submodule(norm), nn.Identity())
        problem = _difference(before, _tensors(model(**batch)))
        if problem is not None:
            undo.restore()
            raise CompressError(f"folding batch norms would change the model's output {problem}; it is as it was")
    return found


def fold_into(layer: Layer, norm: nn.Module) -> None:
    """Give a layer the weight and bias that stand for itself and the norm; computed in float64."""
    assert isinstance(norm, NORMS)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    factor_N = (norm.running_var.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        factor_N = factor_N * norm.weight.data.double()
    weight = layer.parameter
    bias: Any = layer.module.bias
    old_N = torch.zeros_like(factor_N) if bias is None else bias.data.double()
    shift_N = factor_N * (old_N - norm.running_mean.double())
    if norm.bias is not None:
        shift_N = shift_N + norm.bias.data.double()
    folded_NK = (layer.weight.double() * factor_N[:, None]).to(weight.dtype)
    weight.data = layer.stored(folded_NK)
    layer.module.bias = nn.Parameter(shift_N.to(weight.dtype), requires_grad=weight.requires_grad)


def _watch(model: nn.Module, batch: Mapping[str, Any]) -> _Watch:
    """One forward pass with every layer and every batch norm observed."""
    watch = _Watch()
    hooks = []
    for name, module in model.named_modules():
        if is_layer(module):
            hooks.append(module.register_forward_hook(lambda _m, _a, out, name=name: watch.layer_done(name, out)))
        elif isinstance(module, NORMS):
            hooks.append(module.register_forward_pre_hook(lambda _m, a, name=name: watch.norm_begins(name, a)))
            hooks.append(module.register_forward_hook(lambda _m, _a, _o: watch.norm_ends()))
    try:
        with watch:
            output = model(**batch)
    finally:
        for hook in hooks:
            hook.remove()
    watch.note(output, "the model's output")
    return watch


def _matches(model: nn.Module, watch: _Watch) -> BatchNormFolds:
    found = BatchNormFolds({}, {})
    folded, left_alone = dict(found.folded), dict(found.left_alone)
    users: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    for name, module in model.named_modules():
        if isinstance(module, NORMS):
            layer = watch.inputs.get(name)
            reason = _reason(model, watch, name, module, layer, users)
            if reason is None:
                assert layer is not None
                folded[name] = layer
            else:
                left_alone[name] = reason
    return BatchNormFolds(folded, left_alone)


def _reason(
    model: nn.Module, watch: _Watch, name: str, norm: nn.Module, layer: str | None, users: Mapping[int, int]
) -> str | None:
    """Why a norm stays; None where it can go into the layer."""
    if watch.calls.get(name, 0) != 1:
        return f"called {watch.calls.get(name, 0)} times in a forward pass"
    if layer is None:
        return "its input is not the output of a convolution or linear layer"
    if watch.calls[layer] != 1:
        return f"{layer} is called {watch.calls[layer]} times in a forward pass"
    others = sorted(watch.readers.get(layer, set()) - {name})
    if others:
        return f"the output of {layer} also goes to {', '.join(others)}"
    if getattr(norm, "running_mean", None) is None:
        return "keeps no running statistics"
    module = model.get_submodule(layer)
    output = next(t for t in watch.kept if watch.layer_of[id(t)] == layer)
    linear = Layer(layer, module)
    if (linear.geometry is None and output.ndim != 2) or output.ndim == 1 or output.shape[1] != linear.shape[0]:
        return f"normalizes another dimension than the outputs of {layer}"
    if any(users[id(p)] > 1 for m in (module, norm) for p in m.parameters(recurse=False)):
        return f"it or {layer} shares a parameter with another module"
    return None


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put another module wherever one is held."""
    for parent in model.modules():
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, new)


class _State:
    """Everything that a fold changes, to put back."""

    def __init__(self, model: nn.Module) -> None:
        self.children = [(m, dict(m._modules)) for m in model.modules()]
        self.parameters = [
            (m, dict(m._parameters), {n: p.data for n, p in m._parameters.items() if p is not None})
            for m in model.modules()
        ]

    def restore(self) -> None:
        for module, children in self.children:
            module._modules.update(children)
        for module, parameters, data in self.parameters:
            module._parameters.update(parameters)
            for name, value in data.items():
                kept = parameters[name]
                assert kept is not None
                kept.data = value


def _tensors(output: Any) -> list[Tensor]:
    return [value for value in tree_flatten(output)[0] if isinstance(value, Tensor)]


def _difference(before: list[Tensor], after: list[Tensor]) -> str | None:
    """By how much the outputs differ, where that is more than rounding; None where it is not."""
    if [t.shape for t in before] != [t.shape for t in after]:
        return "in shape"
    for old, new in zip(before, after, strict=True):
        if not old.is_floating_point() or old.numel() == 0:
            continue
        largest = float(old.double().abs().max())
        change = float((new.double() - old.double()).abs().max()) / (largest or 1.0)
        if not change <= min(STEPS * torch.finfo(old.dtype).eps, 0.5):
            return f"by {change:.1e} of its largest value"
    return None
