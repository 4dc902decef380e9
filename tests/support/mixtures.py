"""Tiny random mixtures of experts of transformers, one of each family."""

import json
import weakref
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from compress.checkpoint.read.source import Source
from compress.inference.load import dense_model

SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
# Family -> (class of the model, settings beside SIZES, the name of an expert's last layer, layers of a run). In turn:
# names of the hub, names of its own, a shared expert with a gate, one from the second block on, stored joined,
# transposed and interleaved with biases, rows sorted by expert, without a gate.
FAMILIES = {
    "qwen3-moe": ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 16}, "down_proj", 32),
    "mixtral": ("Mixtral", {"num_local_experts": 4}, "w2", 32),
    "qwen2-moe": (
        "Qwen2Moe",
        {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
        "down_proj",
        38,
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **LATENT,
            "n_routed_experts": 4,
            "moe_intermediate_size": 16,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
        "down_proj",
        28,
    ),
    "olmoe": ("Olmoe", {"num_experts": 4}, "down_proj", 32),
    "granite": ("GraniteMoe", {"num_local_experts": 4}, "w2", 32),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "head_dim": 16}, "down_proj", 32),
    "llama4": (
        "Llama4",
        {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 32, "head_dim": 16},
        "down_proj",
        38,
    ),
}


def made(family: str, **sizes: int) -> torch.nn.Module:
    """A random model of a family, float32, computing experts one after the other. sizes: in place of those that all
    have."""
    kind, settings, _, _ = FAMILIES[family]
    torch.manual_seed(0)
    name = "Llama4TextConfig" if kind == "Llama4" else f"{kind}Config"
    config = getattr(transformers, name)(**{**SIZES, **settings, **sizes}, experts_implementation="eager")
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for name, p in model.named_parameters():
        if "experts" in name or "bias" in name:
            torch.nn.init.normal_(p, 0, 0.2)
    return model


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
LARGEST = 448.0  # of e4m3


def float8_blocks(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """(Codes [N, K], a scale for each block of 128 x 128)."""
    rows, columns = ([slice(i, i + 128) for i in range(0, n, 128)] for n in weight_NK.shape)
    codes = torch.empty(weight_NK.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(len(rows), len(columns))
    for i, n in enumerate(rows):
        for j, k in enumerate(columns):
            scales[i, j] = weight_NK[n, k].float().abs().max() / LARGEST
            codes[n, k] = (weight_NK[n, k].float() / scales[i, j]).to(codes.dtype)
    return codes, scales


def to_float8(folder: Path, tensors: dict[str, Tensor] | None = None, **words: str) -> dict[str, Tensor]:
    """{name: values} of the projections of a checkpoint, which are now float8 in blocks. tensors: in place of its own.
    words: beside `FP8` in its configuration."""
    stored, values = {}, {}
    for name, tensor in (tensors or load_file(folder / "model.safetensors")).items():
        if "_proj" not in name or "eh_proj" in name or tensor.ndim != 2:
            stored[name] = tensor
            continue
        codes, scales = stored[name], stored[f"{name}_scale_inv"] = float8_blocks(tensor)
        wide = scales.repeat_interleave(128, 0)[: len(codes)].repeat_interleave(128, 1)[:, : codes.shape[1]]
        values[name] = (codes.float() * wide).to(tensor.dtype)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**said, "quantization_config": {**FP8, **words}}))
    return values


class MadeDense:
    """Counts layers of float8 checkpoints that have dense weights: how many live now, and lived at most."""

    def __init__(self) -> None:
        self.now, self.most, self.make = 0, 0, dense_model._values

    def __call__(self, source: Source, layer: str, dtype: torch.dtype) -> Tensor:
        made = self.make(source, layer, dtype)
        self.now += 1
        self.most = max(self.most, self.now)
        weakref.finalize(made.untyped_storage(), self.forget)
        return made

    def forget(self) -> None:
        self.now -= 1


def tokens(rows: int = 6, length: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 128, (rows, length), generator=torch.Generator().manual_seed(seed))
