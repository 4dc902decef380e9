"""Shares of a class's weights, at the sizes of its default configuration, from what became of a small model of it.

A small model keeps a layer of each kind, so a parameter of the large one has the fate of that of the same name with
other numbers.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from compress.checkpoint.write.coverage import OTHERS
from compress.checkpoint.write.record import RunRecord
from compress.model.convolution import is_convolution
from compress.model.experts import GATE

CODES = "codes"
USUAL = ("embedding", "output head", GATE, OTHERS)  # dense by default in every model
HELD = "a convolution, which no checkpoint format holds as codes"


def fates(model: nn.Module, record: RunRecord) -> dict[str, str]:
    """{parameter, its numbers left out: `CODES`, or the reason why it stays dense} of a small model."""
    layers = {layer.name for layer in record.layers}
    found: dict[str, str] = {}
    for name, parameter in model.named_parameters():
        places = (name.removesuffix(".weight"), name, f"{name}.0")
        why = next((record.left_alone[place] for place in places if place in record.left_alone), OTHERS)
        if any(place in layers for place in places):
            module = model.get_submodule(name.rpartition(".")[0])
            why = HELD if name.endswith(".weight") and is_convolution(module) else CODES
        elif parameter.ndim < 2:
            why = OTHERS
        found.setdefault(pattern(name), why)
    return found


def pattern(name: str) -> str:
    """A parameter's name without its numbers."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "#", name)


def full_sizes(kind: Any) -> dict[str, int]:
    """{parameter, its numbers left out: elements} of the default configuration; empty where that makes no model."""
    try:
        with torch.device("meta"):
            return sizes(kind(kind.config_class()))
    except Exception:  # noqa: BLE001 - whatever a class of transformers lacks
        return {}


def sizes(model: nn.Module) -> dict[str, int]:
    """{parameter, its numbers left out: elements} of a model."""
    found: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        found[pattern(name)] = found.get(pattern(name), 0) + parameter.numel()
    return found


def shares(found: Mapping[str, str], elements: Mapping[str, int]) -> dict[str, float]:
    """{`CODES` or a reason: share of the weights of layers}, largest first, without embeddings, output heads, routers,
    norms and biases. found: `fates`; elements: `sizes`, where a parameter that is not among the first counts as no
    layer's."""
    counts: dict[str, int] = {}
    for name, count in elements.items():
        why = found.get(name, OTHERS)
        if why not in USUAL:
            counts[why] = counts.get(why, 0) + count
    whole = sum(counts.values())
    return {why: counts[why] / whole for why in sorted(counts, key=lambda why: -counts[why])}
