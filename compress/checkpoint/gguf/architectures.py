"""The families whose files this exporter writes by itself: llama.cpp's name, keys and tensors of each.

`rotated` rows: ggml turns neighbouring pairs of a head (2 i, 2 i + 1), transformers the halves (i, i + d / 2), so the
rows of q and k of these families are written in ggml's order. `shifted` norms: transformers multiplies by 1 + weight,
llama.cpp by what is stored. Both are what llama.cpp's conversion/llama.py and conversion/gemma.py do. Families whose
pairs both turn alike (Cohere, GLM 4, DeepSeek) are not rotated.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from compress.checkpoint.windows import FULL, LOCAL, all_but_each, missing_window

Config = Any
Value = int | float | bool | str | list[int]

SILU, GELU = ("silu", "swish"), ("gelu_pytorch_tanh", "gelu_new")
GEMMA = (*GELU, "gelu")  # the first Gemma says gelu and means the approximation by tanh
# llama.cpp's patterns of layers that see a window only: every so many layers, the last sees all.
WINDOWS = {"gemma2": 2, "gemma3": 6, "cohere2": 4, "gpt-oss": 2}
# Gemma's largest sizes divide by hidden size / heads instead of the head's size (llama.cpp knows them by their layers).
LARGEST = {"gemma2": 46, "gemma3": 62}
PLAIN = ("default", "linear")  # ways to scale rotary positions
SIGMOID = 2  # llama.cpp's number for weights of experts by a sigmoid
# {key of every family: where the configuration has its value}.
SIZES = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
}


@dataclass(frozen=True)
class Architecture:
    """A family. name: llama.cpp's. activations: those that its feed-forward may have. tied: the output head is always
    the embedding. norm: where the configuration has the epsilon of norms. ropes: the scalings of positions that are
    written. partial: llama.cpp may rotate a part of a head. copied: {key: where the configuration has its value}.
    fixed: {key: value}. needs: {entry of the configuration: the value that llama.cpp computes with}."""

    name: str
    activations: tuple[str, ...] = SILU
    rotated: bool = False
    shifted: bool = False
    tied: bool = False
    norm: str = "rms_norm_eps"
    ropes: tuple[str, ...] = PLAIN
    partial: bool = False
    copied: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Value] = field(default_factory=dict)
    needs: Mapping[str, object] = field(default_factory=dict)

    @property
    def epsilon(self) -> str:
        """The key of the norms' epsilon."""
        return f"attention.layer_norm{'_rms' if self.norm == 'rms_norm_eps' else ''}_epsilon"

    def why_not(self, config: Config) -> list[str]:
        """Reasons why llama.cpp would compute something else, each the end of a sentence about the model."""
        reasons = []
        activation = _first(config, "hidden_activation", "hidden_act", "activation_function")
        if activation not in self.activations:
            reasons.append(f"its activation is {activation}; llama.cpp computes {self.activations[0]} for {self.name}")
        if self.tied and not config.tie_word_embeddings:
            reasons.append(f"its output head is not the embedding; llama.cpp's {self.name} has no other")
        reasons += [
            f"its {entry} is {getattr(config, entry)}; llama.cpp's {self.name} computes with {wanted}"
            for entry, wanted in self.needs.items()
            if (getattr(config, entry, wanted) or 0) != wanted
        ]
        return [*reasons, *_rope_why_not(self, config), *_windows_why_not(self.name, config)]

    def keys(self, config: Config) -> dict[str, Value]:
        """{key without the family's prefix: value} of the sizes and constants."""
        head = head_size(config)
        metadata: dict[str, Value] = {
            **{key: getattr(config, entry) for key, entry in SIZES.items()},
            "feed_forward_length": _first(config, "intermediate_size", "n_inner") or 4 * config.hidden_size,
            "attention.head_count_kv": kv_heads(config),
            "attention.key_length": head,
            "attention.value_length": head,
            self.epsilon: float(getattr(config, self.norm)),
            **{key: _value(key, getattr(config, entry)) for key, entry in self.copied.items()},
            **self.fixed,
        }
        if self.name in WINDOWS:
            metadata["attention.sliding_window"] = config.sliding_window
        if self.name == "gemma2":
            metadata["attn_logit_softcapping"] = float(config.attn_logit_softcapping)
        if getattr(config, "final_logit_softcapping", None):
            metadata["final_logit_softcapping"] = float(config.final_logit_softcapping)
        return metadata | _rope_keys(config, head)

    def notes(self, config: Config) -> Iterator[str]:
        """A line for each property of the model that llama.cpp leaves out."""
        if self.name not in WINDOWS and (line := missing_window(config, f"llama.cpp's {self.name}")) is not None:
            yield line
        if _rope(config).get("rope_type") == "yarn" and not _rope(config).get("truncate", True):
            yield (
                "llama.cpp scales rotary positions (yarn) between whole dimensions, the model between fractions of "
                "them: logits differ a little"
            )
        if _rope(config).get("rope_type") == "longrope":
            yield (
                f"llama.cpp takes the rotary factors of long texts once its context (-c) is above "
                f"{original_length(config)} tokens, transformers once a text is"
            )


