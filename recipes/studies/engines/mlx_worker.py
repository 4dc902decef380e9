"""Runs a model in mlx-lm. Started by `mlx_check.py` with the Python of an environment that has it.

    python mlx_worker.py MODEL IDS.npy OUT.npz TOKENS

IDS: token ids [R, T]. OUT: logits float32 [R, T, V], the ids of a greedy continuation of the first row, the version of
mlx-lm.
"""

import sys
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model


def main(model: str, ids: str, out: str, tokens: str) -> None:
    network, _ = load_model(Path(model))
    rows = np.load(ids)
    logits = np.concatenate([np.array(network(mx.array(row[None])).astype(mx.float32)) for row in rows])
    steps = generate_step(mx.array(rows[0]), network, max_tokens=int(tokens))
    continued = [int(token) for token, _ in steps]
    np.savez(out, logits=logits, continued=continued, version=version("mlx-lm"))


if __name__ == "__main__":
    main(*sys.argv[1:])
