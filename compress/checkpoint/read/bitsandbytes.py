"""Reads NF4 as bitsandbytes stores it.

    {"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "nf4", ...}

    weight                                  uint8 [N K / 2, 1]   the codes of all rows, the first in the higher half
    weight.absmax                           float32 [N K / 64]   of each block of 64 weights, or, rounded themselves,
                                            uint8                a = nested_quant_map[absmax] * nested_absmax + offset
    weight.quant_map                        float32 [16]         the levels
    weight.nested_absmax                    float32              of each 256 of the absmax
    weight.nested_quant_map                 float32 [256]
    weight.quant_state.bitsandbytes__nf4    the bytes of a JSON: shape, blocksize, nested_blocksize, nested_offset ...

N outputs, K inputs. A layer is shown as our `nf4-float32`, whose scales are the absmax in float32, as bitsandbytes
computes them. Blocks of more weights are shown as several of 64.
"""

import json
from collections.abc import Mapping
from functools import partial
from math import ceil, prod
from pathlib import Path
from typing import Any, TypedDict, cast

import torch
from torch import Tensor

from compress.base.errors import CheckpointError
from compress.base.schema import fits
from compress.checkpoint.read.views import View, ViewedFiles
from compress.checkpoint.read.weight_files import WeightFiles
from compress.weights.formats.levels import NF4Float32
from compress.weights.levels import NF4
from compress.weights.own_config import groups_of
from compress.weights.scheme import Scheme

METHOD = "bitsandbytes"
STATE = ".quant_state.bitsandbytes__"
KIND = "nf4"
GROUP = cast(int, NF4Float32.on.group_size)
HALF_BYTE = 4


class _QuantState(TypedDict, total=False):
    quant_type: str
    blocksize: int
    shape: list[int]
    nested_blocksize: int
    nested_offset: float


def view(files: WeightFiles, quantization: Mapping[str, Any], where: Path) -> tuple[WeightFiles, dict[str, Any]]:
    """(Files in which layers of NF4 lie as our format has them, the configuration that says so). Raises CheckpointError
    for other numbers than NF4, blocks that do not fit into rows, and tensors that are missing or of the wrong shape."""
    states = {name: name.split(STATE) for name in files if STATE in name}
    if not states:
        kind = "int8" if quantization.get("load_in_8bit") else "no 4-bit"
        raise CheckpointError(f"{where} is quantized as {METHOD} with {kind} layers; readable: {KIND}")
    hidden: set[str] = set()
    views: dict[str, View] = {}
    layers: list[str] = []
    for name, (weight, kind) in states.items():
        layer, _, last = weight.rpartition(".")
        if last != "weight":
            raise CheckpointError(f"{name} is of no layer's weight, which cannot be read")
        if kind != KIND:
            raise CheckpointError(f"{layer} is stored as {METHOD} {kind}; readable: {KIND}")
        hidden |= {each for each in files if each == weight or each.startswith(f"{weight}.")}
        views |= _layer(files, layer, _state(files, name))
        layers.append(layer)
    scheme = Scheme(terms=(NF4Float32(grid=NF4Float32.on),))
    return ViewedFiles(files, hidden, views), groups_of(dict.fromkeys(layers, scheme))


def _state(files: WeightFiles, name: str) -> _QuantState:
    """The JSON in a tensor. Raises CheckpointError where it is none, or lacks what is needed."""
    try:
        entry = json.loads(bytes(files.tensor(name).flatten().view(torch.uint8).tolist()))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} holds no JSON ({error})") from None
    fits(entry, _QuantState, name)
    shape = entry.get("shape", [])
    if len(shape) != 2 or min(shape) < 1 or entry.get("blocksize", 0) < 1 or entry.get("nested_blocksize", 1) < 1:
        raise CheckpointError(f"{name} says shape {shape} and blocksize {entry.get('blocksize')}")
    state: _QuantState = entry
    return state


def _layer(files: WeightFiles, layer: str, state: _QuantState) -> dict[str, View]:
    """The views of a layer's tensors."""
    (rows, columns), block = state["shape"], state["blocksize"]
    if columns % block or block % GROUP:
        raise CheckpointError(
            f"{layer} has {columns} inputs in blocks of {block}; readable: multiples of {GROUP} that divide a row"
        )
    weight, blocks = f"{layer}.weight", rows * columns // block
    nested = "nested_offset" in state
    inner = state.get("nested_blocksize", 256)
    wanted: dict[str, tuple[str, int]] = {
        weight: ("U8", rows * columns // 2),
        f"{weight}.quant_map": ("F32", len(NF4.values)),
        f"{weight}.absmax": ("U8" if nested else "F32", blocks),
    }
    if nested:
        wanted[f"{weight}.nested_absmax"] = ("F32", ceil(blocks / inner))
        wanted[f"{weight}.nested_quant_map"] = ("F32", 256)
    for name, (kind, count) in wanted.items():
        if name not in files:
            raise CheckpointError(f"{name} is missing from the checkpoint")
        shape, dtype = files.headers[name]
        if dtype != kind or prod(shape) != count:
            raise CheckpointError(
                f"{name} is {dtype} {list(shape)}; a layer of {rows} x {columns} needs {count} {kind}"
            )
    if not torch.equal(files.tensor(f"{weight}.quant_map").flatten(), torch.tensor(NF4.values)):
        raise CheckpointError(f"{weight}.quant_map holds other levels than those of {KIND}")
    scales = (f"{weight}.absmax", f"{weight}.nested_absmax", f"{weight}.nested_quant_map")
    decode = partial(_absmax, inner, state["nested_offset"]) if nested else torch.clone
    return {
        f"{layer}.weight_packed": View(((rows, columns // 2), "U8"), (weight,), exchange_halves),
        f"{layer}.weight_scale": View(
            ((rows, columns // GROUP), "F32"),
            scales if nested else scales[:1],
            lambda *held: decode(*held).flatten().repeat_interleave(block // GROUP),
        ),
    }


def exchange_halves(packed: Tensor) -> Tensor:
    """Bytes whose two codes have changed places."""
    return (packed >> HALF_BYTE) | (packed << HALF_BYTE)


def _absmax(block: int, offset: float, codes: Tensor, outer: Tensor, levels: Tensor) -> Tensor:
    """The absmax that were rounded themselves, in blocks of `block` of them."""
    found = levels.flatten()[codes.flatten().int()]
    return found * outer.flatten().repeat_interleave(block)[: len(found)] + offset
