"""A checkpoint that runs as it is stored: built without memory, filled from disk, made ready layer by layer.

The model is transformers', loaded by transformers; its quantizer interface lets us replace linear layers while they
hold nothing (`prepare`) and turn what was read into `QuantLinear`s afterwards (`finish`). At no time is there a dense
copy of a compressed weight: the most that is held is the checkpoint and one layer in both layouts.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from compress.cache import SIDES, CacheScheme, attentions, cache_argument, hold_scales, round_cache
from compress.checkpoint import check_codes
from compress.errors import CheckpointError
from compress.fused import FusedLinear, why_not_fuse
from compress.nn import QuantLinear
from compress.scheme import FLOATS
from compress.source import Source, StoredLayer, caches_of, headers, layers_of

if TYPE_CHECKING:
    from transformers.core_model_loading import WeightRenaming


class Unread(nn.Module):
    """A linear layer between `prepare` and `finish`: empty tensors under the names that the checkpoint has."""

    def __init__(self, stored: StoredLayer, bias: nn.Parameter | None, dtype: torch.dtype, held: Sequence[str]) -> None:
        super().__init__()
        self.stored = stored
        rows, columns = stored.shape
        for name, part in stored.scheme.parts(rows, columns).items():
            if name in held:
                kind = dtype if part.dtypes is FLOATS else part.dtypes[0]
                self.register_buffer(name, torch.empty(part.shape, dtype=kind, device="meta"))
        self.register_parameter("bias", bias)
        self.complete = True

    def __getattr__(self, name: str) -> Any:
        # Some models initialize `weight` of layers they know by name (T5); there is nothing to initialize here.
        if name == "weight" and "complete" in self.__dict__ and "weight" not in self._buffers:
            return torch.empty(0)
        return super().__getattr__(name)


def prepare(model: nn.Module, source: Source, dtype: torch.dtype) -> None:
    """Empty the compressed layers of a model on the meta device. Raises CheckpointError for what does not fit it.

    A model of another class than the checkpoint's (AutoModel, a classifier) need not have all of its layers.
    """
    layers = layers_of(source)
    modules = dict(model.named_modules())
    own: Any = model
    foreign = type(model).__name__ not in (own.config.architectures or [type(model).__name__])
    place = partial(_place, getattr(model, "base_model_prefix", ""), _renamings(model))
    for stored_name, stored in layers.items():
        name = place(modules, stored_name)
        module = modules.get(name)
        if module is None and foreign:
            continue  # transformers reports its tensors as unexpected
        if not isinstance(module, nn.Linear):
            what = "has no such layer" if module is None else f"has a {type(module).__name__} there"
            raise CheckpointError(f"{source.path} holds a compressed {name}; {type(model).__name__} {what}")
        expected = (module.out_features, module.in_features)
        if stored.shape != expected:
            raise CheckpointError(f"{name} is stored as {stored.shape}; {type(model).__name__} needs {expected}")
        model.set_submodule(name, Unread(stored, module.bias, dtype, list(stored.parts)))
    caches = caches_of(source)
    for stored_name, scales in ({} if caches is None else caches.scales).items():
        name = place(modules, stored_name)
        attention = modules.get(name)
        if attention is None and foreign:
            continue
        if attention is None or cache_argument(attention) is None:
            raise CheckpointError(f"{source.path} holds scales of a key-value cache for {name}, which keeps none")
        hold_scales(attention, [torch.empty(shape, dtype=dtype, device="meta") for _, shape in scales.values()], True)
    expected_shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    for stored_name, (shape, _) in headers(source).items():
        name = place(expected_shapes, stored_name)
        if expected_shapes.get(name, shape) not in (shape, shape or (1,)):
            raise CheckpointError(f"{name} has shape {shape}; {type(model).__name__} needs {expected_shapes[name]}")


def _renamings(model: nn.Module) -> "list[WeightRenaming]":
    """How transformers turns names in checkpoints into a model's own: multimodal models are stored under older ones."""
    # Here, because these import all that transformers can do: seconds, for nothing unless a model is loaded.
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    if not isinstance(model, PreTrainedModel):
        return []
    return [step for step in get_model_conversion_mapping(model) if isinstance(step, WeightRenaming)]


