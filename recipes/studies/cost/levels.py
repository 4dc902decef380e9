"""One token through layers of 4 bits on a CPU: tables of levels beside integers.

    OMP_NUM_THREADS=1 python recipes/studies/cost/levels.py --json FILE [--size N] [--rounds N]

Layers of N x N, one token, no gradient; every scheme takes a turn in every round. Times are microseconds of a call, the
median of all rounds and the least. COMPRESS_CPU=avx2 compiles for a processor that has no more than AVX2.

No layer is timed before its result is checked against that of its dequantized weights.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import linear

from compress.inference.layers.linear import QuantLinear
from compress.kernels.cpu import build
from compress.recipes.studies.cost.calls import Calls, measure
from compress.recipes.studies.figures import tell_times

TABLES = ("mxfp4a16", "nvfp4a16", "nf4a16")
GROUPS = (32, 64)  # of integers: those of mxfp4a16 and, as no loop takes 16, the bytes of nvfp4a16; those of nf4a16
WRONG = 0.01  # no relative error of a product is as large


def layers(size: int, dtype: torch.dtype) -> Calls:
    """A layer of every scheme, by its name."""
    dense, x = nn.Linear(size, size, dtype=dtype).requires_grad_(False), torch.randn(1, size).to(dtype)
    given: dict[str, tuple[str, int | None]] = {name: (name, None) for name in TABLES} | {
        f"w4a16 g{g}": ("w4a16", g) for g in GROUPS
    }
    calls: Calls = {"nn.Linear": partial(dense, x)}
    for title, (scheme, group) in given.items():
        layer = QuantLinear.from_linear(dense, scheme, group)
        layer.lay_in_strips()
        expected = linear(x.double(), layer.dequantize().double(), dense.bias.double())
        error = float((layer(x).double() - expected).norm() / expected.norm())
        assert error < WRONG, f"{title}: relative error {error:.3g}"
        calls[title] = partial(layer, x)
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    found = {
        str(dtype).removeprefix("torch."): measure(layers(asked.size, dtype), asked.rounds, 1)
        for dtype in (torch.bfloat16, torch.float32)
    }
    about = {"instructions": build.library().instructions().decode(), "size": asked.size, "rounds": asked.rounds}
    tell_times({**about, "us": found}, asked.json)


if __name__ == "__main__":
    main()
