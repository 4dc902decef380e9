"""The same budget of zeros or of low rank shared out between layers in several ways: how far the model moves.

    python recipes/studies/quality/layer_shares.py MODEL --calibration TEXT --text TEXT --json OUT.json

Each row is made in this process and compared with the original on held-out text: by the KL of its predictions, an
encoder by the squared distance of its last hidden states as a part of their squares. Texts are files of text or of
token ids. Rows already in the file are not computed again.
"""

import argparse
import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import compress
from compress.checkpoint.read.pretrained import load_dense, tokenizer_of
from compress.checkpoint.read.source import find_source
from compress.data.text import batches_of, load_tokens
from compress.engine.walk.held_out_kl import divergence_between
from compress.engine.walk.layer_damage import relative_error
from compress.model.calls import Batch
from compress.passes.protocol.base import Pass
from compress.passes.protocol.recipe import make_pass
from compress.recipes.studies.figures import asked, made_by, stored

EVALUATED = 8  # samples at once
ZEROS = 0.6
ROOM = 0.7


def ways() -> dict[str, Pass]:
    """{title: the pass}, of each method the uniform shares first."""
    options: dict[str, tuple[str, dict[str, Any]]] = {}
    for method in ("wanda", "sparsegpt"):
        for how in ("uniform", "layer-loss"):
            options[f"{method} {ZEROS:.0%}, {how}"] = method, {"sparsity": ZEROS, "allocate": how}
    for how in ("uniform", "layer-loss"):
        options[f"low-rank {ROOM:.0%}, {how}"] = "low-rank", {"share": ROOM, "allocate": how}
    return {title: make_pass(method, said) for title, (method, said) in options.items()}


@torch.no_grad()
def distance_between(expected: nn.Module, found: nn.Module, batches: Sequence[Batch]) -> float:
    """The mean over batches of the part of the last hidden states, in squares, that is off."""
    parts = [relative_error(*(m(**b).last_hidden_state.flatten(0, 1) for m in (expected, found))) for b in batches]
    return sum(parts) / sum(batch["input_ids"].numel() for batch in batches)


def row(title: str, model: str, p: Pass, calibration: torch.Tensor, text: torch.Tensor) -> dict[str, Any]:
    """The figures of one way; of the layers' shares the least and the most."""
    began = time.process_time()
    result = compress.quantize(model, p, calibration=calibration)
    seconds = round(time.process_time() - began, 1)
    assert result.model is not None
    original, made = load_dense(find_source(model)).float().eval(), result.model.float().eval()
    language = hasattr(original, "lm_head")
    measure = divergence_between if language else distance_between
    moved = measure(original, made, batches_of(text, EVALUATED))
    figures = [layer.figures for layer in result.record.layers]
    shares = [f["sparsity"] for f in figures if "sparsity" in f]
    print(f"| {title} | {moved:.4f} | {seconds} |", flush=True)
    found = {"title": title, "measure": "KL" if language else "distance", "moved": moved, "cpu_seconds": seconds}
    return {**found, "shares": [min(shares), max(shares)]} if shares else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--length", type=int, help="tokens of a window of text")
    parser.add_argument("--samples", type=int, default=128, help="windows to calibrate on  [default: 128]")
    parser.add_argument("--text-samples", type=int, default=100, help="windows to evaluate on  [default: 100]")
    parser.add_argument("--only", nargs="+", default=[""], help="words of titles  [default: all rows]")
    parser.add_argument("--json", required=True, type=Path)
    said = parser.parse_args()
    source = find_source(said.model)
    config = load_dense(source).config
    read = partial(load_tokens, tokenizer=partial(tokenizer_of, source), config=config)
    calibration = read(said.calibration, what="calibration", length=said.length, samples=said.samples).ids
    text = read(said.text, what="held-out", length=said.length, samples=said.text_samples).ids
    about = {"model": Path(said.model).name, "calibration": list(calibration.shape), "text": list(text.shape)}
    rows = stored(said.json)
    for title, p in ways().items():
        known = any({**about, "title": title}.items() <= found.items() for found in rows)
        if known or not any(word in title for word in said.only):
            continue
        rows.append({**about, **row(title, said.model, p, calibration, text), "command": asked(__file__)})
        said.json.write_text(json.dumps({**made_by(), "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
