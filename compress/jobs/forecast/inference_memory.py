"""The memory that a compressed model takes as it runs: its weights, and keys and values for every token of context."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from compress.weights.kv_cache_codes import CacheScheme, bytes_of_token

CONTEXTS = (2048, 8192, 32768, 131072)  # tokens
SLIDING = "sliding_attention"


@dataclass(frozen=True)
class RunMemory:
    """weights: bytes of all tensors. full: bytes of keys and values that each token adds. sliding: those that each of
    the last `window` tokens adds. longest: the context that the model is made for, in tokens."""

    weights: int
    full: float
    sliding: float
    window: int
    longest: int

    def at(self, tokens: int) -> int:
        """Bytes of weights and cache for one sequence of so many tokens."""
        return self.weights + int(tokens * self.full + min(tokens, self.window) * self.sliding)

    def contexts(self) -> Mapping[int, int]:
        """{tokens: bytes}, up to the model's own context."""
        return {tokens: self.at(tokens) for tokens in (*(c for c in CONTEXTS if c < self.longest), self.longest)}

    def context_within(self, available: int) -> int:
        """The most tokens of context in so many bytes, at most `longest`; 0 where the weights alone do not fit."""
        if self.at(self.longest) <= available:
            return self.longest
        low, high = 0, self.longest
        while low + 1 < high:
            middle = (low + high) // 2
            low, high = (middle, high) if self.at(middle) <= available else (low, middle)
        return low


def run_memory(model: nn.Module, weights: int, scheme: CacheScheme | None) -> RunMemory | None:
    """The memory of a decoder, from its configuration. weights: bytes of its tensors. scheme: of its caches; None: keys
    and values of 16 bits. None for a model whose configuration does not say what its attentions cache."""
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig) or getattr(config, "kv_lora_rank", None) is not None:
        return None
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    layers, longest = (getattr(config, key, None) for key in ("num_hidden_layers", "max_position_embeddings"))
    if not (heads and layers and longest and hasattr(config, "hidden_size")):
        return None
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_layer = 2 * heads * (2 * width if scheme is None else bytes_of_token(scheme, width))
    kinds: Any = getattr(config, "layer_types", None) or ["full_attention"] * layers
    if set(kinds) - {"full_attention", SLIDING}:
        return None
    window = getattr(config, "sliding_window", None) or longest
    sliding = sum(kind == SLIDING for kind in kinds)
    return RunMemory(weights, per_layer * (layers - sliding), per_layer * sliding, min(window, longest), longest)
