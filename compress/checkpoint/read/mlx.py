"""Reads integer codes as MLX stores them.

    {"quantization": {"group_size": 64, "bits": 4, LAYER: {"group_size": 32, "bits": 8}, ...}}

Of a layer with N outputs, K inputs and G groups, whose values are codes * scales + biases:

    weight    uint32 [N, K n / 32]    codes of n bits, a bit stream along the inputs, lowest bits first
    scales    any float [N, G]
    biases    the same [N, G]

All experts of a block lie in one stack, with a dimension E in front, `mlp.switch_mlp.gate_proj` for
`mlp.experts.0.gate_proj` and the others.

The words are those of compressed-tensors, so symmetric codes need no repacking: their biases are -2^(n-1) scales.
MLX's own rounding has a minimum of each group as its bias, which no integer zero point gives: that is refused.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.base.errors import CheckpointError, InputError
from compress.checkpoint.read.views import View, ViewedFiles
from compress.checkpoint.read.weight_files import WeightFiles
from compress.kernels.layouts.words import words_of
from compress.model.split_experts import LEAVES, SPARSE, SPARSE_LEAVES
from compress.weights.formats.codes import Packed
from compress.weights.grid import Grid
from compress.weights.own_config import groups_of
from compress.weights.scheme import Scheme
from compress.weights.terms import FLOATS

METHOD = "mlx"
PARTS = ("weight", "scales", "biases")
STACK = "switch_mlp"
EXPERT = re.compile(r"(.+)\.experts\.(\d+)\.(\w+)")
NAMES = dict(zip(SPARSE_LEAVES, LEAVES, strict=True))  # of Mixtral's layers in a stack


def place_of(layer: str) -> tuple[str, int] | None:
    """(The stack that holds the layer of an expert, its place in it); None for another layer."""
    found = EXPERT.fullmatch(layer)
    return None if found is None else (f"{found[1]}.{STACK}.{NAMES.get(found[3], found[3])}", int(found[2]))


def layers_of(stack: str, experts: int) -> list[str]:
    """The layers that lie in a stack, in their order. Raises CheckpointError."""
    block, named, leaf = stack.rpartition(f".{STACK}.")
    if not named or leaf not in LEAVES:
        raise CheckpointError(f"{stack} has three dimensions; those can be read of {STACK}.{', '.join(LEAVES)}")
    if block.rpartition(".")[2] == SPARSE:
        leaf = SPARSE_LEAVES[LEAVES.index(leaf)]
    return [f"{block}.experts.{i}.{leaf}" for i in range(experts)]


def entry(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The quantization of a configuration of MLX, with METHOD as its method; None for another configuration."""
    found = config.get("quantization")
    if not isinstance(found, Mapping) or not {"group_size", "bits"} <= found.keys():
        return None
    return {"quant_method": METHOD, **found}


def view(files: WeightFiles, quantization: Mapping[str, Any], where: Path) -> tuple[WeightFiles, dict[str, Any]]:
    """(Files in which layers lie as our packed codes, the configuration that says so). Raises CheckpointError for other
    modes than affine, for widths and groups that do not fit the tensors, and for biases as MLX itself rounds them."""
    layers = sorted(name.removesuffix(".scales") for name in files.headers if name.endswith(".scales"))
    if not layers:
        raise CheckpointError(f"{where} says it is quantized for MLX but holds no scales")
    hidden: set[str] = set()
    views: dict[str, View] = {}
    schemes: dict[str, Scheme] = {}
    for stored in layers:
        own = quantization.get(stored)
        grid = _grid({**quantization, **own} if isinstance(own, Mapping) else quantization, stored, where)
        hidden |= {f"{stored}.{part}" for part in PARTS}
        for place, layer in _layers(files, stored):
            schemes[layer] = Scheme(terms=(Packed(grid=grid),))
            views |= _layer(files, stored, layer, place, grid)
    return ViewedFiles(files, hidden, views), groups_of(schemes)


def _grid(given: Mapping[str, Any], layer: str, where: Path) -> Grid:
    if (mode := given.get("mode", "affine")) != "affine":
        raise CheckpointError(f"{where} has {layer} in MLX's mode {mode!r}; readable: 'affine'")
    try:
        return Grid(bits=given["bits"], granularity="group", group_size=given["group_size"])
    except (InputError, TypeError) as error:
        raise CheckpointError(f"{where}: {layer}: {error}") from None


def _layers(files: WeightFiles, stored: str) -> list[tuple[tuple[int, ...], str]]:
    """(Its place in the stored tensors, the name) of each layer that they hold."""
    shape, _ = files.headers[f"{stored}.scales"]
    if len(shape) not in (2, 3):
        raise CheckpointError(f"{stored}.scales has shape {shape}; it must have two dimensions, of experts three")
    return [((), stored)] if len(shape) == 2 else [((i,), each) for i, each in enumerate(layers_of(stored, shape[0]))]


def _layer(files: WeightFiles, stored: str, layer: str, place: tuple[int, ...], grid: Grid) -> dict[str, View]:
    """The views of a layer's tensors, at a place of the stored ones."""
    weight, scales, biases = (f"{stored}.{part}" for part in PARTS)
    (*stack, rows, groups), dtype = files.headers[scales]
    columns, size = groups * (grid.group_size or 0), (rows, groups)
    words = (rows, words_of(columns, grid.bits))
    for name, shape, kinds in ((weight, words, (torch.uint32,)), (scales, size, FLOATS), (biases, size, FLOATS)):
        files.expect(name, (*stack, *shape), kinds)

    def scale(held: Tensor, bias: Tensor) -> Tensor:
        if not torch.equal(held[place] * -(2 ** (grid.bits - 1)), bias[place]):
            raise CheckpointError(
                f"{biases} are no multiples of the scales, as MLX's own rounding makes them; readable: symmetric codes"
            )
        return held[place]

    return {
        f"{layer}.weight_packed": View((words, "I32"), (weight,), lambda held: held[place].view(torch.int32)),
        f"{layer}.weight_scale": View((size, dtype), (scales, biases), scale),
        f"{layer}.weight_shape": View(((2,), "I64"), (scales,), lambda _: torch.tensor((rows, columns))),
    }
