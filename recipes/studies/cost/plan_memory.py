"""The memory that `compress plan` tells beside the memory that the run then takes.

    python recipes/studies/cost/plan_memory.py --json OUT.json [--models llama-2048 ...] [--methods rtn ...]
        [--samples 16] [--length 256] [--limit MIB]

Every case writes a checkpoint of random weights, plans it, and quantizes it by the command line; the figure is the
largest anonymous memory (`RssAnon` of /proc/PID/status: what files do not back) of the command, read every 10 ms. A
method that calibrates gets 16 x 256 random tokens. --limit is RLIMIT_DATA of plan and run, by `prlimit`: where the
forwards of the calibration data do not fit, they are repeated.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from compress.jobs.forecast.peak_memory import PeakMemory
from compress.recipes.studies.cost.quantize_memory import peaks_of
from compress.recipes.studies.figures import asked, made_by

METHODS = {
    "rtn": ["--method", "rtn"],
    "gptq": ["--method", "gptq"],
    "gptq, fast": ["--method", "gptq", "--effort", "fast"],
    "smoothquant w8a8": ["--method", "smoothquant", "--scheme", "w8a8"],
}


def llama(hidden: int, intermediate: int, layers: int) -> nn.Module:
    """A Llama of random weights."""
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        vocab_size=32000,
    )
    return transformers.LlamaForCausalLM(config)


def mixture() -> nn.Module:
    """A Qwen3-MoE of random weights."""
    config = transformers.Qwen3MoeConfig(
        hidden_size=1024,
        intermediate_size=2048,
        moe_intermediate_size=768,
        num_experts=16,
        num_experts_per_tok=2,
        num_hidden_layers=3,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=32000,
    )
    return transformers.Qwen3MoeForCausalLM(config)


MODELS = {
    "llama-2048": lambda: llama(2048, 5632, 3),
    "llama-1024": lambda: llama(1024, 4096, 6),
    "llama-1024, one block": lambda: llama(1024, 4096, 1),
    "gpt2-1280": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=1280, n_head=20, n_layer=4)),
    "bert-1024": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=16)
    ),
    "qwen3-moe-1024": mixture,
}


def measured(folder: Path, method: str, samples: int, length: int, limit: int | None) -> dict[str, Any]:
    """The memory that is told and that is taken, in 10^6 bytes, and the one over the other; the digest of the file."""
    limited = [] if limit is None else ["prlimit", f"--data={limit * 2**20}"]
    command = [*limited, sys.executable, "-m", "compress"]
    extent = ["--samples", str(samples), "--length", str(length), "--json", "-"]
    asking = [*command, "plan", str(folder / "in"), *METHODS[method], *extent]
    told = subprocess.run(asking, check=True, capture_output=True, text=True)
    memory = PeakMemory(**json.loads(told.stdout)["memory"])
    parts = {name: value for name, value in asdict(memory).items() if isinstance(value, int)}
    parts["fragments"] = memory.fragments
    words = [*command, "quantize", str(folder / "in"), *METHODS[method], "--output", str(folder / method), "--quiet"]
    words += ["--no-verify", "--allow-little"]
    if method != "rtn":
        words += ["--calibration", str(folder / "tokens.pt")]
    started = time.monotonic()
    taken, _ = peaks_of(words)
    return {
        "limit_mib": limit,
        "seconds": round(time.monotonic() - started),
        "sha256": sha256((folder / method / "model.safetensors").read_bytes()).hexdigest(),
        "told_mb": round(memory.total / 1e6),
        "taken_mb": round(taken / 1e6),
        "told_over_taken": round(memory.total / taken, 3),
        "parts_mb": {name: round(value / 1e6) for name, value in parts.items()},
    }


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--limit", type=int, metavar="MIB")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    samples, length = arguments.samples, arguments.length
    record = {"command": asked(__file__), **made_by(), "samples": samples, "length": length, "rows": rows}
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as scratch:
            torch.manual_seed(0)
            MODELS[name]().bfloat16().save_pretrained(Path(scratch) / "in")
            torch.save(torch.randint(30000, (samples, length)), Path(scratch) / "tokens.pt")
            for method in arguments.methods:
                rows.append(
                    {
                        "model": name,
                        "method": method,
                        **measured(Path(scratch), method, samples, length, arguments.limit),
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
                arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
