"""mlx-lm on outputs of `--for mlx`, beside `compress.load`.

    python recipes/studies/engines/mlx_check.py demo MODEL --mlx-python VENV/bin/python --text TEXT --json OUT.json
        [--schemes w4a16 ...] [--windows N] [--length N] [--tokens N]

Quantizes each model by rounding to nearest, its embedding to 8 bits, and runs the output in mlx-lm on a CPU and in
`compress.load` in float32. Stores the KL between both, and how many tokens of a greedy continuation are the same.
"""

import argparse
import json
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
from compress.recipes.studies.figures import asked, command, made_by

SCHEMES = [f"w{bits}a16" for bits in (2, 3, 4, 5, 6, 8)]
LIKELIEST = 1024  # tokens whose probabilities are compared


def row_of(model: str, scheme: str, arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The figures of one scheme."""
    folder = scratch / "out"
    words = ("--method", "rtn", "--for", "mlx", "--scheme", scheme, "--embeddings", "w8a16", "--overwrite")
    command("quantize", model, *words, "--output", str(folder))
    source = find_source(str(folder))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    limits = {"samples": arguments.windows, "length": arguments.length}
    rows = load_tokens(arguments.text, tokenizer, source.config, what="text", **limits).ids
    np.save(scratch / "ids.npy", rows.numpy())
    worker = str(Path(__file__).with_name("mlx_worker.py"))
    files = (str(folder), str(scratch / "ids.npy"), str(scratch / "out.npz"), str(arguments.tokens))
    subprocess.run([arguments.mlx_python, worker, *files], check=True)
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
    versions = {"mlx-lm": str(held["version"])}
    return {"model": Path(model).name, "scheme": scheme, **figures, "same_greedy": same, **versions}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--mlx-python", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    rows = []
    for model in arguments.models:
        for scheme in arguments.schemes:
            with tempfile.TemporaryDirectory() as scratch:
                rows.append(row_of(model, scheme, arguments, Path(scratch)))
            shown = {key: rows[-1][key] for key in ("model", "scheme", "kl", "perplexity", "same_top", "same_greedy")}
            print(shown, flush=True)
            record = {"command": asked(__file__), **made_by(), "tokens": arguments.tokens, "rows": rows}
            arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
