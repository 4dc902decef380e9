"""The memory that GPTQ takes on a GPU, by the arithmetic of `compress plan`, for models of known shapes.

    python recipes/studies/cost/device_memory.py --json OUT.json

Nothing is measured: the shapes come from models without weights, the bytes from `jobs/forecast/peak_memory.py`, which
`plan_memory.py` holds to runs on a CPU. A block is in bfloat16; statistics and solutions are in float32. There are
128 x 2048 calibration tokens, 8 rows at once. Under FSDP2 a rank has its own share of the tokens, and its part of the
whole model besides.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

import compress
from compress.engine.plan.plan import plan
from compress.jobs.forecast.peak_memory import TokenCounts, peak_of
from compress.model.split_experts import split_experts
from compress.recipes.studies.figures import asked, made_by

SAMPLES, LENGTH, BATCH, WIDTH = 128, 2048, 8, 2
LLAMA: dict[str, Any] = {"num_key_value_heads": 8, "vocab_size": 128256}
# A model's configuration with one block, and its number of blocks: what is worked on at once is a block.
MODELS = {
    "Llama-3.1-8B": (
        transformers.LlamaConfig(
            **LLAMA, hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_hidden_layers=1
        ),
        32,
    ),
    "Llama-3.1-70B": (
        transformers.LlamaConfig(
            **LLAMA, hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_hidden_layers=1
        ),
        80,
    ),
    "Qwen3-30B-A3B": (
        transformers.Qwen3MoeConfig(
            hidden_size=2048,
            moe_intermediate_size=768,
            intermediate_size=6144,
            num_experts=128,
            num_experts_per_tok=8,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            vocab_size=151936,
            num_hidden_layers=1,
        ),
        48,
    ),
}


def told(config: Any, blocks: int, ranks: int) -> dict[str, Any]:
    """10^9 bytes on a rank's device: with all forwards of a block kept, with them repeated, and the least that a run
    takes, with hidden states and statistics on the host; the rank's part of the model, where there are several."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    split_experts(model)
    planned = plan(model, [compress.GPTQ()], valued=False)
    tokens = TokenCounts(SAMPLES // ranks, LENGTH, BATCH)
    kept, repeated = (peak_of(planned, tokens, WIDTH, available) for available in (None, 0))
    least = peak_of(planned, tokens, WIDTH, 0, own=True)
    assert kept is not None
    assert repeated is not None
    assert least is not None
    own = {id(p) for p in planned.stacks[0].blocks[0][1].parameters()}
    block = sum(p.nbytes for p in model.parameters() if id(p) in own)
    whole = sum(p.nbytes for p in model.parameters()) + (blocks - 1) * block
    return {
        "ranks": ranks,
        "model_gb": round(whole / 1e9, 1),
        "of_a_rank_gb": 0 if ranks == 1 else round(whole / ranks / 1e9, 1),
        "kept_gb": round(kept.working / 1e9, 1),
        "repeated_gb": round(repeated.working / 1e9, 1),
        "least_gb": round(least.working / 1e9, 1),
        "parts_of_least_gb": {
            name: round(value / 1e9, 2) for name, value in asdict(least).items() if isinstance(value, int)
        },
    }


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    rows = [
        {"model": name, **told(config, blocks, ranks)} for name, (config, blocks) in MODELS.items() for ranks in (1, 8)
    ]
    record = {"command": asked(__file__), **made_by(), "samples": SAMPLES, "length": LENGTH, "rows": rows}
    arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
