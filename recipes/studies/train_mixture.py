"""Train a small mixture of experts: Qwen3-MoE, 8 experts, 2 for each token, some 5 M parameters.

    python recipes/studies/train_mixture.py --text STORIES --tokenizer MODEL --output OUT

STORIES is text of which the last twentieth is held out; the tokenizer is that of another model. A run of 1,500 steps
takes about ten minutes on two cores. `training.json` keeps steps, versions and the held-out perplexity.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from compress.checkpoint.read.pretrained import load_tokenizer
from compress.checkpoint.read.source import find_source
from compress.recipes.studies.figures import made_by

CONTEXT, BATCH, WARMUP = 256, 16, 50
EXPERTS, CHOSEN = 8, 2


def model_of(vocabulary: int) -> Qwen3MoeForCausalLM:
    """A random mixture."""
    config = Qwen3MoeConfig(
        vocab_size=vocabulary,
        hidden_size=192,
        intermediate_size=256,
        moe_intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        norm_topk_prob=True,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        output_router_logits=True,
        router_aux_loss_coef=0.002,
        experts_implementation="eager",
    )
    return Qwen3MoeForCausalLM(config)


def perplexity(model: Qwen3MoeForCausalLM, rows: Tensor) -> float:
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(model(part).logits[:, :-1].flatten(0, 1), part[:, 1:].flatten())
            for part in rows.split(BATCH)
        ]
    return math.exp(sum(map(float, losses)) / len(losses))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--steps", type=int, default=1500)
    said = parser.parse_args()
    tokenizer = load_tokenizer(find_source(said.tokenizer))
    ids = torch.tensor(tokenizer(said.text.read_text(encoding="utf-8"), verbose=False)["input_ids"])
    rows = ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    kept = len(rows) // 20
    read, held_out = rows[:-kept], rows[-kept:]
    torch.manual_seed(0)
    model = model_of(len(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.05)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP, 1 - step / (said.steps + 1))
    )
    began = time.monotonic()
    for step in range(said.steps):
        batch = read[torch.randint(len(read), (BATCH,))]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        if step % 100 == 0:
            print(f"step {step}: loss {float(loss):.3f}, {time.monotonic() - began:.0f} s", flush=True)
    model.eval().save_pretrained(said.output)
    tokenizer.save_pretrained(said.output)
    about = {"steps": said.steps, "tokens": read.numel(), "held_out_perplexity": perplexity(model, held_out[:64])}
    (said.output / "training.json").write_text(json.dumps({**about, **made_by()}, indent=1) + "\n", encoding="utf-8")
    print(about)


if __name__ == "__main__":
    main()
