"""Builds a model that runs on a checkpoint's codes: made without memory, filled from disk, converted layer by layer.

The model is transformers', loaded by transformers. Its quantizer interface lets us replace linear layers while they
hold nothing (`prepare`) and turn the tensors read into `QuantLinear`s afterwards (`finish`). There is never a dense
copy of a compressed weight: memory holds at most the checkpoint, and one layer in both layouts.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from compress.base.errors import CheckpointError
from compress.checkpoint.read.compressed_layers import StoredLayer, stored_in
from compress.checkpoint.read.source import Source
from compress.inference.layers.compressed_layers import lay_in_strips
from compress.inference.layers.embedding import TiedLinear, take_over
from compress.inference.layers.linear import PackedLinear, QuantLinear
from compress.inference.load.kv_caches import round_cache
from compress.model.attention import attentions, cache_argument, hold_scales
from compress.model.disk_names import places_in
from compress.model.layers import Layer, is_linear
from compress.model.split_experts import split_experts
from compress.model.splitting.split_layers import split_layers
from compress.weights.fine_grained import check_runs
from compress.weights.kv_cache_codes import SCALES, CacheScheme

# The attribute that keeps the tied keys that transformers would use without codes.
TIED = "_tied_without_codes"


class Unread(nn.Module):
    """A linear layer between `prepare` and `finish`: empty tensors under the names of the checkpoint.

    shares: the embedding whose codes this layer uses; None for a layer with its own.
    """

    def __init__(
        self, stored: StoredLayer, bias: nn.Parameter | None, dtype: torch.dtype, shares: str | None = None
    ) -> None:
        super().__init__()
        self.stored, self.dtype, self.shares = stored, dtype, shares
        self.out_features, self.in_features = stored.shape  # initializations scale by them (WavLM)
        _hold(self, stored)
        self.register_parameter("bias", bias)
        self.complete = True

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and "complete" in self.__dict__ and "weight" not in self._buffers:
            return _nothing(self.stored)
        return super().__getattr__(name)


class UnreadEmbedding(nn.Embedding):
    """A token embedding between `prepare` and `finish`. kind: its own class, which it gets back in `finish`."""

    stored: StoredLayer
    shares: str | None
    kind: type[nn.Embedding]
    dtype: torch.dtype

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and "kind" in self.__dict__ and "weight" not in self._buffers:
            return _nothing(self.stored)
        return super().__getattr__(name)


def _nothing(stored: StoredLayer) -> Tensor:
    """A meta tensor for code that reads a weight before it is loaded: models initialize some by name (T5), and fit the
    bias of a head to the shape of its weight."""
    nothing = torch.empty(stored.shape, device="meta")
    nothing._is_hf_initialized = True  # type: ignore[attr-defined]
    return nothing


def _hold(module: nn.Module, stored: StoredLayer) -> None:
    """Register empty buffers for the checkpoint's tensors of a layer, in their stored dtypes."""
    for name, part in stored.scheme.parts(*stored.shape).items():
        if name in stored.parts:
            shape = () if name in stored.scalars else part.shape
            module.register_buffer(name, torch.empty(shape, dtype=stored.dtypes[name], device="meta"))


def _vacate(module: nn.Embedding, stored: StoredLayer, dtype: torch.dtype, shares: str | None) -> None:
    """Turn an embedding into an `UnreadEmbedding`."""
    kind = type(module)
    del module._parameters["weight"]
    _hold(module, stored)
    bases = (UnreadEmbedding,) if kind is nn.Embedding else (kind, UnreadEmbedding)
    module.__class__ = type(f"Unread{kind.__name__}", bases, {})
    unread = cast(UnreadEmbedding, module)
    unread.stored, unread.shares, unread.kind, unread.dtype = stored, shares, kind, dtype


