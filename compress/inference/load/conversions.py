"""From the layers that were read to layers that compute: every change of a loaded model, in order.

    read -> layers on codes, caches -> fused -> inputs rounded -> strips -> batch-invariant -> experts together -> steps

Each is of the loaded model alone: other models of the process stay as they are.
"""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn

from compress.base.errors import InputError, first_line
from compress.inference.layers.compressed_layers import compressed_layers, device_of, lay_in_strips, weights_on_codes
from compress.inference.layers.experts import stack_experts
from compress.inference.layers.fused import FusedLinear, why_not_fuse
from compress.inference.layers.linear import PackedLinear, QuantLinear
from compress.inference.load.assembly import finish
from compress.inference.load.steps import attend_here
from compress.inference.steps.block import install
from compress.inference.steps.graph import replay_steps
from compress.kernels.operators.devices import runs_on_cpu
from compress.model.calls import removing
from compress.model.experts import Expert, Experts
from compress.weights.kv_cache_codes import CacheScheme

# Inputs that share a scale where x is rounded to int8 for speed alone: few, so that one large value affects few others.
INPUT_GROUP = 128


@dataclass(frozen=True)
class Options:
    """The options of `load` by which a compressed model computes. device: None leaves tensors where they are.
    steps: generate by our loops or kernels. unready: linear layers stay as they were read, for `convert_layer`."""

    device: torch.device | None = None
    fuse: bool | None = None
    int8_activations: bool = False
    batch_invariant: bool = False
    steps: bool = False
    unready: bool = False


def on(device: torch.device) -> Options:
    """The usual options on a device."""
    return Options(device, steps=device.type in ("cpu", "cuda"))


def convert(model: nn.Module, caches: CacheScheme | None, options: Options) -> list[str]:
    """Make a model compute on the codes that were read into it. Returns remarks for the person. Raises CheckpointError
    for codes that cannot be, InputError for options that do not apply to them."""
    # Imported here, because this import loads all of transformers.
    from transformers import PreTrainedModel

    notes: list[str] = []
    finish(model, options.device, caches, options.unready)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.__dict__["num_parameters"] = WeightCount(module)
    compressed = next(compressed_layers(model), None) is not None
    if compressed and (options.fuse or (options.fuse is None and device_of(model).type == "cuda")):
        notes += fuse(model if options.device is None else model.to(options.device))
    if options.int8_activations:
        round_inputs(model)
    lay_in_strips(model)
    if options.batch_invariant:
        notes.append(make_batch_invariant(model))
    stack_experts(model)
    if options.steps:
        attend_here(model)
        if not options.unready:
            install(model)
            if options.device is not None and not runs_on_cpu(options.device):
                replay_steps(model)
    return notes


class WeightCount:
    """`num_parameters` of one model: parameters and codes. transformers counts torch's parameters; codes are buffers,
    but stand for weights. The model is held weakly, so that it is freed with its last user."""

    def __init__(self, model: nn.Module) -> None:
        self.model = ref(model)

    def __call__(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        model: Any = self.model()
        codes = 0 if only_trainable else weights_on_codes(model, exclude_embeddings)
        return int(type(model).num_parameters(model, only_trainable, exclude_embeddings)) + codes

    def __deepcopy__(self, memo: dict[int, Any]) -> "WeightCount":
        model: Any = self.model()
        return WeightCount(memo.get(id(model), model))

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightCount, (self.model(),)


def readers(model: nn.Module) -> list[list[str]]:
    """Groups of compressed layers (names) that read the same tensor object, in the order of their calls.

    Found by one forward on the model's `dummy_inputs`. Raises any error of a model that does not run on them.
    """
    groups: list[list[str]] = []
    last: list[Tensor] = []

    def note(name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if last and last[0] is inputs[0]:
            groups[-1].append(name)
        else:
            groups.append([name])
            last[:] = [inputs[0]]

    handles = [layer.register_forward_pre_hook(partial(note, name)) for name, layer in compressed_layers(model)]
    own: Any = model
    with removing(handles), torch.no_grad():
        own(**{key: value.to(device_of(model)) for key, value in own.dummy_inputs.items()})
    return [group for group in groups if len(group) > 1]


def _readers_of_experts(model: nn.Module) -> list[list[str]]:
    """The compressed layers that read what an expert does, of every expert: dummy inputs reach a few of them only."""
    mixtures = [(name, module) for name, module in model.named_modules() if isinstance(module, Experts)]
    groups = ([f"{name}.{i}.{leaf}" for leaf in m.leaves[:-1]] for name, m in mixtures for i in m.numbers)
    compressed = {name for name, _ in compressed_layers(model)}
    return [names for names in groups if len(names) > 1 and compressed.issuperset(names)]


def fuse(model: nn.Module) -> list[str]:
    """Fuse layers that read one tensor. Returns a line with the reason for each group that cannot be fused."""
    try:
        others = (n for n in readers(model) if not isinstance(model.get_submodule(n[0].rpartition(".")[0]), Expert))
        groups = [*_readers_of_experts(model), *others]
    except Exception as error:  # noqa: BLE001 - a foreign model may refuse dummy inputs in any way
        return [f"nothing is fused: {type(model).__name__} does not run on dummy inputs ({first_line(error)})"]
    refused = []
    # A block that is used several times (ALBERT) yields its groups each time.
    groups = list({tuple(names): names for names in groups}.values())
    times = Counter(name for names in groups for name in names)
    for names in groups:
        layers = [cast(QuantLinear, model.get_submodule(name)) for name in names]
        if max(times[name] for name in names) > 1:
            continue  # a layer in several groups, or called twice in a row, cannot be stacked
        if reasons := why_not_fuse(layers):
            refused.append(f"{', '.join(names)} are not fused: {'; '.join(reasons)}")
            continue
        for name, part in zip(names, FusedLinear.fuse(layers), strict=True):
            model.set_submodule(name, part)
    return refused


def round_inputs(model: nn.Module) -> None:
    """Make weight-only layers round their inputs to int8. Raises InputError where there are none."""
    layers = [layer for _, layer in compressed_layers(model)]
    packed = [layer for layer in layers if isinstance(layer, PackedLinear)]
    if not packed:
        rounding = all(layer.scheme.inputs is not None for layer in layers)
        why = "inputs are quantized already" if rounding else "layers are not codes on a grid and nothing else"
        raise InputError(f"int8_activations is for weight-only layers; this checkpoint's {why}")
    for layer in packed:
        if layer.scheme.inputs is None:
            # The last group of a row may be shorter.
            layer.input_group = INPUT_GROUP if layer.in_features > INPUT_GROUP else -1


def make_batch_invariant(model: nn.Module) -> str:
    """Make every compressed layer batch-invariant. Returns a note on the modules that are not. Raises InputError, and
    changes nothing, where a layer cannot be."""
    layers = dict(compressed_layers(model))
    for name, layer in layers.items():
        reasons = layer.why_not_batch_invariant(layer.scheme, layer.in_features, layer.dtype, layer.device)
        if reasons:
            raise InputError(f"batch_invariant: {name} ({layer.scheme}) cannot be: {'; '.join(reasons)}")
    for module in model.modules():
        if isinstance(module, QuantLinear):
            module.batch_invariant = True
    dense = sum(isinstance(module, nn.Linear) for module in model.modules())
    return (
        f"batch-invariant: {len(layers)} compressed layers; norms, attention and dense layers (of these {dense}) are "
        "not held to it"
    )
