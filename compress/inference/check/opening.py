"""Opens a checkpoint as a person would who has transformers and compressed-tensors, and nothing else."""

import torch
from torch import nn

from compress.base.errors import CheckpointError
from compress.checkpoint.read.compressed_layers import stored_in
from compress.checkpoint.read.fused import mixed_experts
from compress.checkpoint.read.pretrained import empty_model
from compress.checkpoint.read.source import Source
from compress.inference.check.by_transformers import initializes_codes, load_with_transformers, misread_experts
from compress.model.experts import Experts
from compress.model.layers import transposed_weights
from compress.model.split_experts import joins
from compress.weights.compressed_tensors import needs_dequantizing
from compress.weights.own_config import is_own

NOT_LOADED = "none"


class NotComparedError(Exception):
    """The reason why a checkpoint is not compared in transformers."""


class UnknownInputsError(NotComparedError):
    """The reason why nothing can be computed with a model, which transformers may load nevertheless."""


class NotLoadedError(NotComparedError):
    """The reason why transformers does not load a checkpoint, or as something else."""


def only_loaded(source: Source, why: UnknownInputsError) -> dict[str, str]:
    """The part of a verification about transformers, of a model with which nothing can be computed here."""
    said = f"not compared: {why}"
    if source.quantization is None or is_own(source.quantization) or "model_type" not in source.config:
        return {"transformers": said}
    try:
        return {"transformers": said, "loader": opened_by_transformers(source, None)[1]}
    except (NotLoadedError, CheckpointError) as error:
        return {"transformers": f"not compared: {error}", "loader": NOT_LOADED}


def opened_by_transformers(source: Source, dtype: torch.dtype | None) -> tuple[nn.Module, str]:
    """As `load_with_transformers`. Raises NotLoadedError where that is known not to work; CheckpointError elsewhere."""
    schemes, empty = {name: layer.scheme for name, layer in stored_in(source).layers.items()}, empty_model(source)
    if mixed := mixed_experts(schemes):
        raise NotLoadedError(f"it reads all experts of a block by one scheme, and those of {mixed[0]} have several")
    if (why := misread_experts(empty, schemes)) is not None:
        raise NotLoadedError(why)
    try:
        return load_with_transformers(source, dtype)
    except CheckpointError as error:
        if unknown := _unknown_layers(empty):
            raise NotLoadedError(f"it cannot load {unknown} of this scheme ({error})") from None
        if _unknown_mix(source, empty):
            raise NotLoadedError(f"it cannot load this mix of schemes ({error})") from None
        if initializes_codes(error):
            raise NotLoadedError(
                "it cannot load this: its initialization reads weights that are codes here (with one scheme for all "
                "layers, dequantize=True avoids that)"
            ) from None
        raise


def _unknown_mix(source: Source, model: nn.Module) -> bool:
    """True if transformers cannot load a checkpoint in any way: its default load knows neither packed zero points nor
    packed embeddings, and `dequantize=True` reads all layers by the scheme of the first group."""
    if len((source.quantization or {}).get("config_groups") or ()) < 2:
        return False
    tables = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    return any(needs_dequantizing(stored.scheme, name in tables) for name, stored in stored_in(source).layers.items())


def _unknown_layers(empty: nn.Module) -> str:
    """Words for the layers of a model that transformers loads of some families and schemes only."""
    if any(isinstance(module, Experts) for module in empty.modules()):
        return "single experts"
    if transposed_weights(empty):
        return "a Conv1D"
    return "a model whose weights it joins or splits while it loads them" if joins(empty) else ""