def _untie(model: nn.Module, name: str) -> list[str]:
    """Stop transformers from tying other modules to an embedding's weight. Returns the names of these modules; of a
    caller's own model, of those that have the same weight."""
    if not hasattr(model, "all_tied_weights_keys"):
        weight = model.get_submodule(name)._parameters["weight"]
        return [n for n, m in model.named_modules() if n != name and m._parameters.get("weight") is weight]
    mapping: dict[str, str] = cast(Any, model).all_tied_weights_keys
    own = f"{name}.weight"
    first = mapping.get(own, own)
    tied = {target for target, source in mapping.items() if source == first} | {first}
    if own not in tied or len(tied) == 1:
        return []
    for target in tied & set(mapping):
        del mapping[target]
    # A later tie_weights() reads the keys of every nested model again.
    for prefix, part in model.named_modules():
        if getattr(part, "_tied_weights_keys", None) and hasattr(part, "get_expanded_tied_weights_keys"):
            full = f"{prefix}." if prefix else ""
            expanded = cast(Any, part).get_expanded_tied_weights_keys()
            part.__dict__.setdefault(TIED, cast(Any, part)._tied_weights_keys)
            cast(Any, part)._tied_weights_keys = {k: v for k, v in expanded.items() if full + k not in tied}
    return sorted(key.removesuffix(".weight") for key in tied - {own})


def prepare(model: nn.Module, source: Source, dtype: torch.dtype) -> None:
    """Replace the compressed layers of a model on the meta device by empty ones. dtype: of the arithmetic.

    A model of another class than the checkpoint's (AutoModel, a classifier) need not have all of its layers. Raises
    CheckpointError for stored layers, shapes and scales that do not fit the model, and as `check_runs` does.
    """
    check_runs(source.quantization, source.path)
    stored_layers, caches = stored_in(source).layers, stored_in(source).caches
    split_experts(model, source.headers)
    split_layers(model, {name.rpartition(".")[0] for name in source.headers})
    modules = dict(model.named_modules())
    config = getattr(model, "config", None)  # a caller's own module has none
    foreign = type(model).__name__ not in (getattr(config, "architectures", None) or [type(model).__name__])
    place = places_in(model)
    placed = {place(modules, stored_name): stored for stored_name, stored in stored_layers.items()}
    sharing: dict[str, str] = {}
    for name, stored in placed.items():
        module = modules.get(name)
        if module is None and foreign:
            continue  # transformers reports its tensors as unexpected
        if stored.shares is not None and name not in sharing:
            raise CheckpointError(f"{name}.weight is missing from the checkpoint")
        if name in sharing:
            continue
        if isinstance(module, nn.Embedding):
            _check_shape(model, name, stored, (module.num_embeddings, module.embedding_dim))
            sharing |= {n: name for n in _untie(model, name) if n not in placed or placed[n].shares is not None}
            _vacate(module, stored, dtype, None)
            continue
        if module is None or not is_linear(module):
            what = "has no such layer" if module is None else f"has a {type(module).__name__} there"
            raise CheckpointError(f"{source.path} holds a compressed {name}; {type(model).__name__} {what}")
        _check_shape(model, name, stored, Layer(name, module).shape)
        model.set_submodule(name, Unread(stored, cast(nn.Linear, module).bias, dtype))
    for name, owner in sharing.items():
        module, stored = modules[name], placed.get(name, replace(placed[owner], parts={}))
        if isinstance(module, nn.Embedding):
            _vacate(module, stored, dtype, owner)
        elif isinstance(module, nn.Linear):
            model.set_submodule(name, Unread(stored, module.bias, dtype, owner))
        else:
            raise CheckpointError(f"{name} shares the compressed weight of {owner}; it is a {type(module).__name__}")
    for stored_name, scales in ({} if caches is None else caches.scales).items():
        name = place(modules, stored_name)
        attention = modules.get(name)
        if attention is None and foreign:
            continue
        if attention is None or cache_argument(attention) is None:
            raise CheckpointError(f"{source.path} holds scales of a key-value cache for {name}, which keeps none")
        hold_scales(attention, [torch.empty(shape, dtype=dtype, device="meta") for _, shape in scales.values()], True)
    expected_shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    for stored_name, (shape, _) in source.headers.items():
        name = place(expected_shapes, stored_name)
        if expected_shapes.get(name, shape) not in (shape, shape or (1,)):
            raise CheckpointError(f"{name} has shape {shape}; {type(model).__name__} needs {expected_shapes[name]}")


