"""Models of several families with random weights, and tokenizers that llama.cpp knows.

Tokenizers have the demo's merges, after a split like the family's, or are like SentencePiece's and trained on the
demo's text.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from compress.checkpoint.export.gguf.pre_tokenizers import LLAMA3, QWEN2
from compress.checkpoint.files import read_json, write_json
from compress.checkpoint.read.source import DEMO

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
GEMMA = {**SIZES, "head_dim": 32}
LLAMA3_POSITIONS: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "llama3": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**SIZES, "rope_parameters": LLAMA3_POSITIONS})
    ),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=None)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=64)),
    "gemma": lambda: transformers.GemmaForCausalLM(transformers.GemmaConfig(**GEMMA)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**GEMMA, query_pre_attn_scalar=32, sliding_window=64)
    ),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**GEMMA, query_pre_attn_scalar=32, sliding_window=64)
    ),
}
SPLITS = {"qwen2": QWEN2, "qwen3": QWEN2, "llama3": LLAMA3}  # how tokenizers of these families split a text
PIECES = ("llama", "gemma", "gemma2", "gemma3", "mistral")  # families whose tokenizers are SentencePiece's


def made(family: str, folder: Path) -> Path:
    """A model of a family with random weights, norms and biases among them, float16, with a tokenizer."""
    torch.manual_seed(0)
    model: Any = FAMILIES[family]()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.1)
    model.half().save_pretrained(folder)
    if family in PIECES:
        pieces(folder)
        return folder
    held = read_json(DEMO / "tokenizer.json")
    words = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": SPLITS[family]}, "behavior": "Isolated", "invert": False}
    held["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, words]}
    write_json(folder / "tokenizer.json", held)
    shutil.copyfile(DEMO / "tokenizer_config.json", folder / "tokenizer_config.json")
    return folder


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
