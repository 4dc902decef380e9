"""Layers that round while they are trained, by a swap of their class.

The module stays the one that it was: its name, its parameters and their keys in a state dict, FSDP's sharding of them,
its hooks. Its class becomes a subclass of its own (QATLinear, QATConv2d, QATEmbedding), of which `weight` is the
rounded weight while `forward` runs, and which rounds its input and output. At any other time `weight` is the trained
parameter, as in any layer: code that changes it (merging an adapter) or looks it up (`get_parameter`) gets the real
one. A head that is tied to an embedding has the same weight, and rounds it by the embedding's quantizer.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from compress.base.errors import CompressError, InputError
from compress.model.layers import Layer, Table, is_read_uncalled
from compress.train.rounding.quantizers import (
    ActivationQuantizer,
    Quantizer,
    Scales,
    Shared,
    WeightQuantizer,
    weight_quantizer,
)
from compress.weights.decision import Decision
from compress.weights.formats.dense import dense

PARTS = ("weight_quantizer", "input_quantizer", "output_quantizer")


class Quantizing:
    """The base class that a prepared layer's class gets, before its own.

    computing: `forward` is running. called: it has run since the layer was prepared.
    """

    weight_quantizer: nn.Module | None
    input_quantizer: ActivationQuantizer | None
    output_quantizer: ActivationQuantizer | None
    is_product = True  # for `model.layers.is_linear`
    computing = False
    called = False

    @property
    def weight(self) -> Tensor:
        """The rounded weight within `forward`, and the parameter that is trained outside of it."""
        if self.computing or is_read_uncalled(self):  # type: ignore[arg-type]
            return self.rounded_weight
        latent: Tensor = self._parameters["weight"]  # type: ignore[attr-defined]
        return latent

    @property
    def rounded_weight(self) -> Tensor:
        """The weight that `forward` computes with."""
        latent: Tensor = self._parameters["weight"]  # type: ignore[attr-defined]
        if self.weight_quantizer is None or isinstance(latent, DTensor):  # whose shard FSDP looks for under this name
            return latent
        if isinstance(self, Conv1D):  # [K, N]
            return self.weight_quantizer(latent.t()).t()
        rounded: Tensor = self.weight_quantizer(latent)
        return rounded

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The layer on the rounded input, its output rounded. Raises InputError for a weight that is not whole."""
        if isinstance(self._parameters["weight"], DTensor):  # type: ignore[attr-defined]
            raise InputError(
                "a layer that rounds is computed on a part of its weight (tensor parallelism?); shard it by fully_shard"
            )
        if self.input_quantizer is not None:
            x = self.input_quantizer(x)
        self.computing = self.called = True
        try:
            y: Tensor = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        finally:
            self.computing = False
        return y if self.output_quantizer is None else self.output_quantizer(y)


def computed_weight(module: nn.Module) -> Tensor:
    """The weight that a layer computes with: the rounded one, of a layer that rounds."""
    weight: Tensor = module.rounded_weight if isinstance(module, Quantizing) else module.weight  # type: ignore
    return weight


def weight_scales(layers: Iterable[Layer]) -> Iterator[tuple[Layer, WeightQuantizer]]:
    """Layers whose weight is rounded by scales that do not follow it by themselves, with their quantizers. Raises
    InputError for a weight that is not whole."""
    for layer in layers:
        quantizer = layer.module._modules[PARTS[0]]
        if isinstance(quantizer, WeightQuantizer) and quantizer.scales != "fitted":
            if isinstance(layer.parameter, DTensor):
                raise InputError(f"{layer.name} is sharded; scales are fitted to whole weights")
            yield layer, quantizer


def was_called(module: nn.Module) -> bool:
    """True for a layer that something has seen round: its own forward, or a module around it that reads its weight."""
    return isinstance(module, Quantizing) and (module.called or is_read_uncalled(module))


@cache
def quantizing(kind: type[nn.Module]) -> type[nn.Module]:
    """The subclass that a layer of this kind becomes."""
    return type(f"QAT{kind.__name__}", (Quantizing, kind), {"__module__": __name__})


def attach(layer: Layer, decision: Decision, scales: Scales) -> bool:
    """Let a layer round as was decided; returns True where there is something to round. Raises InputError for a weight
    that is stored in a form that is not trained."""
    module, dtype = layer.module, torch.promote_types(layer.parameter.dtype, torch.float32)
    try:
        weight = weight_quantizer(decision, scales, dtype)
    except ValueError as error:
        raise InputError(f"{layer.name} {error}; quantize it by another pass, or train before") from None
    inputs, outputs = (
        None if codes is None else ActivationQuantizer(codes, scales, layer.geometry, dtype)
        for codes in (decision.inputs, decision.outputs)
    )
    if weight is None and inputs is None and outputs is None:
        return False
    device = layer.parameter.device
    swap(module, [None if part is None else part.to(device) for part in (weight, inputs, outputs)])
    for each in tied_to(layer):
        swap(each.module, [None if weight is None else Shared(weight), None, None])
    return True


