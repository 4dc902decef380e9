"""Reads compressed-tensors' integers that lie in a byte each and could be packed.

llm-compressor stores W4A8, W4A4 and their like as `int-quantized`: each code of 2 to 8 bits in an int8, scales in
groups, and inputs rounded per token. They are shown as `pack-quantized`:

    weight              int8 [N, K]     ->    weight_packed        int32 [N, ceil(K n / 32)], weight_shape
    weight_zero_point   int8 [N, G]     ->    weight_zero_point    int32 [ceil(N n / 32), G]

N outputs, K inputs, G groups, n bits.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.base.errors import CheckpointError
from compress.checkpoint.read.views import View, ViewedFiles
from compress.checkpoint.read.weight_files import WeightFiles
from compress.kernels.layouts.words import pack_rows, words_of
from compress.weights.compressed_tensors import LAYOUTS, check_targets, group_for
from compress.weights.formats.codes import Int8Rows, Packed

BYTE = 8


def view(files: WeightFiles, quantization: Mapping[str, Any], where: Path) -> tuple[WeightFiles, dict[str, Any]]:
    """(Files in which such integers are packed, the configuration that says so); as they are, where there are none."""
    layout = quantization.get("format")
    groups = quantization.get("config_groups") or {}
    packed = {name: {**group, "format": Packed.layout} for name, group in groups.items() if _could_be(group, layout)}
    config = {**quantization, "config_groups": {**groups, **packed}}
    if not packed:
        return files, dict(quantization)
    check_targets(config, sorted({name.rpartition(".")[0] for name in files.headers}))
    hidden: set[str] = set()
    views: dict[str, View] = {}
    for name, (shape, dtype) in files.headers.items():
        layer, _, part = name.rpartition(".")
        if part != "weight" or dtype != "I8" or len(shape) != 2 or 0 in shape:
            continue
        group = group_for(layer, config)
        if not any(group is each for each in packed.values()):
            continue
        rows, columns = shape
        bits = group["weights"]["num_bits"]
        hidden.add(name)
        pack = partial(_pack, name, bits)
        views[f"{layer}.weight_packed"] = View(((rows, words_of(columns, bits)), "I32"), (name,), pack)
        views[f"{layer}.weight_shape"] = View(((2,), "I64"), (name,), lambda weight: torch.tensor(weight.shape))
        zeros = f"{layer}.weight_zero_point"
        held, kind = files.headers.get(zeros, ((), ""))
        if kind == "I8" and len(held) == 2:
            views[zeros] = View(((words_of(rows, bits), held[1]), "I32"), (zeros,), partial(_pack_columns, zeros, bits))
    return ViewedFiles(files, hidden, views), config


def _could_be(group: Mapping[str, Any], layout: str | None) -> bool:
    """True for a group of integers in bytes that no format of 8 bits and a scale per channel describes."""
    weights = group.get("weights") or {}
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    if LAYOUTS.get(str(group.get("format") or layout)) != Int8Rows.layout or kind != "int" or not isinstance(bits, int):
        return False
    whole = bits == BYTE and weights.get("strategy") == "channel" and weights.get("symmetric", True)
    alone = bits == BYTE and not group.get("input_activations")
    return 2 <= bits <= BYTE and not whole and not alone


def _pack(name: str, bits: int, codes: Tensor) -> Tensor:
    half = 2 ** (bits - 1)
    if bool(((codes < -half) | (codes >= half)).any()):
        raise CheckpointError(f"{name} holds codes of more than {bits} bits")
    return pack_rows(codes, bits)


def _pack_columns(name: str, bits: int, zeros: Tensor) -> Tensor:
    return _pack(name, bits, zeros.t().contiguous()).t()
