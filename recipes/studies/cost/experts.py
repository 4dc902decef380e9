"""A layer of experts on a CPU: all of them together (`inference.layers.experts`) and one after the other.

    OMP_NUM_THREADS=1 python recipes/studies/cost/experts.py --json FILE

Random weights of Qwen3-MoE's layer: 1,024 wide, 32 experts of 512, 4 of them for each token, rounded to nearest. Both
ways take turns in every round, on other tokens and other experts in each; times are milliseconds of the CPU for a call,
of so many threads, the median of all rounds and the least.

Nothing is timed before the outputs of both are compared.
"""

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from compress.evaluation.speed.timing import elapsed_ms
from compress.inference.layers.compressed_layers import lay_in_strips
from compress.inference.layers.experts import StackedExperts, stack_experts
from compress.inference.layers.linear import PackedLinear, QuantLinear
from compress.model.split_experts import split_experts
from compress.recipes.studies.figures import tell_times

HIDDEN, INNER, EXPERTS, TOP = 1024, 512, 32, 4
TOKENS = (1, 8, 64, 512)
# {title: scheme, input_group}
SCHEMES: dict[str, tuple[str, int | None]] = {"w4a16": ("w4a16", None), "w4a16, int8 inputs": ("w4a16", 128)}
SCHEMES |= {"w8a16": ("w8a16", None), "w8a8": ("w8a8", None)}
# Relative difference of both ways, by the dtype of the sums over a token's experts.
WRONG = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
CPU = torch.device("cpu")


def experts_of(scheme: str, input_group: int | None, dtype: torch.dtype) -> StackedExperts:
    """A layer of experts on codes."""
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": INNER, "num_experts": EXPERTS}
    config = Qwen3MoeConfig(**sizes, num_experts_per_tok=TOP, experts_implementation="eager")
    block = nn.ModuleDict({"experts": Qwen3MoeExperts(config)})
    for parameter in block.parameters():
        nn.init.normal_(parameter, 0, 0.02)
    split_experts(block.to(dtype).requires_grad_(False))
    for name, module in [*block.named_modules()]:
        if isinstance(module, nn.Linear):
            layer: Any = QuantLinear.from_linear(module, scheme)
            if isinstance(layer, PackedLinear):
                layer.input_group = input_group
            block.set_submodule(name, layer)
    lay_in_strips(block)
    stack_experts(block)
    experts: Any = block["experts"]
    assert experts.stacks is not None, experts.reasons
    return experts


def routed(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(x, the experts of each token, their weights), random."""
    chosen = torch.stack([torch.randperm(EXPERTS)[:TOP] for _ in range(tokens)])
    return torch.randn(tokens, HIDDEN, dtype=dtype), chosen, torch.rand(tokens, TOP).to(dtype)


@torch.no_grad()
def measure(together: StackedExperts, tokens: int, dtype: torch.dtype, rounds: int) -> dict[str, dict[str, float]]:
    """{way: milliseconds of a call}, in turns."""
    ways = {"one by one": None, "together": together.stacks}

    def run(way: str, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        together.stacks = ways[way]
        return together(*given)

    first, second = (run(way, given) for given in [routed(tokens, dtype)] for way in ways)
    error = float((first - second).norm() / first.norm())
    assert error < WRONG[dtype], f"relative difference {error:.3g}"
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        given = routed(tokens, dtype)
        for name in ways:
            times[name].append(elapsed_ms(partial(run, name, given), CPU))
    return {name: {"median": statistics.median(found), "least": min(found)} for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.manual_seed(0)
    found: dict[str, dict[str, Any]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for title, (scheme, input_group) in SCHEMES.items():
            experts = experts_of(scheme, input_group, dtype)
            for tokens in TOKENS:
                rounds = max(8, asked.rounds // (1 + tokens // 64))
                times = measure(experts, tokens, dtype, rounds)
                ratio = times["one by one"]["median"] / times["together"]["median"]
                name = f"{title}, {str(dtype).removeprefix('torch.')}, {tokens}"
                found[name] = {**times, "ratio": ratio, "rounds": rounds}
                print(
                    f"{name:40s} {times['one by one']['median']:8.3f} {times['together']['median']:8.3f} {ratio:5.2f}"
                )
    sizes = {"hidden": HIDDEN, "inner": INNER, "experts": EXPERTS, "top": TOP, "threads": asked.threads}
    tell_times({**sizes, "ms": found}, asked.json)


if __name__ == "__main__":
    main()
