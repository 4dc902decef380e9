"""`compress.load`, and `compress.register()`, which makes `from_pretrained` of transformers load in the same way.

transformers calls a quantizer to prepare a model before its weights are read and to finish it afterwards. `load` uses
our quantizer under the name `compress`, which replaces nothing. `register` puts it in front of transformers' own for
compressed-tensors: a checkpoint with integer or float8 weights then runs on our kernels instead of being decompressed
at its first forward. Layouts that we cannot run, and models loaded with `CompressedTensorsConfig(dequantize=True)`,
still go to transformers' own.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from compress.base.errors import InputError
from compress.checkpoint.read.compressed_layers import stored_in
from compress.checkpoint.read.pretrained import from_pretrained, load_dense, read_config
from compress.checkpoint.read.source import Source, find_source
from compress.checkpoint.read.unplaced_tensors import beside, totals
from compress.checkpoint.read.views import ViewedFiles
from compress.checkpoint.read.weight_files import weight_files
from compress.inference.layers.compressed_layers import compressed_layers, device_of, lay_in_strips, weights_on_codes
from compress.inference.layers.experts import stack_experts
from compress.inference.layers.linear import PackedLinear, QuantLinear
from compress.inference.load.assembly import finish, fuse, prepare
from compress.inference.load.custom_modules import load_into
from compress.inference.load.dense_layers import densify
from compress.inference.load.dense_model import load_dequantized
from compress.inference.load.steps import attend_here
from compress.inference.steps.block import install
from compress.model.experts import Experts
from compress.model.split_experts import joins_experts
from compress.weights.compressed_tensors import read_cache_scheme, scheme_for
from compress.weights.own_config import METHOD, caches_of

THEIRS = "compressed-tensors"
# Inputs that share a scale where x is rounded to int8 for speed alone: few, so that one large value affects few others.
INPUT_GROUP = 128
CPU = torch.device("cpu")


class _Undivided(dict[str, Any]):
    """A dictionary that copies share: transformers copies a configuration a dozen times on the way to a model, and this
    one holds an entry for every layer, and the open checkpoint."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Undivided":
        return self


class LowBitConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The configuration of `LowBitQuantizer`. quantization: the checkpoint's quantization_config. fuse, device: as in
    `load`. source: the checkpoint, where it is open already. unready: as in `finish`."""

    def __init__(
        self,
        quantization: Mapping[str, Any] | None = None,
        fuse: bool | None = None,
        device: str | None = None,
        source: Source | None = None,
        unready: bool = False,
        **words: Any,
    ) -> None:
        self.quant_method = METHOD
        # For a checkpoint whose method is ours, transformers passes the keys of its configuration as arguments.
        self.quantization = _Undivided(quantization or {**words, "quant_method": METHOD})
        self.fuse, self.device, self.source, self.unready = fuse, device, source, unready

    def __deepcopy__(self, memo: dict[int, Any]) -> "LowBitConfig":
        return copy(self)

    def to_dict(self) -> dict[str, Any]:
        """The configuration to save with the weights: the checkpoint's own."""
        return dict(self.quantization)

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()


class LowBitQuantizer(HfQuantizer):  # type: ignore[misc]
    """The quantizer that transformers calls: `prepare` before weights are read, `finish` afterwards."""

    requires_calibration = True
    quantization_config: LowBitConfig

    def __init__(self, quantization_config: LowBitConfig, **arguments: Any) -> None:
        super().__init__(quantization_config, **arguments)
        self.notes: list[str] = []
        self.experts_apart = False

    def _process_model_before_weight_loading(
        self,
        model: nn.Module,
        dtype: torch.dtype | None = None,
        checkpoint_files: Sequence[str] | None = None,
        **_: Any,
    ) -> None:
        source, self.quantization_config.source = self.quantization_config.source, None  # so that no file stays open
        if source is None:
            if not checkpoint_files:
                raise InputError("a compressed model is read from files; give a directory or hub id, not a state_dict")
            folder = Path(checkpoint_files[0]).parent
            config = {"quantization_config": self.quantization_config.quantization}
            source = Source(str(folder), folder, config, weight_files(folder))
        prepare(model, source, torch.get_default_dtype() if dtype is None else dtype)
        self.experts_apart = any(isinstance(module, Experts) for module in model.modules())

    def update_weight_conversions(self, weight_conversions: list[Any], *model: nn.Module) -> list[Any]:
        """The steps that transformers takes from names and tensors of the checkpoint to those of the model, without
        those that join experts, where the model has them apart.

        model: transformers hands it over from 5.21 on; its own hook takes what ours is given.
        """
        kept = [step for step in weight_conversions if not (self.experts_apart and joins_experts(step))]
        return list(super().update_weight_conversions(kept, *model))

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> nn.Module:
        options = self.quantization_config
        target = None if options.device is None else torch.device(options.device)
        finish(model, target, caches_of(options.quantization), options.unready)
        _count_codes()
        compressed = next(compressed_layers(model), None) is not None
        if compressed and (options.fuse or (options.fuse is None and device_of(model).type == "cuda")):
            if target is not None:
                model.to(target)
            self.notes += fuse(model)
        lay_in_strips(model)
        stack_experts(model)
        return model

    def _dequantize(self, model: nn.Module, dtype: torch.dtype | str | None = None) -> nn.Module:
        """Implements `model.dequantize()`. Raises InputError where dense weights would not compute the same."""
        densify(model)
        own: Any = model
        # transformers reads dtype from the configuration, which holds a word for it once the model was saved.
        wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        return model if wanted in (None, own.dtype) else nn.Module.to(model, wanted)

    @property
    def is_compileable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """True: inputs take gradients, so that modules before a layer and adapters train; the codes do not change."""
        return True

    def is_serializable(self) -> bool:
        return True


