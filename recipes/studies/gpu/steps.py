"""Times the products of a block's step, by configuration.

    python recipes/studies/gpu/steps.py --json steps.json [--shape llama-3-8b] [--tokens 1]

A product is timed as a CUDA graph of it over `--copies` weights, more than the L2 cache holds. Configurations are
compiled first, by several processes at once, which share Triton's cache. The file is written anew after each product:

    results: [{"product", "N", "K", "tokens", "floor_us": its bytes at `--bandwidth`, "chosen": {"us", "shape"},
               "best": [{"us", "shape"}]}]

shape: a `Shape`, or the rows of a program where there is one token.

On a CPU, under the interpreter, only that every product runs.
"""

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.files import write_json
from compress.evaluation.provenance import origin
from compress.evaluation.speed import decoder
from compress.kernels import workspace
from compress.kernels.layouts.words import CodeWords, planar_block, planar_words
from compress.kernels.step_functions import Activation, Norm
from compress.kernels.triton.steps.norms import RowNorm
from compress.kernels.triton.steps.one_token import ROWS, token_product
from compress.kernels.triton.steps.products import BLOCK_M, step_product, step_shape
from compress.kernels.tuning.choose import device_of, kind_of
from compress.kernels.tuning.table import Shape, cdiv
from compress.recipes.studies.figures import asked as command_of

BITS, GROUP = 4, 128
SHOWN = 5
Configuration = int | Shape
KIND = kind_of("weight_only", BITS, GROUP, False, torch.bfloat16)


def products(shape: str) -> dict[str, tuple[int, int]]:
    """(N, K) of the products of a block, q, k, v as one and gate, up as one."""
    config = decoder.config_of(shape)
    width, heads = config.hidden_size, config.num_attention_heads
    size = width // heads
    states = (heads + 2 * config.num_key_value_heads) * size
    sizes = {"qkv": (states, width), "output": (width, heads * size)}
    return sizes | {"gate_up": (2 * config.intermediate_size, width), "down": (width, config.intermediate_size)}


def configurations(N: int, K: int, tokens: int, processors: int) -> Iterator[Configuration]:
    """Rows of a program for one token; else configurations whose programs fill the processors once to eight times."""
    if tokens == 1:
        yield from (4, 8, 16, 32)
        return
    for rows, split, warps, stages in itertools.product((64, 128), (1, 2, 4, 8, 16), (4, 8), (3, 4, 6)):
        programs = cdiv(N, rows) * split
        blocks = K // planar_block(BITS)
        if processors <= programs <= 8 * processors and 2 * split <= blocks and warps * 16 <= rows:
            yield Shape(BLOCK_M, rows, split, warps, stages)


class TimedProduct:
    """A product of a step over several weights."""

    def __init__(self, name: str, N: int, K: int, tokens: int, copies: int, device: torch.device) -> None:
        self.name, self.size = name, (N, K)
        self.x = torch.randn(tokens, K, dtype=torch.bfloat16, device=device)
        self.residual = torch.randn(tokens, N, dtype=torch.bfloat16, device=device)
        self.norm = RowNorm(Norm.RMS, torch.ones(K, dtype=torch.bfloat16, device=device), None, 1e-5)
        self.weights = [self.weight(device) for _ in range(copies)]

    def weight(self, device: torch.device) -> CodeWords:
        N, K = self.size
        words = torch.randint(-(2**15), 2**15, (N, planar_words(K, BITS)), dtype=torch.int16, device=device)
        scale = torch.rand(K // GROUP, N, device=device).div_(100).bfloat16()
        return CodeWords(words, scale, None, GROUP, BITS)

    def run(self, configuration: Configuration) -> Tensor:
        """The products with all weights, one after the other; the last result."""
        norm = self.norm if self.name in ("qkv", "gate_up") else None
        gated = self.name == "gate_up"
        activation, residual = Activation.SILU if gated else None, None if norm else self.residual
        for weight in self.weights:
            if isinstance(configuration, int):
                given = (None, norm, activation, gated, residual, None, configuration)
                out = token_product(self.x, weight, *given)
            else:
                out = step_product(
                    self.x,
                    weight,
                    norm=norm,
                    activation=activation,
                    gated=gated,
                    residual_MN=residual,
                    shape=configuration,
                )
        return out

    def microseconds(self, configuration: Configuration, rounds: int = 6) -> float:
        """Time of one product, the second least of some rounds."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.run(configuration)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(configuration)
        times = []
        for _ in range(rounds):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(1e3 * start.elapsed_time(end) / len(self.weights))
        return sorted(times)[1]


def compile_all(words: list[str], processes: int) -> None:
    """Compile all configurations in processes of their own."""
    command = [sys.executable, __file__, *words, "--compile"]
    running = [subprocess.Popen([*command, f"{i}/{processes}"], env=os.environ.copy()) for i in range(processes)]
    for process in running:
        process.wait()


def measured(
    product: TimedProduct, chosen: Configuration, every: list[Configuration], bandwidth: float
) -> dict[str, Any]:
    N, K = product.size
    timed = sorted(((product.microseconds(each), each) for each in every), key=lambda pair: pair[0])
    return {
        "product": product.name,
        "N": N,
        "K": K,
        "tokens": len(product.x),
        "floor_us": N * K * (BITS / 8 + 2 / GROUP) / bandwidth * 1e6,
        "chosen": stored(product.microseconds(chosen), chosen),
        "best": [stored(us, each) for us, each in timed[:SHOWN]],
    }


def stored(us: float, configuration: Configuration) -> dict[str, Any]:
    return {"us": us, "shape": configuration if isinstance(configuration, int) else asdict(configuration)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--shape", default="llama-3-8b", choices=list(decoder.SHAPES))
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--copies", type=int, default=16)
    parser.add_argument("--bandwidth", type=float, default=3.06e12, help="bytes per second")
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--compile", metavar="I/N", help="only compile this share of the configurations")
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    whole: dict[str, Any] = origin(device) | {"command": command_of(__file__), "shape": asked.shape, "results": []}
    sizes = products(asked.shape)
    if device.type == "cuda":
        workspace.prepare(device)
    if device.type != "cuda":
        for name, size in sizes.items():
            TimedProduct(name, *size, asked.tokens, 1, device).run(ROWS)
        write_json(asked.json, whole)
        return
    processors = device_of(device).processors
    if asked.compile:
        first, step = (int(part) for part in asked.compile.split("/"))
        work = [(name, c) for name, size in sizes.items() for c in configurations(*size, asked.tokens, processors)]
        for name, configuration in work[first::step]:
            TimedProduct(name, *sizes[name], asked.tokens, 1, device).run(configuration)
        return
    began = time.monotonic()
    compile_all(sys.argv[1:], asked.processes)
    print(f"compiled in {time.monotonic() - began:.0f} s", flush=True)
    for name, (N, K) in sizes.items():
        product = TimedProduct(name, N, K, asked.tokens, asked.copies, device)
        every = list(configurations(N, K, asked.tokens, processors))
        chosen = ROWS if asked.tokens == 1 else step_shape(KIND, asked.tokens, N, K, device_of(device))
        found = measured(product, chosen, every, asked.bandwidth)
        whole["results"].append(found)
        write_json(asked.json, whole)
        print(
            f"{name} {N} x {K}: floor {found['floor_us']:.1f} us, chosen {found['chosen']['us']:.1f}, best "
            f"{found['best'][0]['us']:.1f} by {found['best'][0]['shape']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
