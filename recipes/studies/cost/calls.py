"""The time of one call on a CPU where the arithmetic is next to nothing: layers, their operators and attention.

    OMP_NUM_THREADS=1 python recipes/studies/cost/calls.py --json FILE

Layers of 64 x 64, one token, no gradient; attention of one token, 8 heads over 4 of keys, 16 keys of 64. Every
candidate takes a turn of so many calls in every round; times are microseconds of the CPU for a call, of one thread, the
median of all rounds and the least.

No layer is timed before its result is checked against that of its dequantized weights.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from compress.evaluation.speed.timing import elapsed_ms
from compress.inference.layers.linear import PackedLinear, QuantLinear
from compress.kernels.cpu import direct
from compress.recipes.studies.figures import tell_times

SIZE = 64
KEYS, HEADS, KEY_HEADS = 16, 8, 4
# Relative error of a product whose inputs are rounded to int8 stays below this.
WRONG = 0.03
CPU = torch.device("cpu")
Calls = dict[str, Callable[[], Any]]
# {title: scheme, input_group}
LAYERS = {"w4a16": ("w4a16", None), "w4a16, int8 inputs": ("w4a16", 128)}
LAYERS |= {"w4a8": ("w4a8", -1), "w8a16": ("w8a16", None), "w8a8": ("w8a8", None)}


def layers(dtype: torch.dtype) -> Calls:
    """A dense layer and compressed ones, each beside the operator that it calls."""
    dense, x = nn.Linear(SIZE, SIZE, dtype=dtype).requires_grad_(False), torch.randn(1, SIZE).to(dtype)
    calls: Calls = {"nn.Linear": partial(dense, x), "torch's linear": partial(linear, x, dense.weight, dense.bias)}
    for title, (scheme, input_group) in LAYERS.items():
        layer: Any = QuantLinear.from_linear(dense, scheme)
        if isinstance(layer, PackedLinear):
            layer.input_group = input_group
            layer.lay_in_strips()
        expected = linear(x.double(), layer.dequantize().double(), dense.bias.double())
        error = float((layer(x).double() - expected).norm() / expected.norm())
        assert error < WRONG, f"{title}: relative error {error:.3g}"
        calls[title] = partial(layer, x)
        if isinstance(layer, PackedLinear):
            given = (x, *layer.held, layer.bias, layer.container, layer.group_size, layer.input_group)
            calls[f"{title}: operator"] = partial(torch.ops.compress.cpu_linear.default, *given)
    return calls


def attention(dtype: torch.dtype) -> Calls:
    """A step of generation: torch's attention, ours, and the check that ours takes the tensors."""
    query = torch.randn(1, HEADS, 1, SIZE).to(dtype)
    key, value = (torch.randn(1, KEY_HEADS, KEYS, SIZE).to(dtype) for _ in range(2))
    given = (query, key, value)
    assert direct.attends(*given, None)

    def ours() -> Tensor | None:
        return direct.attention(*given, None, SIZE**-0.5) if direct.attends(*given, None) else None

    return {
        "torch's attention": lambda: scaled_dot_product_attention(*given, enable_gqa=True).transpose(1, 2),
        "attention": ours,
    }


def repeated(call: Callable[[], Any], count: int) -> None:
    for _ in range(count):
        call()


@torch.no_grad()
def measure(calls: Calls, rounds: int, each: int) -> dict[str, dict[str, float]]:
    """{candidate: microseconds of a call}, in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            times[name].append(elapsed_ms(partial(repeated, call, each), CPU) / each * 1e3)
    return {name: {"median": statistics.median(found), "least": min(found)} for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--calls", type=int, default=200, help="Of a candidate in its turn.")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with torch.no_grad():
        calls = {
            f"{title}, {str(dtype).removeprefix('torch.')}": call
            for dtype in (torch.float32, torch.bfloat16)
            for title, call in (layers(dtype) | attention(dtype)).items()
        }
    times = measure(calls, asked.rounds, asked.calls)
    for name, found in times.items():
        print(f"{name:40s} {found['median']:6.2f} {found['least']:6.2f}")
    tell_times({"rounds": asked.rounds, "calls": asked.calls, "us": times}, asked.json)


if __name__ == "__main__":
    main()
