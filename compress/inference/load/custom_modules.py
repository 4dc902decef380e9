"""Loads a checkpoint into a module of the caller: a model that is not of transformers, and so has no configuration."""

import torch
from torch import Tensor, nn

from compress.base.errors import CheckpointError
from compress.checkpoint.read.compressed_layers import stored_in
from compress.checkpoint.read.source import Source
from compress.inference.load.assembly import Unread, UnreadEmbedding, prepare
from compress.inference.load.conversions import Options, convert


def load_into(model: nn.Module, source: Source, dtype: torch.dtype | None, options: Options) -> list[str]:
    """Fill a model of the class and sizes that were compressed, in place: compressed layers run on their codes. Returns
    remarks. dtype: of the arithmetic; None for that of the model's parameters. Raises CheckpointError, which names the
    tensor, for a checkpoint that does not fit the model; its compressed layers may then be empty."""
    stored, target = stored_in(source), options.device
    assert target is not None
    default = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
    prepare(model, source, dtype or default)
    taken = {name for layer in stored.layers.values() for name in layer.parts.values()}
    for module in model.modules():
        if isinstance(module, Unread | UnreadEmbedding):
            for part, full in module.stored.parts.items():
                module._buffers[part] = source.weights.tensor(full).to(target)
    for names, tensor in _own_tensors(model):
        if taken.isdisjoint(names):
            name = next((name for name in names if name in source.weights), names[0])
            _fill(name, tensor, source, dtype, target)
            taken.update(names)
    if strange := sorted(set(source.weights) - taken):
        raise CheckpointError(f"{source.path} holds {strange[0]}; {type(model).__name__} has no such tensor")
    notes = convert(model, None, options)
    model.to(target)
    return notes


def _own_tensors(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """(Every name that it has, tensor) of the tensors of a model that a checkpoint holds dense."""
    tensors: dict[object, tuple[list[str], Tensor]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        held: list[tuple[str, object, Tensor | None]] = [(key, id(p), p) for key, p in module._parameters.items()]
        if not isinstance(module, Unread | UnreadEmbedding):
            lasting = {k: b for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set}
            held += [(key, (id(module), key), buffer) for key, buffer in lasting.items()]
        for key, identity, tensor in held:
            if tensor is not None:
                tensors.setdefault(identity, ([], tensor))[0].append(f"{prefix}.{key}" if prefix else key)
    return list(tensors.values())


def _fill(name: str, tensor: Tensor, source: Source, dtype: torch.dtype | None, target: torch.device) -> None:
    """Give a tensor of a model the values of the checkpoint."""
    if name not in source.weights:
        raise CheckpointError(f"{name} is missing from the checkpoint")
    read = source.weights.tensor(name)
    if read.shape != tensor.shape:
        raise CheckpointError(f"{name} has shape {tuple(read.shape)}; the model needs {tuple(tensor.shape)}")
    kind = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    tensor.data = read.to(target, kind).clone()
