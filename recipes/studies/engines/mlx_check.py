"""mlx-lm on outputs of `--for mlx`, beside `compress.load`.

    python recipes/studies/engines/mlx_check.py demo MODEL --random qwen3 --mlx-python VENV/bin/python --text TEXT
        --json OUT.json [--schemes w4a16 ...] [--windows N] [--length N] [--tokens N] [--dtype stored]

Quantizes each model by rounding to nearest, its embedding to 8 bits, and runs the output on a CPU in mlx-lm, in float32
or in the dtype of the file, and in `compress.load` in float32. `--random` makes models of a family with random weights
(`random_models`). Stores the KL between both, how many tokens of a greedy continuation are the same, and the relative
errors of a quantized and a dense product of bfloat16 in MLX.
"""

import argparse
import subprocess
import tempfile
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import AutoTokenizer

import compress
from compress.checkpoint.read.source import find_source
from compress.data.text import load_tokens
from compress.recipes.studies.engines.agreement import compared, same_start
from compress.recipes.studies.engines.gguf_check import keep
from compress.recipes.studies.engines.random_models import EVERY, add_models, named_models
from compress.recipes.studies.figures import asked, command, made_by

SCHEMES = [f"w{bits}a16" for bits in (2, 3, 4, 5, 6, 8)]
LIKELIEST = 1024  # tokens whose probabilities are compared


def row_of(name: str, model: Path, scheme: str, arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The figures of one scheme."""
    folder = scratch / "out"
    words = ("--method", "rtn", "--for", "mlx", "--scheme", scheme, "--embeddings", "w8a16", "--overwrite")
    command("quantize", str(model), *words, "--output", str(folder))
    source = find_source(str(folder))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    limits = {"samples": arguments.windows, "length": arguments.length}
    rows = load_tokens(arguments.text, tokenizer, source.config, what="text", **limits).ids
    np.save(scratch / "ids.npy", rows.numpy())
    worker = str(Path(__file__).with_name("mlx_worker.py"))
    task = (str(folder), str(scratch / "ids.npy"), str(scratch / "out.npz"), str(arguments.tokens), arguments.dtype)
    done = subprocess.run([arguments.mlx_python, worker, *task], stderr=subprocess.PIPE, text=True)
    row = {"model": name, "title": f"{scheme} {arguments.dtype}", "scheme": scheme, "dtype": arguments.dtype}
    if done.returncode:
        return {**row, "error": done.stderr.strip().splitlines()[-1]}
    held = np.load(scratch / "out.npz")
    theirs = torch.from_numpy(held["logits"]).log_softmax(-1)[:, :-1]
    best, names = theirs.topk(min(LIKELIEST, theirs.shape[-1]))
    own = theirs.gather(2, rows[:, 1:, None])[..., 0]
    ours = compress.load(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = [ours(ids[None]).logits[0, :-1].log_softmax(-1) for ids in rows]
        continued = cast(Any, ours).generate(rows[:1], max_new_tokens=arguments.tokens, do_sample=False)[
            0, rows.shape[1] :
        ]
    figures = compared(logits, rows, {"own": own, "best": best, "names": names})
    same = same_start(continued.tolist(), held["continued"].tolist())
    versions = {"mlx-lm": str(held["version"]), "bfloat16_errors": held["product_errors"].tolist()}
    return {**row, **figures, "same_greedy": same, **versions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser, EVERY)
    parser.add_argument("--mlx-python", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "stored"), default="float32")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        models = named_models(arguments.models, arguments.random, Path(folder))
        for name, model in models.items():
            for scheme in arguments.schemes:
                with tempfile.TemporaryDirectory() as scratch:
                    row = row_of(name, model, scheme, arguments, Path(scratch))
                shown = ("model", "title", "kl", "perplexity", "same_top", "same_greedy", "error")
                print({key: row[key] for key in shown if key in row}, flush=True)
                made_here = {"tokens": arguments.tokens, "command": asked(__file__), "made_by": made_by()}
                keep(arguments.json, row | made_here)


if __name__ == "__main__":
    main()