def _check_shape(model: nn.Module, name: str, stored: StoredLayer, expected: tuple[int, int]) -> None:
    if stored.shape != expected:
        raise CheckpointError(f"{name} is stored as {stored.shape}; {type(model).__name__} needs {expected}")


def finish(
    model: nn.Module, device: torch.device | None = None, caches: CacheScheme | None = None, unready: bool = False
) -> None:
    """Convert the layers that were read into layers that compute, one after the other, and make attentions keep codes
    in their caches. device: for the layers (by default where their tensors are). caches: None where the checkpoint has
    none. unready: leave linear layers with their own codes unconverted, for `convert_layer`. Raises CheckpointError."""
    tables: dict[str, PackedLinear] = {}
    unread = [(n, m) for n, m in model.named_modules() if isinstance(m, Unread | UnreadEmbedding)]
    # Modules that share a table come after those that hold one.
    for name, module in sorted(unread, key=lambda item: item[1].shares is not None):
        if unready and isinstance(module, Unread) and module.shares is None:
            continue
        parts = {part: module._buffers.pop(part) for part in module.stored.parts}
        if module.shares is not None:
            table = tables[module.shares]
        else:
            layer = _computing(name, module, parts, device)
            if isinstance(module, Unread):
                model.set_submodule(name, layer)
                continue
            if not isinstance(layer, PackedLinear):
                raise CheckpointError(f"{name} is an embedding stored as {module.stored.scheme}, which rounds an input")
            table = tables[name] = layer
        if isinstance(module, Unread):
            model.set_submodule(name, TiedLinear(table, module.bias).to(table.device))
            continue
        twin = module.shares is not None
        embedding = cast(nn.Embedding, module)
        embedding.__class__ = module.kind
        for attribute in ("stored", "kind", "shares", "dtype"):
            delattr(embedding, attribute)
        take_over(embedding.to(table.device), table, twin)
    if caches is not None:
        _finish_caches(model, caches)


def _computing(
    name: str, module: Unread | UnreadEmbedding, parts: Mapping[str, Tensor | None], device: torch.device | None
) -> QuantLinear:
    """The layer that computes on the tensors read. Raises CheckpointError, which names the tensor at fault."""
    tensors = {part: tensor for part, tensor in parts.items() if tensor is not None}
    target = next(iter(tensors.values())).device if device is None else device
    tensors = {part: tensor.to(target).reshape(tensor.shape or (1,)) for part, tensor in tensors.items()}
    try:
        module.stored.scheme.check(tensors, *module.stored.shape)
    except CheckpointError as error:
        raise CheckpointError(f"{name}.{error}") from None
    bias = module.bias if isinstance(module, Unread) else None
    layer = QuantLinear.from_parts(tensors, module.stored.scheme, module.stored.shape, bias)
    return layer.to(target, module.dtype)


@contextmanager
def convert_layer(model: nn.Module, name: str) -> Iterator[QuantLinear]:
    """Converts a layer that `finish` left unconverted for the body; yields the layer that computes."""
    unread = model.get_submodule(name)
    assert isinstance(unread, Unread)
    layer = _computing(name, unread, {part: unread._buffers[part] for part in unread.stored.parts}, None)
    model.set_submodule(name, layer)
    try:
        lay_in_strips(layer)
        yield layer
    finally:
        model.set_submodule(name, unread)


def _finish_caches(model: nn.Module, scheme: CacheScheme) -> None:
    for name, attention in attentions(model).items():
        for held in SCALES:
            scale = getattr(attention, held, None)
            if scale is not None and not bool((torch.isfinite(scale) & (scale >= 0)).all()):
                raise CheckpointError(f"{name}.{held} holds values that are negative or not finite")
        round_cache(attention, scheme)
