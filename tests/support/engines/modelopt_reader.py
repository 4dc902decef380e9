"""A reader of ModelOpt's checkpoints, written from TensorRT-LLM's and vLLM's (vllm 0.32.0, layers/quantization/
modelopt.py) and from Model-Optimizer@a2fbac7 (modelopt/torch/export/quant_utils.py). Shares no code with ours."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


@dataclass
class Layer:
    """algorithm: its word. weight: float32 [N, K]. input_scale: of its input, None where it has none."""

    algorithm: str
    weight: Tensor
    input_scale: float | None


def read(folder: Path) -> tuple[dict[str, Layer], dict[str, float]]:
    """({layer: what it is}, {name: scale of a key-value cache}) of a checkpoint, by hf_quant_config.json."""
    told = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    held = {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    coded = sorted(name.removesuffix(".weight_scale") for name in held if name.endswith(".weight_scale"))
    mixed, layers = told.get("quantized_layers"), {}
    for name in coded:
        assert name not in told["exclude_modules"]
        kind = mixed[name] if mixed is not None else told
        parts = {n.rpartition(".")[2]: t for n, t in held.items() if n.rpartition(".")[0] == name}
        layers[name] = decoded(kind["quant_algo"], kind.get("group_size"), parts)
    caches = {n: float(t) for n, t in held.items() if n.endswith(("k_proj.k_scale", "v_proj.v_scale"))}
    assert bool(caches) == (told["kv_cache_quant_algo"] == "FP8")
    return layers, caches


def decoded(algorithm: str, group: int | None, parts: dict[str, Tensor]) -> Layer:
    """A layer from its tensors."""
    scale, given = parts["weight_scale"], parts.get("input_scale")
    if "NVFP4" in algorithm:
        low, high = parts["weight"] & 15, parts["weight"] >> 4
        codes = torch.stack([low, high], -1).flatten(1).long()
        values = E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
        assert group == 16
        assert parts["weight_scale_2"].shape == ()
        wide = (scale.float() * parts["weight_scale_2"]).repeat_interleave(group, 1)
        assert (given is None) == (algorithm == "W4A16_NVFP4")
    else:
        values, shape = parts["weight"].float(), {"FP8": (), "FP8_PER_CHANNEL_PER_TOKEN": (len(parts["weight"]),)}
        if algorithm == "MXFP8":
            wide = torch.exp2(scale.float() - 127).repeat_interleave(32, 1)
        else:
            assert scale.shape == shape[algorithm]
            wide = scale.reshape(-1, 1)
        assert (given is not None) == (algorithm == "FP8")
    return Layer(algorithm, values * wide, None if given is None else float(given))
