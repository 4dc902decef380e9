"""Folds batch norms into the layers before them: the function stays the same, with fewer layers to compute.

In evaluation a batch norm is a scale and a shift of each channel, so with the layer y = W x + b before it,

    gamma (y - mean) / sqrt(var + eps) + beta  =  W' x + b'        f = gamma / sqrt(var + eps)
    W'_n = f_n W_n                b'_n = beta_n + f_n (b_n - mean_n)                        (Jacob et al. 2018, 3.2)

The layer of each norm is found in one forward pass, not by names: the norm's input is the same object as the layer's
output, no other operation reads that tensor, and it is no output of the model. Fold before quantizing.

A folded model lacks batch norms and has new biases. Keep it in memory or save it whole: a library that rebuilds the
model from its configuration makes no parameters for the new biases.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from compress.base.errors import CompressError, InputError
from compress.model.calls import evaluating, removing
from compress.model.edits.changes import DATA, Change, change, changing
from compress.model.layers import Layer, is_layer

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
# Largest allowed change of the output, in units of eps. The fold rounds each weight and bias once; a forward pass
# accumulates these errors over the layers.
STEPS = 2**12


@dataclass(frozen=True)
class BatchNormFolds:
    """The result of `fold_batch_norm`. folded: {norm: its layer}; left_alone: {norm: the reason why it stays}."""

    folded: Mapping[str, str] = field(default_factory=dict)
    left_alone: Mapping[str, str] = field(default_factory=dict)


class _Watch(TorchDispatchMode):
    """Records the readers of each layer's output: the running batch norm, or an operation outside of all norms."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_of: dict[int, str] = {}
        self.kept: list[Tensor] = []  # kept alive, so that no id is used twice
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
    """Fold every batch norm of a model that can be folded, in place. Returns the folds, and reasons for the other
    norms.

    batch: a few samples as the model's inputs, like {"pixel_values": images}. Their values do not matter, but the model
    must run through the same layers as it always does. Raises CompressError, and restores the model, where the fold
    would change its output; InputError for a batch that is no mapping.
    """
    if not isinstance(batch, Mapping):
        raise InputError(f"a batch is {type(batch).__name__}; give a dictionary of the model's inputs")
    with evaluating(model), torch.no_grad():
        before = _tensors(model(**batch))
        watch = _watch(model, batch)
        result = _matches(model, watch)
        with changing() as done:
            for name, layer in result.folded.items():
                norm = model.get_submodule(name)
                done += fold_into(Layer(layer, model.get_submodule(layer)), norm)
                done += [change(parent, key, nn.Identity()) for parent, key in _places(model, norm)]
            problem = _difference(before, _tensors(model(**batch)))
            if problem is not None:
                raise CompressError(f"folding batch norms would change the model's output {problem}; it is as it was")
    return result


def fold_into(layer: Layer, norm: nn.Module) -> list[Change]:
    """Give a layer the weight and bias of the layer and the norm together, computed in float64. Returns the
    changes."""
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
    shift = nn.Parameter(shift_N.to(weight.dtype), requires_grad=weight.requires_grad)
    return [change(weight, DATA, layer.stored(folded_NK)), change(layer.module, "bias", shift)]


def _watch(model: nn.Module, batch: Mapping[str, Any]) -> _Watch:
    """Run one forward pass that observes every layer and every batch norm."""
    watch = _Watch()
    hooks = []
    for name, module in model.named_modules():
        if is_layer(module):
            hooks.append(module.register_forward_hook(lambda _m, _a, out, name=name: watch.layer_done(name, out)))
        elif isinstance(module, NORMS):
            hooks.append(module.register_forward_pre_hook(lambda _m, a, name=name: watch.norm_begins(name, a)))
            hooks.append(module.register_forward_hook(lambda _m, _a, _o: watch.norm_ends()))
    with removing(hooks), watch:
        output = model(**batch)
    watch.note(output, "the model's output")
    return watch


def _matches(model: nn.Module, watch: _Watch) -> BatchNormFolds:
    folded: dict[str, str] = {}
    left_alone: dict[str, str] = {}
    users = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    for name, module in model.named_modules():
        if isinstance(module, NORMS):
            layer = watch.inputs.get(name)
            reason = _reason(model, watch, name, module, layer, users)
            if reason is not None:
                left_alone[name] = reason
            elif layer is not None:
                folded[name] = layer
    return BatchNormFolds(folded, left_alone)


def _reason(
    model: nn.Module, watch: _Watch, name: str, norm: nn.Module, layer: str | None, users: Mapping[int, int]
) -> str | None:
    """The reason why a norm stays; None where it can be folded into the layer."""
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


def _places(model: nn.Module, wanted: nn.Module) -> list[tuple[nn.Module, str]]:
    """(Parent, name in it) of all places of a module."""
    return [(parent, name) for parent in model.modules() for name, child in parent._modules.items() if child is wanted]


def _tensors(output: Any) -> list[Tensor]:
    return [value for value in tree_flatten(output)[0] if isinstance(value, Tensor)]


def _difference(before: list[Tensor], after: list[Tensor]) -> str | None:
    """Words for the difference of the outputs where it exceeds rounding; None where it does not."""
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
