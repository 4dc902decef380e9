"""MLX's layout, which mlx-lm and LM Studio run on Macs: symmetric integer codes, embeddings too.

`checkpoint.read.mlx` has the tensors. Nothing is rounded again: a bias is -2^(n-1) times its scale. MLX's groups are of
32, 64 or 128 inputs; a larger one, or a whole row, repeats its scale.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.export.exporter import Exporter, Written
from compress.checkpoint.export.integers import (
    grid_of,
    integers_of,
    names_to_copy,
    why_no_linear_codes,
    why_not_codes,
    why_not_grid,
    write_layers,
)
from compress.checkpoint.export.limits import LIMITS
from compress.checkpoint.export.mlx_families import MIXTURES, config_for, notes_of, why_not_family
from compress.checkpoint.export.place import Place
from compress.checkpoint.export.read_back import read_by_package
from compress.checkpoint.export.registry import exporter_named
from compress.checkpoint.read.compressed_layers import StoredLayer, stored_in, weight_of
from compress.checkpoint.read.mlx import METHOD, PARTS, place_of
from compress.checkpoint.read.pretrained import empty_model
from compress.checkpoint.read.source import Source
from compress.kernels.layouts.words import pack_rows
from compress.model.layers import transposed_weights
from compress.model.split_experts import has_experts

GROUPS = (128, 64, 32)


class MLXLayout(Exporter):
    """Symmetric codes of 2 to 8 bits, but for 7; layers may differ in width and group size."""

    about = "MLX's layout, for mlx-lm and LM Studio on Macs; symmetric codes in groups of multiples of 32"
    kind = METHOD
    reads_back = True

    def why_not_model(self, model: Source) -> list[str]:
        """Families that mlx-lm computes as transformers does; no weights that it turns as it loads, without their
        codes."""
        empty, reasons = empty_model(model), list[str]()
        if model.config["model_type"] not in MIXTURES and has_experts(empty):
            reasons.append(f"it is a mixture; of these MLX takes {', '.join(MIXTURES)}")
        if turned := transposed_weights(empty):
            reasons.append(f"{min(turned)} is stored as [inputs, outputs]")
        reasons = reasons or why_not_family(model)
        other = "gguf" if reasons and not exporter_named("gguf").why_not_model(model) else "dense"
        return [f"{reason}; `--to {other}` takes it" for reason in reasons]

    def why_not(self, checkpoint: Source) -> list[str]:
        """Weight-only symmetric codes, the same for all experts of a block."""
        layers = stored_in(checkpoint).layers
        if reasons := why_no_linear_codes(checkpoint) if not layers else self.why_not_model(checkpoint):
            return reasons
        for name, layer in layers.items():
            if (why := why_not_codes(layer)) is not None:
                return [f"{name} {why}"]
            grid = grid_of(layer)
            if found := [*why_not_grid(grid, grid.group_size or layer.shape[1], LIMITS[METHOD])]:
                return [f"{name} {found[0]}"]
            if not grid.symmetric:
                return [f"{name} has asymmetric codes, whose minima MLX would round; quantize with --grid signed-scale"]
        stacks = stacks_of(layers)
        for stack, experts in stacks.items():
            if len({grid_of(layers[each]) for each in experts}) > 1:
                return [f"{stack} holds all experts, and these have several kinds of codes; give them one scheme"]
        plain = (name for name in names_to_copy(checkpoint) if place_of(name.removesuffix(".weight")))
        if stacks and (first := next(plain, None)) is not None:
            return [f"{first} is not compressed, and other experts are; compress all, or none"]
        return []

    def write(self, checkpoint: Source, place: Place) -> Written:
        """Write the layers, one after the other, and config.json."""
        layers = stored_in(checkpoint).layers
        stacks = stacks_of(layers)
        written = write_layers(checkpoint, place, partial(_parts, checkpoint), len(PARTS), stacks=stacks)
        kinds = {
            (place_of(name) or (name,))[0]: {"group_size": _group(layer), "bits": grid_of(layer).bits}
            for name, layer in layers.items()
            if layer.shares is None
        }
        usual = Counter(tuple(kind.items()) for kind in kinds.values()).most_common(1)[0][0]
        others = {name: kind for name, kind in kinds.items() if tuple(kind.items()) != usual}
        for line in notes_of(checkpoint):
            place.note(line)
        config = {key: value for key, value in config_for(checkpoint).items() if key != "quantization_config"}
        place.json("config.json", {**config, "quantization": {**dict(usual), **others}})
        return written

    def read_back(self, folder: Path, record: Mapping[str, Any]) -> dict[str, Any]:
        """By our reader, and by MLX where it is installed."""
        return read_by_package(folder, record, METHOD, _differs)


def stacks_of(layers: Iterable[str]) -> dict[str, list[str]]:
    """{stack of experts as mlx-lm names it: its layers, in the order of the experts}."""
    found: dict[str, dict[int, str]] = {}
    for name in layers:
        if (place := place_of(name)) is not None:
            stack, expert = place
            found.setdefault(stack, {})[expert] = name
    return {stack: [experts[i] for i in sorted(experts)] for stack, experts in found.items()}


def _group(layer: StoredLayer) -> int:
    """The size of MLX's groups for a layer."""
    size = grid_of(layer).group_size or layer.shape[1]
    return next(group for group in GROUPS if size % group == 0)


def _parts(source: Source, name: str) -> dict[str, Tensor]:
    """The tensors of a layer."""
    held, layer = integers_of(source, name), stored_in(source).layers[name]
    scale = held.scale.repeat_interleave(layer.shape[1] // _group(layer) // held.scale.shape[1], dim=1)
    words = pack_rows(held.codes, held.bits, signed=False).view(torch.uint32)
    return dict(zip(PARTS, (words, scale, scale * -(2 ** (held.bits - 1))), strict=True))


def _differs(source: Source, name: str) -> bool:
    """True where MLX computes another weight for a layer of an export than we do. In float32 its sum of a product and a
    bias may be rounded, with scales of 16 bits never."""
    import mlx.core as mx
    import numpy as np

    stack, expert = place_of(name) or (name, ...)
    weight, *rest = (source.weights.stored_tensor(f"{stack}.{part}")[expert] for part in PARTS)
    words = mx.array(weight.view(torch.int32).numpy().view(np.uint32))
    scales = (mx.array(each.float().numpy()) for each in rest)
    grid = grid_of(stored_in(source).layers[name])
    found = mx.dequantize(words, *scales, group_size=grid.group_size, bits=grid.bits)
    off = (torch.from_numpy(np.array(found)) - weight_of(source, name, torch.float32).dequantize()).abs().amax()
    return bool(off > (0 if rest[0].element_size() == 2 else 2.0 ** (grid.bits - 22) * float(rest[0].abs().max())))
