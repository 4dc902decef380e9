"""`compress.load`: a model from any checkpoint, compressed ones on their codes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.base.errors import CheckpointError, InputError
from compress.checkpoint.read.compressed_layers import stored_in
from compress.checkpoint.read.pretrained import from_pretrained, load_dense, read_config
from compress.checkpoint.read.source import Source, find_source
from compress.checkpoint.read.unplaced_tensors import beside, totals
from compress.checkpoint.read.views import ViewedFiles
from compress.inference.load.assembly import Unread, UnreadEmbedding, prepare
from compress.inference.load.conversions import Options, convert, on
from compress.inference.load.dense_layers import densify
from compress.inference.load.dense_model import load_dequantized
from compress.inference.load.quantizer import LowBitConfig, make_known

ON_CPU = on(torch.device("cpu"))


def load(
    model: str | Path,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    *,
    dequantize: bool = False,
    fuse: bool | None = None,
    int8_activations: bool = False,
    batch_invariant: bool = False,
    trust_remote_code: bool = False,
    into: nn.Module | None = None,
    notes: list[str] | None = None,
) -> nn.Module:
    """A transformers model from any checkpoint; a compressed one runs compressed, in about the memory of its files.

    model: directory, GGUF file, hub id or 'demo'. dtype: of the arithmetic and of tensors that are not compressed; by
    default the checkpoint's own. dequantize: load dense weights instead, exactly the values of the codes. fuse:
    multiply layers that read one tensor together (None: on a GPU only). int8_activations: also round the inputs of
    weight-only layers to int8, one scale per token and 128 inputs; faster on a CPU, with a small error.
    batch_invariant: a compressed layer returns the same bits for a token, however many tokens are multiplied with it;
    slower. Norms, attention and dense layers are not made invariant: a note counts them. trust_remote_code: run Python
    code that comes with the model. into: a module of the class and sizes that were compressed, for a checkpoint of a
    model that is not of transformers; it is filled in place, and returned. notes: takes remarks for the person.

    Raises CheckpointError, which names the tensor, for a checkpoint that is damaged or of an unknown format, before its
    weights are read; InputError for options that do not apply to the checkpoint.
    """
    source, target = find_source(str(model), trust_remote_code), torch.device(device)
    options = replace(on(target), fuse=fuse, int8_activations=int8_activations, batch_invariant=batch_invariant)
    if into is not None:
        return _load_into(into, source, dtype, options, dequantize, notes)
    return load_source(source, dtype, options, dequantize, notes)


def _load_into(
    model: nn.Module,
    source: Source,
    dtype: torch.dtype | None,
    options: Options,
    dequantize: bool,
    notes: list[str] | None,
) -> nn.Module:
    """`load` into a module of the caller, of the class and sizes that were compressed. Raises CheckpointError, which
    names the tensor, for a checkpoint that does not fit it; its compressed layers may then be empty."""
    if source.quantization is None:
        raise InputError(f"{source.name} is not compressed; read it with load_state_dict, or leave `into` out")
    if options.fuse:
        raise InputError("fuse is for models of transformers; leave it out, or `into`")
    if dequantize and (options.int8_activations or options.batch_invariant):
        raise InputError("a dequantized model is dense: int8_activations and batch_invariant do not apply")
    remarks = _fill_from(model, source, dtype, replace(options, fuse=False, steps=False))
    if dequantize:
        densify(model)
    if notes is not None:
        notes += remarks
    return model


def _fill_from(model: nn.Module, source: Source, dtype: torch.dtype | None, options: Options) -> list[str]:
    """Fill a model in place: compressed layers run on their codes. Returns remarks. dtype: of the arithmetic; None for
    that of the model's parameters."""
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


def load_source(
    source: Source,
    dtype: torch.dtype | None = None,
    options: Options = ON_CPU,
    dequantize: bool = False,
    notes: list[str] | None = None,
) -> nn.Module:
    """`load` for a checkpoint that is open already."""
    if (source.quantization is None or dequantize) and (
        options.fuse or options.int8_activations or options.batch_invariant
    ):
        why = f"{source.name} is not compressed" if source.quantization is None else "a dequantized model is dense"
        raise InputError(f"{why}: fuse, int8_activations and batch_invariant do not apply")
    remarks: list[str] = []
    if source.quantization is None:
        stored_in(source)  # refuses compressed tensors without a quantization_config
        network = load_dense(source, dtype, remarks)
    elif dequantize:
        network = load_dequantized(source, dtype)
    else:
        network = _on_codes(source, dtype, options, remarks)
    if notes is not None:
        notes += [*source.weights.remarks, *remarks, *(f"not loaded: {words}" for words in totals(beside(source)))]
    return network.to(options.device)


def _on_codes(source: Source, dtype: torch.dtype | None, options: Options, notes: list[str]) -> nn.Module:
    make_known()
    config = read_config(source)
    config.__dict__.pop("quantization_config", None)  # it is handed over as the configuration of our quantizer
    path: str | None = str(source.path)
    arguments: dict[str, Any] = {"config": config, "dtype": "auto" if dtype is None else dtype}
    if isinstance(source.weights, ViewedFiles):  # transformers finds other tensors in the files
        path, tensors = None, source.weights.tensors(source.weights)
        arguments |= {"state_dict": tensors, "dtype": dtype or config.dtype}
    quantizer = LowBitConfig(source.quantization, source, options)
    network = from_pretrained(source, path, notes, strict=True, quantization_config=quantizer, **arguments)
    notes += network.hf_quantizer.notes  # type: ignore[union-attr, arg-type]
    return network
