"""Tensors of a checkpoint for which its class in transformers has no place.

Checkpoints hold more than transformers runs: heads that predict several tokens, which engines draft with, or other
parts of a system of models. They are no part of the model that is compressed; a run keeps them as they are.
"""

import copy
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from compress.checkpoint.read.coded_heads import LAYER
from compress.checkpoint.read.compressed_layers import idle_biases, stored_in
from compress.checkpoint.read.pretrained import empty_model, meta_model, read_config, unstored_buffers
from compress.checkpoint.read.source import Source, once
from compress.checkpoint.read.weight_files import tensor_bytes
from compress.model.edits.configuration_search import configs_of
from compress.model.split_experts import loading_steps, split_experts
from compress.model.splitting.split_layers import split_layers

AHEAD = "multi-token-prediction head"
DRAFT = "draft head"
BEHIND = "layer behind those that the configuration counts"
AHEAD_WORDS = re.compile(r"(^|\.)(mtp|nextn|multi_token)[^.]*\.")
AHEAD_FIELDS = re.compile(r"(^|_)(mtp|nextn|multi_token)(_|$)")
DRAFT_WORDS = re.compile(r"(^|\.)([^.]*draft|eagle|medusa)[^.]*\.")


@dataclass(frozen=True)
class KeptTensor:
    """A tensor that the model has no place for, which a run keeps. kind: in words."""

    kind: str
    shape: tuple[int, ...]
    bytes: int

    @property
    def elements(self) -> int:
        return prod(self.shape)


@once
def beside(source: Source) -> Mapping[str, KeptTensor]:
    """{name in the files: tensor} of a checkpoint's tensors that the model has no place for. Raises CheckpointError
    where transformers makes no model."""
    names, computed = _unplaced_names(source)
    config, kind = read_config(source), type(empty_model(source)).__name__
    kept = {}
    for name, header in source.headers.items():
        if name in names and name not in computed:
            kept[name] = KeptTensor(_kind(name, config, kind), header[0], tensor_bytes(name, *header))
    return kept


def recomputed_names(source: Source) -> list[str]:
    """Names of a checkpoint's tensors that the model computes by itself, like rotary tables: they need not be kept."""
    return _unplaced_names(source)[1]


def matrices(tensors: Mapping[str, KeptTensor]) -> dict[str, str]:
    """{module, or tensor of no plain weight: kind} of the matrices among these tensors."""
    return {name.removesuffix(".weight"): each.kind for name, each in tensors.items() if len(each.shape) > 1}


def totals(tensors: Mapping[str, KeptTensor]) -> list[str]:
    """Words for tensors, a line for each kind: number, size, and the name of one."""
    kinds: dict[str, dict[str, int]] = {}
    for name, tensor in tensors.items():
        kinds.setdefault(tensor.kind, {})[name] = tensor.bytes
    return [
        f"{kind}, {tensor_count(len(sizes))}, {sum(sizes.values()) / 1e6:,.1f} MB, like {next(iter(sizes))}"
        for kind, sizes in kinds.items()
    ]


def tensor_count(tensors: int) -> str:
    """Words for a number of tensors."""
    return f"{tensors} tensor{'' if tensors == 1 else 's'}"


def without_heads(config: Any) -> Any:
    """A copy of a configuration that counts no heads which predict several tokens."""
    found = copy.deepcopy(config)
    for _, each in configs_of(found):
        for name, value in vars(each).items():
            if AHEAD_FIELDS.search(name) and (type(value) is int or (type(value) is bool and "use" in name)):
                setattr(each, name, type(value)(0))
    return found


def predicts_ahead(names: Iterable[str], config: Any) -> bool:
    """True where one of these tensors is of a head that predicts several tokens."""
    return any(_kind(name, config, "") == AHEAD for name in names)


def _kind(name: str, config: Any, model: str) -> str:
    """Words for a tensor without a place."""
    text = config.get_text_config()
    layer, count = LAYER.search(name), getattr(text, "num_hidden_layers", None)
    behind = layer is not None and isinstance(count, int) and int(layer[1]) >= count
    ahead = behind and bool(getattr(text, "num_nextn_predict_layers", 0))
    if ahead or AHEAD_WORDS.search(name):
        return AHEAD
    if behind:
        return BEHIND
    return DRAFT if DRAFT_WORDS.search(name) else f"no part of {model}"


@once
def _unplaced_names(source: Source) -> tuple[set[str], list[str]]:
    """(Names of the tensors without a place; those of them that the model computes by itself.)"""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    stored = stored_in(source)
    parts = {name for layer in stored.layers.values() for name in layer.parts.values()} | idle_biases(source)
    parts |= {name for held in (stored.caches.scales if stored.caches else {}).values() for name, _ in held.values()}
    model = meta_model(source)
    steps, base = loading_steps(model), getattr(model, "base_model_prefix", "")
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    known: dict[str, Any] = dict(model.state_dict())
    split_experts(model, source.headers)
    split_layers(model, set(stored.layers))
    apart = set(model.state_dict())  # with experts, LSTMs and attentions as linear layers, as in these files
    buffers = unstored_buffers(source)
    lost, computed = set[str](), []
    for name in sorted(source.headers, key=dot_natural_key):
        if name in parts or name in apart:
            continue
        own, _ = rename_source_key(name, renamings, converters, base, known)
        if own in known or name in known or own in apart:
            continue
        plain, _ = rename_source_key(name, [], [], base, known)
        if plain in known:
            continue
        lost.add(name)
        if own in buffers or _last(own) in {_last(buffer) for buffer in buffers}:
            computed.append(name)
    return lost, computed


def _last(name: str) -> str:
    return ".".join(name.split(".")[-2:])
