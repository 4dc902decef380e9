"""GPTQ alone, with `reconstruct` behind it, and with `train` behind it, by perplexity and by CPU time.

    python recipes/studies/quality/reconstructed.py MODEL --calibration TOKENS --text TOKENS --group-size 32 \\
        --bits 4 --json OUT.json

Each row is quantized in this process, in memory, and evaluated on held-out text; seconds are those of the CPU, of
reading the model and quantizing it, whatever else the machine does. `train` learns from the original on the calibration
tokens, which are all that any row sees.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import compress
from compress.passes.protocol.base import Pass
from compress.passes.reconstruct import Reconstruct
from compress.passes.train import Train
from compress.recipes.studies.figures import asked, made_by

# Of the whole model, embeddings and norms with it; scales choose no codes, lest all of GPTQ's change at once.
TAUGHT = Train(
    steps=60, rows=8, learning_rate=3e-4, scale_rate=2e-3, warmup=0.1, scales="anchored", features=16.0, held_out=0.0
)


def ways(bits: int, group_size: int, grid: str, objective: str) -> dict[str, list[Pass]]:
    """The compared recipes, by title."""
    options = {"scheme": f"w{bits}a16", "group_size": group_size, "grid": grid, "objective": objective}
    start = compress.GPTQ(**options)  # type: ignore[arg-type]
    said = f"w{bits} {grid}{', loss' if objective == 'loss' else ''}"
    behind: dict[str, list[Pass]] = {"": [], ", reconstruct": [Reconstruct()], ", train": [TAUGHT]}
    return {f"{said}, gptq{title}": [start, *passes] for title, passes in behind.items()}


def row(title: str, model: str, passes: list[Pass], calibration: torch.Tensor, text: torch.Tensor) -> dict[str, Any]:
    """The figures of one recipe."""
    started = time.process_time()
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    made = compress.quantize(loaded, passes, calibration=calibration, training=calibration, restore=False).model
    seconds = round(time.process_time() - started, 1)
    assert made is not None
    found = compress.evaluate(made, reference=model, text=text)
    assert found.kl_mean is not None
    print(f"| {title} | {found.perplexity:.4f} | {found.kl_mean:.5f} | {seconds} |", flush=True)
    return {"title": title, "perplexity": found.perplexity, "kl_mean": found.kl_mean, "cpu_seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--calibration", required=True, type=Path)
    parser.add_argument("--text", required=True, type=Path)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--bits", type=int, nargs="+", default=[4])
    parser.add_argument("--grids", nargs="+", default=["signed-scale"])
    parser.add_argument("--objectives", nargs="+", default=["layer"], help="what GPTQ rounds for: layer, loss")
    parser.add_argument("--json", required=True, type=Path)
    said = parser.parse_args()
    calibration, text = (torch.load(path, weights_only=True) for path in (said.calibration, said.text))
    rows = [
        row(title, said.model, passes, calibration, text)
        for bits in said.bits
        for grid in said.grids
        for objective in said.objectives
        for title, passes in ways(bits, said.group_size, grid, objective).items()
    ]
    record = {
        "model": Path(said.model).name,
        "command": asked(__file__),
        "group_size": said.group_size,
        "calibration": said.calibration.name,
        "text": said.text.name,
        **made_by(),
        "rows": rows,
    }
    said.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
