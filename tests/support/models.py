"""Tiny models with random weights, one per family of architectures."""

import torch
import transformers
from torch import nn

SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GATED = {**SIZES, "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}


def build(kind: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """A model of one of `FAMILIES`, in evaluation mode."""
    torch.manual_seed(seed)
    return FAMILIES[kind]().to(dtype).eval()


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    return transformers.GPT2LMHeadModel(config)


def _opt() -> nn.Module:
    config = transformers.OPTConfig(**SIZES, ffn_dim=64, max_position_embeddings=64, word_embed_proj_dim=32)
    return transformers.OPTForCausalLM(config)


def _gemma2() -> nn.Module:
    # Alternates sliding and full attention: the blocks of one stack get different masks.
    config = transformers.Gemma2Config(**GATED, sliding_window=4, query_pre_attn_scalar=8)
    return transformers.Gemma2ForCausalLM(config)


def _bert() -> nn.Module:
    config = transformers.BertConfig(**SIZES, intermediate_size=64, max_position_embeddings=64)
    return transformers.BertModel(config)


def _t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


FAMILIES = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**GATED)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**{**GATED, "head_dim": 8})),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GATED)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**GATED, sliding_window=8)),
    "gemma": lambda: transformers.GemmaForCausalLM(transformers.GemmaConfig(**GATED)),
    "gemma2": _gemma2,
    "gpt2": _gpt2,
    "opt": _opt,
    "bert": _bert,
    "t5": _t5,
}
DECODERS = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gpt2", "opt")


def strong(kind: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """`build`, with weights four times as large: layers have something to say."""
    model = build(kind, dtype, seed)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4 if p.ndim > 1 else 1)
    return model


def tokens(samples: int = 6, length: int = 16, seed: int = 1) -> torch.Tensor:
    """Token ids [samples, length]."""
    return torch.randint(96, (samples, length), generator=torch.Generator().manual_seed(seed))
