"""Runs a model in mlx-lm. Started by `mlx_check.py` with the Python of an environment that has it.

    python mlx_worker.py MODEL IDS.npy OUT.npz TOKENS DTYPE

IDS: token ids [R, T]. DTYPE: float32, or `stored` for that of the file. OUT: logits float32 [R, T, V], the ids of a
greedy continuation of the first row, the version of mlx-lm, and the errors of two products in bfloat16.
"""

import sys
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model


def product_errors() -> list[float]:
    """Relative errors of a quantized and a dense product, both in bfloat16: random, 1,536 inputs, 8 bits."""
    x = mx.random.normal((8, 1536), mx.bfloat16, key=mx.random.key(0))
    codes, scales, biases = mx.quantize(mx.random.normal((256, 1536), mx.bfloat16, key=mx.random.key(1)), 64, 8)
    dense = mx.dequantize(codes, scales.astype(mx.float32), biases.astype(mx.float32), 64, 8)
    exact = x.astype(mx.float32) @ dense.T
    found = (mx.quantized_matmul(x, codes, scales, biases, True, 64, 8), x @ dense.astype(mx.bfloat16).T)
    return [float(mx.linalg.norm(each.astype(mx.float32) - exact) / mx.linalg.norm(exact)) for each in found]


def main(model: str, ids: str, out: str, tokens: str, dtype: str) -> None:
    network, _ = load_model(Path(model))
    if dtype == "float32":
        network.set_dtype(mx.float32)
    rows = np.load(ids)
    logits = np.concatenate([np.array(network(mx.array(row[None])).astype(mx.float32)) for row in rows])
    steps = generate_step(mx.array(rows[0]), network, max_tokens=int(tokens))
    continued = [int(token) for token, _ in steps]
    np.savez(out, logits=logits, continued=continued, version=version("mlx-lm"), product_errors=product_errors())


if __name__ == "__main__":
    main(*sys.argv[1:])