def runnable(quantization: Mapping[str, Any]) -> bool:
    """True for a quantization_config of compressed-tensors that our kernels can run."""
    groups = quantization.get("config_groups") or {}
    cache = quantization.get("kv_cache_scheme")
    if not groups and not cache:
        return False
    try:
        if cache:
            read_cache_scheme(cache)
        for group in groups.values():
            scheme_for("layer", {**quantization, "config_groups": {"group": {**group, "targets": ["layer"]}}})
    except InputError:
        return False
    return True


_their_quantizer = auto.AUTO_QUANTIZER_MAPPING[THEIRS]


def _quantizer_of(quantization_config: Any, **arguments: Any) -> HfQuantizer:
    """Our quantizer for weights that stay compressed, transformers' own for everything else."""
    inner = getattr(quantization_config, "quantization_config", None)
    if inner is None or getattr(quantization_config, "dequantize", False):
        return _their_quantizer(quantization_config, **arguments)
    quantization = inner.model_dump(mode="json", exclude_none=True)
    if not runnable(quantization):
        return _their_quantizer(quantization_config, **arguments)
    return LowBitQuantizer(LowBitConfig(quantization), **arguments)


@cache
def _count_codes() -> None:
    """Make `model.num_parameters()` count codes, too, in this process. transformers counts torch's parameters and asks
    no quantizer; codes are buffers, but stand for weights."""
    # Imported here, because this import loads all of transformers.
    from transformers import PreTrainedModel

    parameters = PreTrainedModel.num_parameters

    @wraps(parameters)
    def count(self: nn.Module, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        codes = 0 if only_trainable else weights_on_codes(self, exclude_embeddings)
        return int(parameters(self, only_trainable, exclude_embeddings)) + codes

    PreTrainedModel.num_parameters = count


def register() -> None:
    """Make `from_pretrained` of transformers run the compressed layers of a checkpoint on our kernels, as
    `compress.load` does, for the rest of this process. Calling it again changes nothing."""
    _make_known()
    auto.AUTO_QUANTIZER_MAPPING[THEIRS] = _quantizer_of


def _make_known() -> None:
    """Add our quantizer, under its own name, to those of transformers."""
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING.setdefault(METHOD, LowBitConfig)
    auto.AUTO_QUANTIZER_MAPPING.setdefault(METHOD, LowBitQuantizer)


@contextmanager
def transformers_alone() -> Iterator[None]:
    """Undoes `register` for the body: transformers loads compressed-tensors checkpoints as it does without us."""
    before = auto.AUTO_QUANTIZER_MAPPING[THEIRS]
    auto.AUTO_QUANTIZER_MAPPING[THEIRS] = _their_quantizer
    try:
        yield
    finally:
        auto.AUTO_QUANTIZER_MAPPING[THEIRS] = before


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

    model: directory, hub id or 'demo'. dtype: of the arithmetic and of tensors that are not compressed; by default the
    checkpoint's own. dequantize: load dense weights instead, exactly the values of the codes. fuse: multiply layers
    that read one tensor together (None: on a GPU only). int8_activations: also round the inputs of weight-only layers
    to int8, one scale per token and 128 inputs; faster on a CPU, with a small error. batch_invariant: a compressed
    layer returns the same bits for a token, however many tokens are multiplied with it; slower. Norms, attention and
    dense layers are not made invariant: a note counts them. trust_remote_code: run Python code that comes with the
    model. into: a module of the class and sizes that were compressed, for a checkpoint of a model that is not of
    transformers; it is filled in place, and returned. notes: takes remarks for the person.

    Raises CheckpointError, which names the tensor, for a checkpoint that is damaged or of an unknown format, before its
    weights are read; InputError for options that do not apply to the checkpoint.
    """
    options: dict[str, Any] = {"dequantize": dequantize, "fuse": fuse, "int8_activations": int8_activations}
    options |= {"batch_invariant": batch_invariant, "notes": notes}
    source = find_source(str(model), trust_remote_code)
    if into is not None:
        return _into(into, source, dtype, torch.device(device), options)
    return load_source(source, dtype, torch.device(device), **options)


def _into(
    model: nn.Module, source: Source, dtype: torch.dtype | None, target: torch.device, options: Mapping[str, Any]
) -> nn.Module:
    """`load` into a module of the caller."""
    if source.quantization is None:
        raise InputError(f"{source.name} is not compressed; read it with load_state_dict, or leave `into` out")
    if options["fuse"]:
        raise InputError("fuse is for models of transformers; leave it out, or `into`")
    if options["dequantize"] and (options["int8_activations"] or options["batch_invariant"]):
        raise InputError("a dequantized model is dense: int8_activations and batch_invariant do not apply")
    load_into(model, source, dtype, target)
    if options["dequantize"]:
        densify(model)
    if options["int8_activations"]:
        _round_inputs(model)
    if options["batch_invariant"]:
        remark = _make_batch_invariant(model)
        if options["notes"] is not None:
            options["notes"].append(remark)
    return model


def load_source(
    source: Source,
    dtype: torch.dtype | None = None,
    target: torch.device = CPU,
    *,
    dequantize: bool = False,
    fuse: bool | None = None,
    int8_activations: bool = False,
    batch_invariant: bool = False,
    notes: list[str] | None = None,
    unready: bool = False,
) -> nn.Module:
    """`load` for a checkpoint that is open already. unready: as in `finish`."""
    beside = "fuse, int8_activations and batch_invariant do not apply"
    if source.quantization is None:
        stored_in(source)
        if fuse or int8_activations or batch_invariant:
            raise InputError(f"{source.name} is not compressed: {beside}")
        network = load_dense(source, dtype, notes).to(target)
        return _noted(network, source, notes)
    if dequantize:
        if fuse or int8_activations or batch_invariant:
            raise InputError(f"a dequantized model is dense: {beside}")
        return _noted(load_dequantized(source, dtype).to(target), source, notes)
    _make_known()
    config = read_config(source)
    config.quantization_config = _Undivided(
        quant_method=METHOD,
        quantization=_Undivided(source.quantization),
        fuse=fuse,
        device=str(target),
        source=source,
        unready=unready,
    )
    remarks: list[str] = []
    arguments: dict[str, Any] = {"config": config, "dtype": "auto" if dtype is None else dtype}
    path: str | None = str(source.path)
    if isinstance(source.weights, ViewedFiles):  # transformers finds other tensors in the files
        path, tensors = None, source.weights.tensors(source.weights)
        arguments |= {"state_dict": tensors, "dtype": dtype or config.dtype}
    network = from_pretrained(source, path, remarks, strict=True, **arguments)
    quantizer: Any = network.hf_quantizer
    remarks += quantizer.notes
    if int8_activations:
        _round_inputs(network)
    if target.type == "cpu":
        attend_here(network)
    network = network.to(target)
    if target.type == "cpu" and not unready:
        install(network)
    if batch_invariant:
        remarks.append(_make_batch_invariant(network))
    if notes is not None:
        notes += remarks
    return _noted(network, source, notes)


def _noted(network: nn.Module, source: Source, notes: list[str] | None) -> nn.Module:
    """The network. notes: takes a line for each kind of tensors that it has no place for."""
    if notes is not None:
        notes += [f"not loaded: {words}" for words in totals(beside(source))]
    return network


def _round_inputs(network: nn.Module) -> None:
    found = [layer for _, layer in compressed_layers(network) if isinstance(layer, PackedLinear)]
    if not found:
        rounding = all(layer.scheme.inputs is not None for _, layer in compressed_layers(network))
        why = "inputs are quantized already" if rounding else "layers are not codes on a grid and nothing else"
        raise InputError(f"int8_activations is for weight-only layers; this checkpoint's {why}")
    for layer in found:
        if layer.scheme.inputs is None:
            # The last group of a row may be shorter.
            layer.input_group = INPUT_GROUP if layer.in_features > INPUT_GROUP else -1
            layer.lay_in_strips()
    stack_experts(network)


def _make_batch_invariant(network: nn.Module) -> str:
    """Make every compressed layer batch-invariant. Returns a note on the modules that are not; raises InputError, and
    changes nothing, where a layer cannot be."""
    layers = dict(compressed_layers(network))
    for name, layer in layers.items():
        reasons = layer.why_not_batch_invariant(layer.scheme, layer.in_features, layer.dtype, layer.device)
        if reasons:
            raise InputError(f"batch_invariant: {name} ({layer.scheme}) cannot be: {'; '.join(reasons)}")
    for module in network.modules():
        if isinstance(module, QuantLinear):
            module.batch_invariant = True
    stack_experts(network)
    dense = sum(isinstance(module, nn.Linear) for module in network.modules())
    return (
        f"batch-invariant: {len(layers)} compressed layers; norms, attention and dense layers (of these {dense}) are "
        "not held to it"
    )
