"""Models of several families with random weights, and tokenizers that llama.cpp knows.

Tokenizers have the demo's merges, after a split like the family's, or are like SentencePiece's and trained on the
demo's text.
"""

import argparse
import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from compress.checkpoint.files import read_json, write_json
from compress.checkpoint.gguf.pre_tokenizers import GPT4O, LLAMA3, QWEN2
from compress.checkpoint.read.source import DEMO, find_source

SIZES: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
HEADS = {**SIZES, "head_dim": 32}
LLAMA3_POSITIONS: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
IDS = {"bos_token_id": 0, "eos_token_id": 0, "initializer_range": 0.08}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
DEEPSEEK = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "first_k_dense_replace": 2}
DEEPSEEK |= {"n_group": 4, "topk_group": 2}
MLA = {"kv_lora_rank": 64, "q_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64}
MSCALE = {"mscale": 1.0, "mscale_all_dim": 1.0}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": True,
    "original_max_position_embeddings": 128,
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.1 * i for i in range(12)],
    "long_factor": [1.0 + 0.5 * i for i in range(12)],
    "original_max_position_embeddings": 384,
}
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "llama3": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**SIZES, "rope_parameters": LLAMA3_POSITIONS})
    ),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=None)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=64)),
    "gemma": lambda: transformers.GemmaForCausalLM(transformers.GemmaConfig(**HEADS)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**HEADS, query_pre_attn_scalar=32, sliding_window=64)
    ),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**HEADS, query_pre_attn_scalar=32, sliding_window=64)
    ),
    "qwen2-moe": lambda: transformers.Qwen2MoeForCausalLM(
        transformers.Qwen2MoeConfig(**SIZES, **EXPERTS, shared_expert_intermediate_size=256, norm_topk_prob=False)
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=64, norm_topk_prob=True)
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, num_local_experts=8, num_experts_per_tok=2, sliding_window=None)
    ),
    # Every token to all experts: where llama.cpp rounds inputs to int8, random routers would send it to others.
    "gpt-oss": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            **{**HEADS, "rope_parameters": YARN}, num_local_experts=4, num_experts_per_tok=4, sliding_window=64
        )
    ),
    "deepseek-v3": lambda: transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            **{**SIZES, **DEEPSEEK, "num_key_value_heads": 8, "rope_parameters": {**YARN, **MSCALE}}, **MLA
        )
    ),
    "phi3": lambda: transformers.Phi3ForCausalLM(
        transformers.Phi3Config(
            **{**SIZES, "rope_parameters": LONGROPE}, original_max_position_embeddings=384, pad_token_id=0
        )
    ),
    "olmo2": lambda: transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**SIZES)),
    "glm4": lambda: transformers.Glm4ForCausalLM(transformers.Glm4Config(**HEADS, attention_bias=True, pad_token_id=0)),
    "cohere": lambda: transformers.CohereForCausalLM(transformers.CohereConfig(**SIZES)),
    "cohere2": lambda: transformers.Cohere2ForCausalLM(transformers.Cohere2Config(**SIZES, sliding_window=64)),
    "starcoder2": lambda: transformers.Starcoder2ForCausalLM(transformers.Starcoder2Config(**SIZES)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=2048, n_embd=256, n_layer=6, n_head=8, n_positions=512, **IDS)
    ),
}
# Families that `--to gguf` writes only with --template.
BY_TEMPLATE: dict[str, Callable[[], nn.Module]] = {
    "olmoe": lambda: transformers.OlmoeForCausalLM(
        transformers.OlmoeConfig(**{**SIZES, "intermediate_size": 256}, num_experts=8, num_experts_per_tok=2)
    ),
    "glm4-moe": lambda: transformers.Glm4MoeForCausalLM(
        transformers.Glm4MoeConfig(
            **HEADS, moe_intermediate_size=256, n_routed_experts=8, num_experts_per_tok=2, first_k_dense_replace=2
        )
    ),
}
EVERY = FAMILIES | BY_TEMPLATE
# How tokenizers of these families split a text; others split like GPT-2's.
SPLITS = dict.fromkeys(("qwen2", "qwen3", "qwen2-moe", "qwen3-moe"), QWEN2)
SPLITS |= {**dict.fromkeys(("llama3", "olmo2", "glm4"), LLAMA3), "gpt-oss": GPT4O}
PIECES = (
    "llama",
    "gemma",
    "gemma2",
    "gemma3",
    "mistral",
    "mixtral",
    "phi3",
)  # families with SentencePiece's tokenizers


def made(family: str, folder: Path) -> Path:
    """A model of a family with random weights, norms and biases among them, float16, with a tokenizer."""
    torch.manual_seed(0)
    model: Any = EVERY[family]()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.1)
    model.half().save_pretrained(folder)
    if family in PIECES:
        pieces(folder)
        return folder
    held = read_json(DEMO / "tokenizer.json")
    if family in SPLITS:
        held["pre_tokenizer"] = _split(SPLITS[family])
    write_json(folder / "tokenizer.json", held)
    shutil.copyfile(DEMO / "tokenizer_config.json", folder / "tokenizer_config.json")
    return folder


def add_models(parser: argparse.ArgumentParser, families: Iterable[str] = FAMILIES) -> None:
    """Add the arguments of `named_models` to a command line."""
    parser.add_argument("models", nargs="*", help="directories, or 'demo'")
    parser.add_argument("--random", nargs="+", default=[], help=f"families: {', '.join(families)}")


def named_models(models: Sequence[str], families: Sequence[str], folder: Path) -> dict[str, Path]:
    """{name: model} of directories (or `demo`), and of random models of families, which are made in a folder."""
    found = {Path(name).name: find_source(name).path for name in models}
    # llama.cpp looks for some families' special tokens where a model has their name.
    return found | {f"random {family}": made(family, folder / family / "model") for family in families}


def _split(pattern: str) -> dict[str, Any]:
    """A pre-tokenizer that splits by an expression, then into bytes."""
    words = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, words]}


def pieces(folder: Path) -> None:
    """Write a tokenizer like SentencePiece's, trained on the demo's text: pieces, and a token for each byte."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    special = ["<unk>", "<s>", "</s>"]
    single = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=SIZES["vocab_size"], special_tokens=[*special, *single], max_token_length=8, show_progress=False
    )
    lines = (DEMO / "calibration.txt").read_text(encoding="utf-8").splitlines()
    # Words one by one: a piece of SentencePiece does not reach from one word into the next.
    tokenizer.train_from_iterator((word for line in lines for word in line.split(" ") if word), trainer)
    held = json.loads(tokenizer.to_str())
    held["added_tokens"] = [each for each in held["added_tokens"] if each["content"] in special]
    tokenizer = Tokenizer.from_str(json.dumps(held))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    words = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **words})