def _place(base: str, renamings: "Sequence[WeightRenaming]", known: Collection[str], name: str) -> str:
    """What a model calls the thing that its checkpoint calls `name`: transformers renames some, and lets a base model
    and one with a head read each other's checkpoints."""
    renamed = name
    for step in renamings:
        renamed = step.rename_source_key(renamed)[0]
    candidates = (f for n in (name, renamed) for f in (n, n.removeprefix(f"{base}."), f"{base}.{n}"))
    return next((found for found in candidates if found in known), name)


def finish(model: nn.Module, device: torch.device | None = None, caches: CacheScheme | None = None) -> None:
    """Turn what was read into layers that compute, one after the other, on `device` (where they are, by default), and
    attentions into such that keep codes."""
    for name, module in list(model.named_modules()):
        if not isinstance(module, Unread):
            continue
        parts = dict(module.named_buffers(recurse=False))
        target = next(iter(parts.values())).device if device is None else device
        parts = {part: tensor.to(target) for part, tensor in parts.items()}
        if not bool(torch.isfinite(parts["weight_scale"]).all()):
            raise CheckpointError(f"{name}.weight_scale holds values that are not finite numbers")
        if "weight" in parts:
            check_codes(name, parts["weight"])
        bias = module.bias
        layer = QuantLinear.from_parts(parts, module.stored.scheme, module.stored.shape, bias)
        model.set_submodule(name, layer.to(target))
    if caches is None:
        return
    for name, attention in attentions(model).items():
        for side in SIDES:
            scale = getattr(attention, f"{side}_scale", None)
            if scale is not None and not bool((torch.isfinite(scale) & (scale != 0)).all()):
                raise CheckpointError(f"{name}.{side}_scale holds values that are not finite numbers above 0")
        round_cache(attention, caches)


def readers(model: nn.Module) -> list[list[str]]:
    """Names of compressed layers that get the very same tensor, in the order in which they are called.

    Found by one forward over a few tokens. Raises whatever a model raises that takes no `dummy_inputs`.
    """
    groups: list[list[str]] = []
    last: list[Tensor] = []

    def note(name: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if last and last[0] is inputs[0]:
                groups[-1].append(name)
            else:
                groups.append([name])
                last[:] = [inputs[0]]

        return hook

    layers = dict(compressed_layers(model))
    handles = [layer.register_forward_pre_hook(note(name)) for name, layer in layers.items()]
    device = next(iter(layers.values())).device
    own: Any = model
    try:
        with torch.no_grad():
            own(**{key: value.to(device) for key, value in own.dummy_inputs.items()})
    finally:
        for handle in handles:
            handle.remove()
    return [group for group in groups if len(group) > 1]


def fuse(model: nn.Module) -> list[str]:
    """Fuse layers that read one tensor. Returns a line for each group that cannot be, and why."""
    try:
        groups = readers(model)
    except Exception as error:  # noqa: BLE001 - a foreign model may refuse dummy inputs in any way
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return [f"nothing is fused: {type(model).__name__} does not run on dummy inputs ({reason})"]
    refused = []
    # A block that is used several times (ALBERT) shows its groups as often.
    groups = list({tuple(names): names for names in groups}.values())
    times = Counter(name for names in groups for name in names)
    for names in groups:
        layers = [cast(QuantLinear, model.get_submodule(name)) for name in names]
        if max(times[name] for name in names) > 1:
            continue  # one layer called with others each time, or twice in a row: there is nothing to stack
        if reasons := why_not_fuse(layers):
            refused.append(f"{', '.join(names)} are not fused: {'; '.join(reasons)}")
            continue
        for name, part in zip(names, FusedLinear.fuse(layers), strict=True):
            model.set_submodule(name, part)
    return refused


def compressed_layers(model: nn.Module) -> Iterator[tuple[str, QuantLinear]]:
    """The layers of a model that compute on codes; fused ones once, under the name of the first."""
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            yield name.removesuffix(".stacked"), module
