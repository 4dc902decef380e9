"""Tiny random mixtures of experts of transformers, one of each family."""

import torch
import transformers

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


def tokens(rows: int = 6, length: int = 16, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 128, (rows, length), generator=torch.Generator().manual_seed(seed))
