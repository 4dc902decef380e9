"""Names and settings by which onnxruntime-genai, and optimum, run the graph of a decoder.

    past_key_values.0.key [batch, heads, past, width]   ->   present.0.key [batch, heads, past + tokens, width]

onnxruntime-genai hands each step the caches that the last one returned (`past_present_share_buffer` false), so that
plain attention serves: no GroupQueryAttention is needed.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compress.checkpoint.files import read_json

FILE = "genai_config.json"
CACHED = re.compile(r"(input|output)\.past_key_values\.layers\.(\d+)\.(key|value)s")  # as transformers names them
NAMES = {"input": "past_key_values", "output": "present"}
GENERATION = "generation_config.json"


def name_caches(program: Any) -> None:
    """Give the caches of an `onnx_ir.Model` their usual names, in place."""
    for value in (*program.graph.inputs, *program.graph.outputs):
        if (match := CACHED.fullmatch(value.name)) is not None:
            value.name = f"{NAMES[match[1]]}.{match[2]}.{match[3]}"


def settings(folder: Path, config: Any, graph: str) -> dict[str, Any]:
    """The content of genai_config.json. folder: of the checkpoint. config: of transformers. graph: name of its file."""
    asked: Mapping[str, Any] = read_json(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    ends = asked.get("eos_token_id", config.eos_token_id)
    last = ends[-1] if isinstance(ends, list) else ends
    pad = asked.get("pad_token_id", config.pad_token_id)
    heads = config.num_attention_heads
    caches = {
        f"{name}_{part}_names": f"{NAMES[kind]}.%d.{part}"
        for kind, name in (("input", "past"), ("output", "present"))
        for part in ("key", "value")
    }
    decoder = {
        "session_options": {"provider_options": []},
        "filename": graph,
        "head_size": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "hidden_size": config.hidden_size,
        "inputs": {
            "input_ids": "input_ids",
            "attention_mask": "attention_mask",
            **{name: each for name, each in caches.items() if name.startswith("past")},
        },
        "outputs": {"logits": "logits", **{name: each for name, each in caches.items() if name.startswith("present")}},
        "num_attention_heads": heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
    }
    tokens = {"bos_token_id": config.bos_token_id, "eos_token_id": ends, "pad_token_id": last if pad is None else pad}
    model = {
        "type": "decoder",  # of any family
        "context_length": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "decoder": decoder,
        **{name: token for name, token in tokens.items() if token is not None},
    }
    return {
        "model": model,
        "search": {"do_sample": False, "max_length": model["context_length"], "past_present_share_buffer": False},
    }
