"""Language models that are to be measured: opened, checked, and loaded as dense weights where that is the same."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.base.errors import InputError
from compress.checkpoint.read.compressed_layers import stored_in
from compress.checkpoint.read.pretrained import read_config, tokenizer_of, tokens_of
from compress.checkpoint.read.source import Source, find_source
from compress.inference.load.conversions import on
from compress.inference.load.loading import load_source
from compress.model.vocabulary import common_tokens

Model = nn.Module | Source


def open_model(model: nn.Module | str | Path, trusted: bool) -> Model:
    """A model in memory, or a checkpoint, opened once for all that is asked of it."""
    return model if isinstance(model, nn.Module) else find_source(str(model), trusted)


def config_of(model: Model) -> Any:
    """The configuration, without loading weights. Raises InputError where it has no vocabulary."""
    config: Any = read_config(model) if isinstance(model, Source) else getattr(model, "config", None)
    if not isinstance(getattr(config, "vocab_size", None), int):
        raise InputError(f"{type(config or model).__name__} has no vocabulary; perplexity and KL need a language model")
    return config


def first_tokenizer(*models: Model | None) -> Any:
    """The tokenizer of the first of them that was given by name. Raises InputError where none was."""
    return tokenizer_of(next((model for model in models if isinstance(model, Source)), None))


def load_dense(model: Model, dtype: torch.dtype | None, device: torch.device) -> Any:
    """The network of a model. A checkpoint's weights are dequantized, which is exact, unless inputs are quantized too:
    only codes can show the effect of that. A model in memory is returned unchanged."""
    if not isinstance(model, Source):
        return model
    layers = stored_in(model).layers
    weights_only = all(stored.scheme.inputs is None for stored in layers.values())
    return load_source(model, dtype, on(device), dequantize=bool(layers) and weights_only)


def load_predictor(model: Model, dtype: torch.dtype | None, device: torch.device) -> Any:
    """A network that predicts the next token. Raises InputError for one that predicts none."""
    network = load_dense(model, dtype, device)
    if not hasattr(network, "generate") or network.get_output_embeddings() is None:
        raise InputError(f"{type(network).__name__} predicts no next token; perplexity and KL need a language model")
    return network


def common_vocabulary(model: Model, reference: Model) -> int | None:
    """The number of tokens that a model and its reference have in common; None where that is all of both. Raises
    InputError for other vocabularies."""
    sizes = {"the model": config_of(model).vocab_size, "the reference": config_of(reference).vocab_size}
    if len({*sizes.values()}) == 1:
        return None
    found = {name: tokens_of(m) for name, m in zip(sizes, (model, reference), strict=True) if isinstance(m, Source)}
    return common_tokens(sizes, {name: each for name, each in found.items() if each is not None}, "KL")
