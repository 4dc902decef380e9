"""The families whose files this exporter writes by itself: llama.cpp's name, keys and tensors of each.

`rotated` rows: ggml turns neighbouring pairs of a head (2 i, 2 i + 1), transformers the halves (i, i + d / 2), so the
rows of q and k of these families are written in ggml's order. `shifted` norms: transformers multiplies by 1 + weight,
llama.cpp by what is stored. Both are what llama.cpp's conversion/llama.py and conversion/gemma.py do.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

Config = Any
Value = int | float | bool | str | list[int]

SILU, GELU = ("silu", "swish"), ("gelu_pytorch_tanh",)
GEMMA = (*GELU, "gelu")  # the first Gemma says gelu and means the approximation by tanh
# llama.cpp's patterns of layers that see a window only: every so many layers, the last sees all.
WINDOWS = {"gemma2": 2, "gemma3": 6}
# Gemma's largest sizes divide by hidden size / heads instead of the head's size (llama.cpp knows them by their layers).
LARGEST = {"gemma2": 46, "gemma3": 62}
FULL, LOCAL = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Architecture:
    """A family. name: llama.cpp's. activations: those that its feed-forward may have. tied: the output head is always
    the embedding."""

    name: str
    activations: tuple[str, ...] = SILU
    rotated: bool = False
    shifted: bool = False
    tied: bool = False

    def why_not(self, config: Config) -> list[str]:
        """Reasons why llama.cpp would compute something else, each the end of a sentence about the model."""
        reasons = []
        activation = getattr(config, "hidden_activation", None) or config.hidden_act
        if activation not in self.activations:
            reasons.append(f"its activation is {activation}; llama.cpp computes {self.activations[0]} for {self.name}")
        if self.tied and not config.tie_word_embeddings:
            reasons.append(f"its output head is not the embedding; llama.cpp's {self.name} has no other")
        return [*reasons, *_rope_why_not(config), *_windows_why_not(self.name, config)]

    def keys(self, config: Config) -> dict[str, Value]:
        """{key without the family's prefix: value} of the sizes and constants."""
        heads, head = config.num_attention_heads, head_size(config)
        metadata: dict[str, Value] = {
            "vocab_size": config.vocab_size,
            "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size,
            "block_count": config.num_hidden_layers,
            "feed_forward_length": config.intermediate_size,
            "attention.head_count": heads,
            "attention.head_count_kv": config.num_key_value_heads or heads,
            "attention.key_length": head,
            "attention.value_length": head,
            "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
            "rope.dimension_count": head,
            "rope.freq_base": float(_rope(config)["rope_theta"]),
        }
        if _rope(config)["rope_type"] == "linear":
            metadata |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(_rope(config)["factor"])}
        if self.name in WINDOWS:
            metadata["attention.sliding_window"] = config.sliding_window
        if self.name == "gemma2":
            metadata["attn_logit_softcapping"] = float(config.attn_logit_softcapping)
        if getattr(config, "final_logit_softcapping", None):
            metadata["final_logit_softcapping"] = float(config.final_logit_softcapping)
        if self.name == "gemma3":
            metadata["rope.freq_base_swa"] = float(config.rope_parameters[LOCAL]["rope_theta"])
        return metadata

    def notes(self, config: Config) -> Iterator[str]:
        """A line for each property of the model that llama.cpp leaves out."""
        window = getattr(config, "sliding_window", None)
        slides = self.name not in WINDOWS and window and LOCAL in (getattr(config, "layer_types", None) or [LOCAL])
        if slides and getattr(config, "use_sliding_window", True) and window < config.max_position_embeddings:
            yield (
                f"attention sees the last {window} tokens; llama.cpp's {self.name} has no such window and sees all: "
                f"the same up to {window} tokens"
            )


LLAMA = Architecture("llama", rotated=True)
# By the class in config.json.
FAMILIES = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "Qwen2ForCausalLM": Architecture("qwen2"),
    "Qwen3ForCausalLM": Architecture("qwen3"),
    "GemmaForCausalLM": Architecture("gemma", GEMMA, shifted=True, tied=True),
    "Gemma2ForCausalLM": Architecture("gemma2", GELU, shifted=True, tied=True),
    "Gemma3ForCausalLM": Architecture("gemma3", GELU, shifted=True),
}


def head_size(config: Config) -> int:
    """Elements of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def rotated_rows(rows: int, heads: int) -> Tensor:
    """[rows]: the row of transformers that is each row of ggml, for q or k with so many heads."""
    return torch.arange(rows).view(heads, 2, rows // heads // 2).transpose(1, 2).flatten()


def rope_factors(config: Config) -> Tensor | None:
    """float32 [head / 2]: what llama.cpp divides the frequency of each pair by, for Llama 3's scaling; None for
    another."""
    rope = _rope(config)
    if rope["rope_type"] != "llama3":
        return None
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    size = head_size(config)
    plain = 1 / rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    return plain / scaled


def _rope(config: Config) -> dict[str, Any]:
    """The rotary parameters, those of layers that see all where kinds of layers differ."""
    found = config.rope_parameters
    return found.get(FULL, found)


def _rope_why_not(config: Config) -> list[str]:
    kind = _rope(config)["rope_type"]
    if kind not in ("default", "linear", "llama3"):
        return [f"its rotary positions are scaled by {kind!r}; written without --template: default, linear, llama3"]
    if float(_rope(config).get("partial_rotary_factor") or 1) != 1:
        return ["it rotates a part of each head only; give --template"]
    local = config.rope_parameters.get(LOCAL, {"rope_type": "default"})["rope_type"]
    return [] if local == "default" else [f"positions of its windowed layers are scaled by {local!r}; give --template"]


def _windows_why_not(name: str, config: Config) -> list[str]:
    """Reasons of Gemma 2 and 3: windows in other layers, or attention scaled otherwise, than llama.cpp has them."""
    if name not in WINDOWS:
        return []
    every, layers = WINDOWS[name], config.num_hidden_layers
    usual = [LOCAL if (i + 1) % every else FULL for i in range(layers)]
    if list(config.layer_types) != usual:
        return [f"its layers with a window are not those of {name}: all but each {every}th"]
    square = config.hidden_size / config.num_attention_heads if layers == LARGEST[name] else head_size(config)
    if not math.isclose(config.query_pre_attn_scalar, square):
        return [f"it scales attention by {config.query_pre_attn_scalar}^-1/2; llama.cpp by {square:g}^-1/2"]
    return []