def tied_to(layer: Layer) -> list[Layer]:
    """The other modules that share the weight of an embedding table."""
    if not isinstance(layer, Table):
        return []
    return [Layer(name, module) for name, module in zip(layer.shared, layer.tied, strict=True)]


def swap(module: nn.Module, parts: Sequence[nn.Module | None]) -> None:
    """Let a layer round by quantizers of its weight, input and output (None: not at all)."""
    for name, part in zip(PARTS, parts, strict=True):
        module.add_module(name, part)
    module.__class__ = quantizing(type(module))  # type: ignore[arg-type]


def detach(module: nn.Module) -> list[nn.Module | None]:
    """Undo `swap`, keeping the trained weight; returns the layer's quantizers, for another `swap`."""
    module.__class__ = _plain(type(module))
    module.__dict__.pop("computing", None)
    module.__dict__.pop("called", None)
    return [module._modules.pop(name) for name in PARTS]


def _plain(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that this one was made from. FSDP, of a layer that is a unit of its own, makes a subclass of it in
    turn."""
    outer, own, *rest = kind.__mro__
    if own is Quantizing:
        return rest[0]
    assert own is FSDPModule
    bare = _plain(rest[0])
    return type(f"FSDP{bare.__name__}", (FSDPModule, bare), {"__module__": outer.__module__})


def freeze_with_weights(layers: Iterable[Layer]) -> None:
    """Let the scales of layers train only where their weights do."""
    for layer in layers:
        if not layer.parameter.requires_grad:
            for part in PARTS:
                if (quantizer := layer.module._modules[part]) is not None:
                    quantizer.requires_grad_(False)


@contextmanager
def rounding(layers: Iterable[Layer], decisions: Mapping[str, Decision], scales: Scales) -> Iterator[list[Layer]]:
    """Let layers round as was decided inside a context; yields those that have something to round."""
    attached: list[Layer] = []
    try:
        for layer in layers:
            if layer.name in decisions and attach(layer, decisions[layer.name], scales):
                attached += [layer, *tied_to(layer)]
        yield attached
    finally:
        for layer in attached:
            detach(layer.module)


@contextmanager
def requiring(parameters: Iterable[nn.Parameter], wanted: Callable[[nn.Parameter], bool]) -> Iterator[None]:
    """Makes the wanted parameters require gradients, beginning without any. Afterwards each requires what it did,
    with no gradient (`engine.restore` puts a caller's back where the work failed)."""
    before = [(p, p.requires_grad) for p in parameters]
    try:
        for p, _ in before:
            p.grad = None  # a caller's would be added to that of the first step
            p.requires_grad_(wanted(p))
        yield
    finally:
        for p, requires in before:
            p.requires_grad_(requires)
            p.grad = None


def quantizers_of(layers: Sequence[Layer]) -> dict[str, nn.Module]:
    """The quantizers of layers' weights, inputs and outputs, by name."""
    return {
        f"{layer.name}.{part}": module
        for layer in layers
        for part in PARTS
        if (module := layer.module._modules[part]) is not None
    }


def parameters_in(quantizers: Mapping[str, nn.Module]) -> set[int]:
    """The identities of the quantizers' parameters."""
    return {id(p) for module in quantizers.values() for p in module.parameters()}


def scales_in(quantizers: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """The scales and zero points that are learned, by name."""
    named = {f"{name}.{key}": p for name, module in quantizers.items() for key, p in module.named_parameters()}
    return {name: p for name, p in named.items() if p.requires_grad}


def weights_outside(model: nn.Module, inside: set[int]) -> dict[str, nn.Parameter]:
    """The trained parameters of a model that are not among those of its quantizers."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad and id(p) not in inside}


def decision_after(layer: Layer, weight_NK: Tensor, before: Decision, stored: torch.dtype) -> Decision:
    """The decision about a layer that rounds: the codes of `forward`, of the whole weight. stored: the dtype of one
    without codes. Raises CompressError where scales or zero points are not finite."""
    module = layer.module
    for part in PARTS:
        learned = () if module._modules[part] is None else module._modules[part].named_parameters()  # type: ignore
        for name, value in learned:
            if not bool(torch.isfinite(value).all()):
                raise CompressError(
                    f"{part}.{name} of {layer.name} is not finite after training; lower its rate (scale_rate)"
                )
    quantizer: Quantizer | None = module._modules["weight_quantizer"]  # type: ignore[assignment]
    sides = {"inputs": module._modules["input_quantizer"], "outputs": module._modules["output_quantizer"]}
    codes = {side: None if part is None else part.decided() for side, part in sides.items()}  # type: ignore[operator]
    made = Decision(dense(weight_NK.to(stored))) if quantizer is None else quantizer.decision(weight_NK, stored)
    return Decision(made.weight, before.figures, codes["inputs"], codes["outputs"], made.kept)
