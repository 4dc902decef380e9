"""GPTQ of a mixture of experts by which tokens an expert's statistics are about.

    python recipes/studies/quality/mixtures.py MODEL --calibration TEXT --text TEXT --json OUT.json

Ways: the tokens routed to the expert; these, and a few of the others with a small weight (the default); all tokens for
every expert. Beside them plain rounding. Each is compared with the original on held-out text by the KL of its
predictions. Texts are files of text or of token ids. Rows already in the file are not computed again.
"""

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

import compress
from compress.checkpoint.read.pretrained import load_dense, tokenizer_of
from compress.checkpoint.read.source import find_source
from compress.data.text import batches_of, load_tokens
from compress.engine.walk.held_out_kl import divergence_between
from compress.model import experts
from compress.passes.protocol.base import Pass
from compress.recipes.studies.figures import asked, made_by, stored

EVALUATED = 8  # samples at once
WAYS = ("rtn", "routed", "pooled", "all")


@contextmanager
def shown(way: str, chosen: float) -> Iterator[None]:
    """Shows experts, in the body, the tokens of a way. chosen: the share of experts that a token is routed to."""
    before = experts.STRIDE, experts.POOLED
    if way == "routed":
        experts.POOLED = 0.0
    elif way == "all":
        experts.STRIDE, experts.POOLED = 1, 1 / chosen
    elif way.startswith("pooled "):
        experts.POOLED = float(way.split()[1])
    try:
        yield
    finally:
        experts.STRIDE, experts.POOLED = before


def row(model: str, way: str, bits: int, calibration: torch.Tensor, text: torch.Tensor, group: int) -> dict[str, Any]:
    """The figures of one way."""
    source = find_source(model)
    original = load_dense(source).float().eval()
    config: Any = original.config
    kind = compress.RTN if way == "rtn" else compress.GPTQ
    p: Pass = kind(scheme=f"w{bits}a16", group_size=group)
    began = time.process_time()
    with shown(way, config.num_experts_per_tok / config.num_experts):
        result = compress.quantize(model, p, calibration=calibration)
    seconds = round(time.process_time() - began, 1)
    assert result.model is not None
    kl = divergence_between(original, result.model.float().eval(), batches_of(text, EVALUATED))
    counts = [layer.figures["routed_tokens"] for layer in result.record.layers if "routed_tokens" in layer.figures]
    print(f"| {way} | w{bits} | {len(calibration)} | {kl:.5f} | {seconds} |", flush=True)
    found = {"way": way, "bits": bits, "kl": kl, "cpu_seconds": seconds}
    return {**found, "tokens": [min(counts), max(counts)]} if counts else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--samples", type=int, nargs="+", default=[128, 8], help="windows to calibrate on")
    parser.add_argument("--text-samples", type=int, default=100, help="windows to evaluate on  [default: 100]")
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3])
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--ways", nargs="+", default=WAYS, help=f"{', '.join(WAYS)}, or 'pooled W' of another weight")
    parser.add_argument("--json", required=True, type=Path)
    said = parser.parse_args()
    source = find_source(said.model)
    read = partial(load_tokens, tokenizer=partial(tokenizer_of, source), config=load_dense(source).config)
    text = read(said.text, what="held-out", length=None, samples=said.text_samples).ids
    rows = stored(said.json)
    for samples in said.samples:
        calibration = read(said.calibration, what="calibration", length=None, samples=samples).ids
        about = {"model": Path(said.model).name, "calibration": list(calibration.shape), "text": list(text.shape)}
        for bits in said.bits:
            for way in said.ways:
                if any({**about, "way": way, "bits": bits}.items() <= found.items() for found in rows):
                    continue
                made = row(said.model, way, bits, calibration, text, said.group_size)
                rows.append({**about, **made, "command": asked(__file__)})
                said.json.write_text(json.dumps({**made_by(), "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
