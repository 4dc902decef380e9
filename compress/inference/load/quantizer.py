"""The quantizer by which transformers loads a model on our kernels, and `compress.register()`.

transformers calls a quantizer to prepare a model before its weights are read and to finish it afterwards. `load` names
ours, `compress`, which replaces nothing. `register` puts it in front of transformers' own for
compressed-tensors: a checkpoint with integer or float8 weights then runs on our kernels instead of being decompressed
at its first forward. Layouts that we cannot run, and models loaded with `CompressedTensorsConfig(dequantize=True)`,
still go to transformers' own.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.quantizers import auto
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from compress.base.errors import InputError
from compress.checkpoint.read.source import Source
from compress.checkpoint.read.weight_files import weight_files
from compress.inference.load.assembly import prepare
from compress.inference.load.conversions import Options, convert
from compress.inference.load.dense_layers import densify
from compress.model.experts import Experts
from compress.model.split_experts import joins_experts
from compress.weights.compressed_tensors import read_cache_scheme, scheme_for
from compress.weights.own_config import METHOD, caches_of

THEIRS = "compressed-tensors"


class LowBitConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The configuration of `LowBitQuantizer`. quantization: the checkpoint's quantization_config; words: its keys, as
    transformers passes them for a checkpoint whose method is ours. source: the checkpoint, where it is open already."""

    def __init__(
        self,
        quantization: Mapping[str, Any] | None = None,
        source: Source | None = None,
        options: Options | None = None,
        **words: Any,
    ) -> None:
        self.quant_method = METHOD
        self.quantization = quantization or {**words, "quant_method": METHOD}
        self.source, self.options = source, options or Options()

    def __deepcopy__(self, memo: dict[int, Any]) -> "LowBitConfig":
        return copy(self)  # transformers copies configurations often; this one has an entry for every layer

    def to_dict(self) -> dict[str, Any]:
        """The configuration to save with the weights: the checkpoint's own."""
        return dict(self.quantization)

    def to_diff_dict(self) -> dict[str, Any]:
        return self.to_dict()


class LowBitQuantizer(HfQuantizer):  # type: ignore[misc]
    """The quantizer that transformers calls: `prepare` before weights are read, `convert` afterwards."""

    requires_calibration = True
    quantization_config: LowBitConfig

    def __init__(self, quantization_config: LowBitConfig, **arguments: Any) -> None:
        super().__init__(quantization_config, **{**arguments, "pre_quantized": True})
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
            config = {"quantization_config": dict(self.quantization_config.quantization)}
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
        config = self.quantization_config
        self.notes = convert(model, caches_of(config.quantization), config.options)
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


def register() -> None:
    """Make `from_pretrained` of transformers run the compressed layers of a checkpoint on our kernels, as
    `compress.load` does, for the rest of this process. Calling it again changes nothing."""
    make_known()
    auto.AUTO_QUANTIZER_MAPPING[THEIRS] = _quantizer_of


def make_known() -> None:
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
