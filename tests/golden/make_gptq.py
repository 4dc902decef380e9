"""Writes gptq.safetensors: a small layer and what the published GPTQ algorithm decides for it.

The decisions come from `published_gptq` in tests/support/published.py, a transcription of arXiv 2210.17323 that
shares no code with `compress`. Run from the repository root, by hand and only to change the stored settings:

    python tests/golden/make_gptq.py
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.append(str(Path(__file__).parents[1] / "support"))
from published import GOLDEN_SETTINGS, STORED, mean_square, published_gptq, realistic_layer

ROWS, COLUMNS, SEED = 6, 48, 7


def main() -> None:
    weight, x = realistic_layer(ROWS, COLUMNS, SEED)
    # Stored in float32; both sides start from what was stored.
    weight, hessian = weight.float(), mean_square(x).float()
    hessian = (hessian + hessian.t()) / 2
    tensors = {"weight": weight, "hessian": hessian}
    for setting, (grid, bits, group_size, act_order) in GOLDEN_SETTINGS.items():
        codes, scale, zero = published_gptq(
            weight.double(), hessian.double(), grid, bits, group_size, act_order, torch.float16
        )
        half = 2 ** (bits - 1)
        tensors[f"{setting}.codes"] = (codes - half).to(torch.int8)
        tensors[f"{setting}.scale"] = scale.half()
        if grid == "asymmetric":
            tensors[f"{setting}.zero_point"] = (zero - half).to(torch.int8)
    save_file(tensors, STORED)
    print(f"{STORED}: {STORED.stat().st_size} bytes")


if __name__ == "__main__":
    main()
