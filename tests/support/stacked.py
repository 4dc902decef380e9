"""The weights that vLLM multiplies by, from the files of a checkpoint: parts of a fused layer below each other, read as
one layer of compressed-tensors. Shares no code with what writes or loads them."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
LEVELS = torch.cat([E2M1, -E2M1])
GLOBAL = "weight_global_scale"


def stacked(out: Path, parts: Sequence[str], expert: bool = False) -> Tensor:
    """[N, K] float32: what the layers of these names are in vLLM, where they are one. Of several global scales it takes
    the largest, of an expert's the first."""
    held = load_file(out / "model.safetensors")
    (group,) = json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"].values()
    kinds = {name.removeprefix(f"{parts[0]}.") for name in held if name.startswith(f"{parts[0]}.")}
    of = {kind: [held[f"{part}.{kind}"] for part in parts] for kind in kinds}
    one = max(of[GLOBAL][:1] if expert else of[GLOBAL]) if GLOBAL in of else None
    whole = {kind: torch.cat(each) for kind, each in of.items() if kind.startswith("weight") and kind != GLOBAL}
    return values(group["format"], group["weights"], whole, one)


def values(form: str, how: dict, whole: dict[str, Tensor], one: Tensor | None) -> Tensor:
    """[N, K] of codes and scales. form, how: the words of the configuration; one: the global scale."""
    scale = whole["weight_scale"]
    if form == "pack-quantized":
        codes = unpacked(whole["weight_packed"], how["num_bits"], int(whole["weight_shape"][1]))
    elif "weight_packed" in whole:  # floats of 4 bits, the lower half of a byte first
        packed = whole["weight_packed"].long()
        codes = LEVELS[torch.stack([packed & 15, packed >> 4], -1).flatten(1)]
    else:
        codes = whole["weight"].float()
    if scale.dtype == torch.uint8:  # exponents
        scale = torch.ldexp(torch.ones(scale.shape), scale.int() - 127)
    scale = scale.float() if one is None else scale.float() / one
    if how["strategy"] == "block":
        scale = scale.repeat_interleave(how["block_structure"][0], 0)[: len(codes)]
    return codes.float() * scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)


def unpacked(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Signed codes from words of 32 bits: one behind the other, lowest bits first, also across words."""
    stream = ((packed.long()[..., None] >> torch.arange(32)) & 1).flatten(1)[:, : columns * bits]
    return (stream.unflatten(1, (-1, bits)) << torch.arange(bits)).sum(-1) - 2 ** (bits - 1)
