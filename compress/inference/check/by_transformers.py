"""Opens a checkpoint as a person would who has transformers and compressed-tensors, and nothing else.

compressed-tensors decompresses a whole model at its first forward; here it does so block by block.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from compress.base.errors import CheckpointError
from compress.checkpoint.read.compressed_layers import stored_in
from compress.checkpoint.read.fused import mixed_experts
from compress.checkpoint.read.pretrained import empty_model, from_pretrained
from compress.checkpoint.read.source import Source
from compress.inference.load.block_streaming import Opening
from compress.inference.load.quantizer import transformers_alone
from compress.model.experts import Experts, SortedExperts
from compress.model.layers import transposed_weights
from compress.model.split_experts import NUMBERED, joins, joins_experts, loading_steps
from compress.weights.compressed_tensors import needs_dequantizing, read_scheme
from compress.weights.own_config import is_own
from compress.weights.scheme import Scheme

# Formats of which transformers 5.23 fails to merge experts.
UNMERGED = ("int-quantized", "mxfp8-quantized")
# The attribute that holds compressed-tensors' hook for decompressing a whole model at its first forward.
WHOLE = "ct_decompress_hook"
NOT_LOADED = "none"


def load_with_transformers(source: Source, dtype: torch.dtype | None = None) -> tuple[nn.Module, str]:
    """(The checkpoint as any user of transformers loads it, the way: "default" or "dequantize=True").

    A quantized checkpoint needs compressed-tensors. The default load takes no packed asymmetric weights and no packed
    embeddings, and fails for architectures whose initialization reads the weights (T5). Dequantizing while loading
    works for checkpoints of one scheme; it would read all schemes as the first. Raises CheckpointError where neither
    works (`initializes_codes` tells a reason for that).
    """
    with transformers_alone():
        return _load(source, dtype or "auto")


def _load(source: Source, dtype: torch.dtype | str) -> tuple[nn.Module, str]:
    quantization = source.quantization or {}
    groups = (quantization.get("config_groups") or {}).values()
    schemes = [read_scheme(group, quantization.get("format"), f"a layer of {source.path}") for group in groups]
    if not any(needs_dequantizing(scheme) for scheme in schemes):
        try:
            return from_pretrained(source, str(source.path), dtype=dtype), "default"
        except CheckpointError:
            if len(groups) != 1:
                raise
    elif len(groups) > 1:
        raise CheckpointError("packed asymmetric weights beside layers of another scheme")
    from transformers import CompressedTensorsConfig

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers remarks that it was given a second configuration
        config = CompressedTensorsConfig(dequantize=True)
        return from_pretrained(source, str(source.path), dtype=dtype, quantization_config=config), "dequantize=True"


def misread_experts(model: nn.Module, schemes: Mapping[str, Scheme]) -> str | None:
    """The reason why transformers makes something else of single experts in a checkpoint than their codes stand for, or
    cannot load them; None where it reads them right, or there are none. model: with its experts apart. schemes: of
    layers, by their names in the model or in the files."""
    apart = [module for module in model.modules() if isinstance(module, Experts)]
    held = {name: NUMBERED.match(f"{name}.weight") for name in schemes}
    of_experts = [schemes[name] for name, found in held.items() if found is not None and found[1].endswith("experts")]
    if not apart or not of_experts or isinstance(apart[0], SortedExperts):  # loaded one by one, as they are stored
        return None
    if not any(map(joins_experts, loading_steps(model))):
        return "it reads these experts from joined tensors only, and makes random ones in their place"
    codes = [scheme.codes for scheme in of_experts if scheme.codes is not None]
    if any(each.grid.scales == "e4m3" for each in codes):
        return "it reads merged experts without their global scale"
    if any(each.kind in UNMERGED for each in codes):
        return "it cannot merge experts of this scheme"
    if any(scheme.inputs is not None for scheme in of_experts):
        return "it does not round the inputs of merged experts"
    return None


def initializes_codes(error: CheckpointError) -> bool:
    """True for an error of `load_with_transformers` by an initialization that reads the weight of a compressed layer,
    which has codes in its place. transformers before 5.23 initializes so where it dequantizes, too."""
    reason = error.__cause__
    return isinstance(reason, AttributeError) and reason.name == "weight" and hasattr(reason.obj, "weight_packed")


def decompress_by_block(model: nn.Module) -> dict[str, Opening]:
    """{layer: opening} for `run_by_block`, which decompresses layers one block at a time. For a model that transformers
    loaded compressed; its hook that decompresses all layers is removed. Empty for a model without that hook."""
    hook: Any = model.__dict__.get(WHOLE)
    if hook is None:
        return {}
    from compressed_tensors.quantization.utils import is_module_quantized

    hook.remove()
    delattr(model, WHOLE)
    return {n: partial(_decompress, m) for n, m in model.named_modules() if is_module_quantized(m)}


@contextmanager
def _decompress(module: nn.Module) -> Iterator[None]:
    """Has compressed-tensors decompress a module for the body, and restores it afterwards."""
    from compressed_tensors.compressors.base import decompress_module

    own: Any = module
    parameters, buffers, status = dict(module._parameters), dict(module._buffers), own.quantization_status
    decompress_module(module)
    try:
        yield
    finally:
        module._parameters.clear()
        module._buffers.clear()
        module._parameters.update(parameters)
        module._buffers.update(buffers)
        own.quantization_status = status


class NotComparedError(Exception):
    """The reason why a checkpoint is not compared in transformers."""


class UnknownInputsError(NotComparedError):
    """The reason why nothing can be computed with a model, which transformers may load nevertheless."""


class NotLoadedError(NotComparedError):
    """The reason why transformers does not load a checkpoint, or as something else."""


def report_loading(source: Source, why: UnknownInputsError) -> dict[str, str]:
    """The part of a verification about transformers, of a model with which nothing can be computed here."""
    said = f"not compared: {why}"
    if source.quantization is None or is_own(source.quantization) or "model_type" not in source.config:
        return {"transformers": said}
    try:
        return {"transformers": said, "loader": open_by_transformers(source, None)[1]}
    except (NotLoadedError, CheckpointError) as error:
        return {"transformers": f"not compared: {error}", "loader": NOT_LOADED}


def open_by_transformers(source: Source, dtype: torch.dtype | None) -> tuple[nn.Module, str]:
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