LLAMA = Architecture("llama", rotated=True, ropes=(*PLAIN, "llama3"))
EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
QWEN_EXPERTS = {**EXPERTS, "expert_count": "num_experts", "expert_feed_forward_length": "moe_intermediate_size"}
SHARED_EXPERT = {**QWEN_EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
ALL_EXPERTS = {"decoder_sparse_step": 1, "mlp_only_layers": 0}
# Without key_length_mla llama.cpp computes keys and values of every head from kv_b, as transformers does.
DEEPSEEK = {
    **QWEN_EXPERTS,
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.key_length": "qk_head_dim",
    "attention.value_length": "v_head_dim",
}
COHERE = {"logit_scale": "logit_scale"}
# By the class in config.json.
FAMILIES = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "MixtralForCausalLM": Architecture("llama", rotated=True, copied=EXPERTS),
    "Qwen2ForCausalLM": Architecture("qwen2"),
    "Qwen2MoeForCausalLM": Architecture(
        "qwen2moe", copied=SHARED_EXPERT, needs={"norm_topk_prob": False, **ALL_EXPERTS}
    ),
    "Qwen3ForCausalLM": Architecture("qwen3"),
    "Qwen3MoeForCausalLM": Architecture("qwen3moe", copied=QWEN_EXPERTS, needs={"norm_topk_prob": True, **ALL_EXPERTS}),
    "GemmaForCausalLM": Architecture("gemma", GEMMA, shifted=True, tied=True),
    "Gemma2ForCausalLM": Architecture("gemma2", GELU, shifted=True, tied=True),
    "Gemma3ForCausalLM": Architecture("gemma3", GELU, shifted=True),
    "GptOssForCausalLM": Architecture(
        "gpt-oss", ropes=("yarn",), copied={**EXPERTS, "expert_feed_forward_length": "intermediate_size"}
    ),
    "DeepseekV3ForCausalLM": Architecture(
        "deepseek2",
        ropes=("default", "yarn"),
        copied=DEEPSEEK,
        fixed={"expert_gating_func": SIGMOID},
        needs={"rope_interleave": True, "attention_bias": False},
    ),
    "Phi3ForCausalLM": Architecture(
        "phi3", ropes=("default", "longrope"), partial=True, copied={"attention.sliding_window": "sliding_window"}
    ),
    "Olmo2ForCausalLM": Architecture("olmo2", needs={"attention_bias": False}),
    "Glm4ForCausalLM": Architecture("glm4", partial=True),
    "CohereForCausalLM": Architecture(
        "command-r", tied=True, norm="layer_norm_eps", copied=COHERE, needs={"use_qk_norm": False}
    ),
    "Cohere2ForCausalLM": Architecture("cohere2", tied=True, norm="layer_norm_eps", copied=COHERE),
    "Starcoder2ForCausalLM": Architecture("starcoder2", GELU, norm="norm_epsilon", needs={"use_bias": True}),
    "GPT2LMHeadModel": Architecture(
        "gpt2",
        GELU,
        tied=True,
        norm="layer_norm_epsilon",
        needs={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    ),
}


def head_size(config: Config) -> int:
    """Elements of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def kv_heads(config: Config) -> int:
    """Heads of keys and values."""
    return int(_first(config, "num_key_value_heads", "num_attention_heads"))


def rotated_rows(rows: int, heads: int) -> Tensor:
    """[rows]: the row of transformers that is each row of ggml, for q or k with so many heads."""
    return torch.arange(rows).view(heads, 2, rows // heads // 2).transpose(1, 2).flatten()


def rope_factors(config: Config) -> dict[str, Tensor]:
    """{tensor: float32 [rotated / 2]}: what llama.cpp divides the frequency of each pair by, for Llama 3's scaling, and
    for short and long texts of longrope."""
    rope = _rope(config)
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{kind}.weight": torch.tensor(rope[f"{kind}_factor"]).float() for kind in ("long", "short")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    size = head_size(config)
    plain = 1 / rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    return {"rope_freqs.weight": plain / scaled}


def _first(config: Config, *entries: str) -> Any:
    """The first of these entries that a configuration has; None where it has none."""
    return next((found for entry in entries if (found := getattr(config, entry, None))), None)


def _value(key: str, value: Any) -> Value:
    """A value of a configuration as a key has it: 0 for none, a float for a factor."""
    return float(value) if key.endswith("_scale") else 0 if value is None else value


def _rope(config: Config) -> dict[str, Any]:
    """The rotary parameters, those of layers that see all where kinds of layers differ; empty without rotation."""
    found = getattr(config, "rope_parameters", None) or {}
    return found.get(FULL, found)


def _rope_keys(config: Config, head: int) -> dict[str, Value]:
    """The keys of rotary positions; none without rotation."""
    rope = _rope(config)
    if not rope:
        return {}
    keys: dict[str, Value] = {
        "rope.dimension_count": int(head * float(rope.get("partial_rotary_factor") or 1)),
        "rope.freq_base": float(rope["rope_theta"]),
    }
    kind = rope["rope_type"]
    if kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    if kind in ("longrope", "yarn"):
        keys["rope.scaling.original_context_length"] = original_length(config)
    if kind == "yarn":
        keys |= {f"rope.scaling.yarn_{key}": float(rope[key]) for key in ("beta_fast", "beta_slow") if rope.get(key)}
        if rope.get("mscale_all_dim"):
            keys["rope.scaling.yarn_log_multiplier"] = 0.1 * float(rope["mscale_all_dim"])
    if kind == "longrope":
        keys["rope.scaling.attn_factor"] = float(ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"))[1])
    if (local := config.rope_parameters.get(LOCAL)) is not None:
        keys["rope.freq_base_swa"] = float(local["rope_theta"])
    return keys


def original_length(config: Config) -> int:
    """The context before positions were scaled."""
    found = _rope(config).get("original_max_position_embeddings")
    return int(found or _first(config, "original_max_position_embeddings", "max_position_embeddings"))


def _rope_why_not(family: Architecture, config: Config) -> list[str]:
    rope = _rope(config)
    kind = rope.get("rope_type", "default")
    if rope and kind not in family.ropes:
        known = ", ".join(family.ropes)
        return [f"its rotary positions are scaled by {kind!r}; written without --template for {family.name}: {known}"]
    if float(rope.get("partial_rotary_factor") or 1) != 1 and not family.partial:
        return ["it rotates a part of each head only; give --template"]
    local = config.rope_parameters.get(LOCAL, {}).get("rope_type", "default") if rope else "default"
    return [] if local == "default" else [f"positions of its windowed layers are scaled by {local!r}; give --template"]


def _windows_why_not(name: str, config: Config) -> list[str]:
    """Reasons of families with windows: these in other layers, or attention scaled otherwise, than llama.cpp does."""
    if name not in WINDOWS:
        return []
    every, layers = WINDOWS[name], config.num_hidden_layers
    if list(config.layer_types) != all_but_each(every, layers):
        return [f"its layers with a window are not those of {name}: all but each {every}th"]
    square = config.hidden_size / config.num_attention_heads if layers == LARGEST.get(name) else head_size(config)
    if not math.isclose(getattr(config, "query_pre_attn_scalar", square), square):
        return [f"it scales attention by {config.query_pre_attn_scalar}^-1/2; llama.cpp by {square:g}^-1/2"]
    return []
