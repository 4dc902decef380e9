"""MLX's layout, which mlx-lm and LM Studio run on Macs: symmetric integer codes, embeddings too.

`checkpoint.read.mlx` has the tensors. Nothing is rounded again: a bias is -2^(n-1) times its scale. MLX's groups are of
32, 64 or 128 inputs; a larger one, or a whole row, repeats its scale.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.base.errors import CheckpointError
from compress.checkpoint.export.exporter import Exporter, Written
from compress.checkpoint.export.integers import grid_of, integers_of, names_to_copy, note_losses, why_not_codes
from compress.checkpoint.export.limits import LIMITS
from compress.checkpoint.export.place import Place
from compress.checkpoint.export.read_back import read_by_us, reader_of, summary
from compress.checkpoint.read.compressed_layers import StoredLayer, stored_in, weight_of
from compress.checkpoint.read.mlx import METHOD, PARTS
from compress.checkpoint.read.pretrained import empty_model
from compress.checkpoint.read.source import Source
from compress.kernels.layouts.words import pack_rows
from compress.model.experts import Experts

GROUPS = (128, 64, 32)


class MLXLayout(Exporter):
    """Symmetric codes of 2 to 8 bits, but for 7; layers may differ in width and group size."""

    about = "MLX's layout, for mlx-lm and LM Studio on Macs; symmetric codes in groups of multiples of 32"
    kind = METHOD
    reads_back = True

    def why_not(self, checkpoint: Source) -> list[str]:
        """Weight-only symmetric codes, in layers that mlx-lm finds under the names of the checkpoint."""
        layers = _layers(checkpoint)
        if not layers:
            return ["it holds no codes"]
        for name, layer in layers.items():
            if (why := why_not_codes(layer) or _why_not(layer)) is not None:
                return [f"{name} {why}"]
        if any(isinstance(module, Experts) for module in empty_model(checkpoint).modules()):
            return ["mlx-lm joins the experts of a block as it loads, dense ones alone"]
        return []

    def write(self, checkpoint: Source, place: Place) -> Written:
        """Write the layers, one after the other, and config.json."""
        note_losses(checkpoint, place)
        layers, rest = _layers(checkpoint), list(names_to_copy(checkpoint))
        values: dict[str, str] = {}
        place.tensors(_tensors(checkpoint, rest, values), len(rest) + len(PARTS) * len(layers))
        kinds = {name: {"group_size": _group(layer), "bits": grid_of(layer).bits} for name, layer in layers.items()}
        usual = Counter(tuple(kind.items()) for kind in kinds.values()).most_common(1)[0][0]
        others = {name: kind for name, kind in kinds.items() if tuple(kind.items()) != usual}
        config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
        place.json("config.json", {**config, "quantization": {**dict(usual), **others}})
        return Written(len(layers), {"values": values})

    def read_back(self, folder: Path, record: Mapping[str, Any]) -> dict[str, Any]:
        """By our reader, and by MLX where it is installed."""
        source = read_by_us(folder, record)
        layers = stored_in(source).layers
        for name, layer in layers.items() if find_spec(METHOD) else ():
            ours = weight_of(source, name, torch.float32).dequantize()
            if bool((_by_mlx(source, name, layer) - ours).abs().amax() > _rounding(source, name, grid_of(layer).bits)):
                raise CheckpointError(f"{name} of {folder}, as {METHOD} reads it, is not what was exported")
        return {"layers": len(layers), "reader": reader_of(METHOD)}


def _layers(source: Source) -> dict[str, StoredLayer]:
    """The layers with codes of their own; a head that is tied to the embedding has none."""
    return {name: layer for name, layer in stored_in(source).layers.items() if layer.shares is None}


def _why_not(layer: StoredLayer) -> str | None:
    """The reason why MLX does not run these integer codes, the end of a sentence about the layer."""
    grid, limits = grid_of(layer), LIMITS[METHOD]
    if grid.bits not in limits.bits:
        return f"has codes of {grid.bits} bits; allowed: {', '.join(map(str, limits.bits))}"
    if not grid.symmetric:
        return "has asymmetric codes, whose minima MLX would round; quantize with --grid signed-scale"
    size = grid.group_size or layer.shape[1]
    if (sizes := limits.why_not_group(size)) is not None:
        return f"has groups of {size}; allowed: {sizes} (--group-size)"
    return None


def _group(layer: StoredLayer) -> int:
    """The size of MLX's groups for a layer."""
    size = grid_of(layer).group_size or layer.shape[1]
    return next(group for group in GROUPS if size % group == 0)


def _tensors(source: Source, rest: list[str], values: dict[str, str]) -> Iterator[tuple[str, Tensor]]:
    """(Name, tensor) of everything to write. values: takes a summary of each layer's."""
    for name in rest:
        yield name, source.weights.tensor(name)
    for name, layer in _layers(source).items():
        values[name] = summary(weight_of(source, name).dequantize())
        held, bits = integers_of(source, name), grid_of(layer).bits
        groups = layer.shape[1] // _group(layer)
        scale = held.scale.repeat_interleave(groups // held.scale.shape[1], dim=1)
        parts = (pack_rows(held.codes, bits, signed=False).view(torch.uint32), scale, scale * -(2 ** (bits - 1)))
        yield from ((f"{name}.{part}", tensor) for part, tensor in zip(PARTS, parts, strict=True))


def _by_mlx(source: Source, name: str, layer: StoredLayer) -> Tensor:
    """The weight of a layer of an export, as MLX computes it in float32."""
    import mlx.core as mx
    import numpy as np

    weight, *rest = (source.weights.stored_tensor(f"{name}.{part}") for part in PARTS)
    words = mx.array(weight.view(torch.int32).numpy().view(np.uint32))
    scales = (mx.array(each.float().numpy()) for each in rest)
    grid = grid_of(layer)
    found = mx.dequantize(words, *scales, group_size=grid.group_size, bits=grid.bits)
    return torch.from_numpy(np.array(found))


def _rounding(source: Source, name: str, bits: int) -> float:
    """The error that MLX's sum of a product and a bias may have in float32: none with scales of 16 bits."""
    scales = source.weights.stored_tensor(f"{name}.scales")
    return 0 if scales.element_size() == 2 else 2.0 ** (bits - 22) * float(scales.abs().max())
