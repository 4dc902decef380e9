"""`compress.load`: a model from any checkpoint, compressed ones on their codes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.base.errors import InputError
from compress.checkpoint.read.compressed_layers import stored_in
from compress.checkpoint.read.pretrained import from_pretrained, load_dense, read_config
from compress.checkpoint.read.source import Source, find_source
from compress.checkpoint.read.unplaced_tensors import beside, totals
from compress.checkpoint.read.views import ViewedFiles
from compress.inference.load.conversions import Options, on
from compress.inference.load.custom_modules import load_into
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
    """`load` into a module of the caller."""
    if source.quantization is None:
        raise InputError(f"{source.name} is not compressed; read it with load_state_dict, or leave `into` out")
    if options.fuse:
        raise InputError("fuse is for models of transformers; leave it out, or `into`")
    if dequantize and (options.int8_activations or options.batch_invariant):
        raise InputError("a dequantized model is dense: int8_activations and batch_invariant do not apply")
    remarks = load_into(model, source, dtype, replace(options, fuse=False, steps=False))
    if dequantize:
        densify(model)
    if notes is not None:
        notes += remarks
    return model


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
