"""Types and checks of a checkpoint's JSON files: config.json with its `quantization_config`, and the index.

Keys that no reader here uses are allowed. The readers (`source`, `scheme`) check that keys agree with each other.
"""

import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, TypedDict

from compress.base.errors import CheckpointError
from compress.base.schema import fits
from compress.weights import own_config

METHOD, GPTQ, AWQ, AUTO_ROUND = "compressed-tensors", "gptq", "awq", "auto-round"
# Keys of a configuration that count modules: num_hidden_layers, n_layer, depths, num_experts ...
COUNTS = re.compile(r"(^|_)(layers?|depths?|experts)$")
NUMBER = ("num_", "n_")  # others are places, like vision_feature_layer: -2
LABELS = "num_labels"  # transformers makes a name for each
Header = tuple[tuple[int, ...], str]  # of a tensor: its shape, and safetensors' name of its dtype
FLASH = "flash_attention_"
FEW = 1000  # modules that are made in seconds, allowed whatever the files hold


class Numbers(TypedDict, total=False):
    """The rounding of weights, inputs, outputs or caches, as compressed-tensors describes it."""

    num_bits: int | None
    type: str | None
    symmetric: bool
    dynamic: bool | str | None
    strategy: str | None
    group_size: int | None
    actorder: str | bool | None


class ConfigGroup(TypedDict, total=False):
    targets: list[str] | None
    format: str | None
    weights: Numbers | None
    input_activations: Numbers | None
    output_activations: Numbers | None


class CompressedTensorsConfig(TypedDict, total=False):
    format: str | None
    ignore: list[str] | None
    config_groups: dict[str, ConfigGroup] | None
    kv_cache_scheme: Numbers | None


class AnyMethod(TypedDict, total=False):
    """A `quantization_config` of any tool."""

    quant_method: str | None


class Config(TypedDict, total=False):
    architectures: list[str] | None
    transformers_weights: str | None
    quantization_config: AnyMethod | None


class LayerWords(TypedDict, total=False):
    """The entry of `dynamic` for the layers that its pattern matches."""

    bits: int
    group_size: int | None
    sym: bool | None


class GPTQNumbers(LayerWords, total=False):
    checkpoint_format: str | None
    format: str | None
    pack_dtype: str | None
    is_marlin_format: bool | None
    dynamic: dict[str, LayerWords] | None
    packing_format: str | None  # this and the following: AutoRound's
    data_type: str
    act_bits: int | None
    extra_config: dict[str, LayerWords] | None


class AWQNumbers(TypedDict, total=False):
    bits: int
    group_size: int | None
    version: str | None
    zero_point: bool | None
    backend: str | None


# {quant_method: the type of its quantization_config}.
QUANTIZATIONS: dict[Any, Any] = {
    METHOD: CompressedTensorsConfig,
    own_config.METHOD: own_config.OwnQuantization,
    GPTQ: GPTQNumbers,
    AUTO_ROUND: GPTQNumbers,
    AWQ: AWQNumbers,
}

# Settings of generation in generation_config.json, or in config.json, that one answer depends on, by their types.
GENERATION: dict[Any, str] = {
    int | list[int] | None: "bos_token_id eos_token_id pad_token_id decoder_start_token_id forced_bos_token_id "
    "forced_eos_token_id",
    list[int] | None: "suppress_tokens begin_suppress_tokens",
    list[list[int]] | None: "bad_words_ids",
    int | None: "max_length max_new_tokens min_length min_new_tokens num_beams num_return_sequences "
    "no_repeat_ngram_size top_k",
    float | None: "top_p min_p typical_p temperature repetition_penalty length_penalty max_time",
    bool | None: "do_sample use_cache output_attentions output_hidden_states output_scores output_logits "
    "return_dict_in_generate",
    str | None: "cache_implementation",
}


class Index(TypedDict):
    weight_map: dict[str, str]


def check_config(config: Any, path: Path) -> None:
    """Raises CheckpointError, which names the key, for a configuration that cannot be read."""
    fits(config, Config, path)
    _check_local(config, path)
    quantization = config.get("quantization_config") or {}
    fits(quantization, QUANTIZATIONS.get(quantization.get("quant_method"), AnyMethod), path, "quantization_config")


def _check_local(config: Mapping[str, Any], path: Path) -> None:
    """Raises CheckpointError for code that transformers would fetch and run for a configuration: kernels of the hub,
    named by owner/name, and those that stand for a package that is missing."""
    for key, name in _implementations(config):
        if "/" in name:
            raise CheckpointError(
                f"{path} names {name!r} ({key}), a kernel of the hub, which transformers would fetch and run; take it "
                "out"
            )
        asked = name.removeprefix("paged|")
        if asked.startswith(FLASH) and find_spec("kernels") and not _has_flash(asked.removeprefix(FLASH)):
            raise CheckpointError(
                f"{path} asks for {name!r} ({key}), which is not installed, and for which transformers would fetch a "
                "kernel of the hub; install it, or take it out"
            )


def _has_flash(version: str) -> bool:
    from transformers.utils import import_utils

    return bool(getattr(import_utils, f"is_flash_attn_{version}_available", lambda: False)())


def _implementations(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(Key, name) of the implementations that a configuration asks for, its parts' among them."""
    for key, value in config.items():
        if key.removesuffix("_internal").endswith("_implementation"):
            names = value.values() if isinstance(value, dict) else [value]
            yield from ((key, name) for name in names if isinstance(name, str))
        elif isinstance(value, dict):
            yield from _implementations(value)


def check_generation(settings: Any, path: Path) -> None:
    """Raises CheckpointError, which names the key, for settings of generation of another type than they must have."""
    fits(settings, dict[str, Any], path)
    for kind, names in GENERATION.items():
        for name in names.split():
            if name in settings:
                fits(settings[name], kind, path, name)


def check_counts(config: Mapping[str, Any], headers: Mapping[str, Header], path: Path) -> None:
    """Raises CheckpointError for a configuration that asks for far more layers, experts or labels than the files can
    fill, before they are made: a million of them takes hours. Up to FEW are left to the loader, which names the missing
    tensor. Fewer than no layers are refused, too: transformers takes them for none."""
    values = sum(prod(shape) for shape, _ in headers.values())
    for key, count in _counts(config):
        what = key.rpartition(".")[2]
        if what == LABELS and count > max(FEW, values):
            raise CheckpointError(f"{path} asks for {count} labels ({key}) and the weight files hold {values} values")
        if what.startswith(NUMBER) and count < 0:
            raise CheckpointError(f"{path} asks for {count} of {key}; it must be 0 or more")
        if what != LABELS and count > max(FEW, len(headers)):
            noun = "experts" if what.endswith("experts") else "layers"
            raise CheckpointError(
                f"{path} asks for {count} {noun} ({key}) and the weight files hold {len(headers)} tensors"
            )


def _counts(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int]]:
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _counts(value, f"{prefix}{key}.")
        elif COUNTS.search(key) or key == LABELS:
            listed = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, int)]
            places = (
                len(listed) > 1 and all(a < b for a, b in pairwise(listed)) and not key.endswith(("depth", "depths"))
            )
            yield f"{prefix}{key}", len(listed) if places else sum(listed)  # `moe_layers` names places of layers
