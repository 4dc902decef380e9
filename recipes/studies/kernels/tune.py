"""Find the fastest configuration of products on the GPU at hand, and remember it in the user's table (`table`).

    python -m compress.recipes.studies.kernels.tune --shapes 4096x4096 28672x4096 --tokens 1 16 64 256 2048 --group 128

Two rounds per product: tiles, warps and splits at the depth of pipeline that `choose` derives, then depths for the best
of them. Configurations that cannot run are left out before they are compiled (`candidates`); those that do not compile
or do not fit are left out with the reason; wrong ones are never timed. All of a round are timed in turns, and the
configuration that `choose` derives is among those of both: it stays unless another is faster by more than the timer's
noise.

Timing is a function that is handed in, so that everything else can be shown without a GPU.
"""

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.evaluation.provenance import timing_origin
from compress.kernels import reference, workspace
from compress.kernels.errors import CompressError
from compress.kernels.layouts import words as pack
from compress.kernels.tuning import table
from compress.kernels.tuning.choose import W8A8_BLOCK_K, Device, derived, device_of, kind_of
from compress.kernels.tuning.table import DEQUANTIZE, Choice, ProductKind, Shape, TunedEntry
from compress.recipes.studies.kernels import products
from compress.recipes.studies.kernels.timing import time_gpu

Call = Callable[[], Tensor]
Calls = dict[Choice, list[Call]]
# Milliseconds of one call of each configuration, given the same call on several copies of its weight.
Timer = Callable[[Calls], dict[Choice, float]]

TILES = ((64, 4), (128, 4), (128, 8), (256, 8))  # rows, warps
DEPTHS = (2, 3, 4, 5)
SPLITS = (1, 2, 4, 8, 16)
# Programs beyond this many per processor only add partial sums.
WAVES = 4
# fp32 sums that a thread can hold beside everything else without spilling.
SUMS_PER_THREAD = 128
HOPPER_SHARED = 227 * 1024
# A new configuration has to be this much faster than the derived one.
GAIN = 0.98
DEQUANTIZE_FROM = 64
ROUNDS = 30
# Products of each configuration that are held against the true one: a race shows in some of them only.
CHECKS = 8


@dataclass(frozen=True)
class TunedProduct:
    """A product whose configuration is wanted. M stands for its whole bucket."""

    op: str
    M: int
    N: int
    K: int
    bits: int = 4
    group_size: int = 128
    zero: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def kind(self) -> ProductKind:
        return kind_of(self.op, self.bits, self.group_size, self.zero, self.dtype)

    def derived(self, device: Device) -> Shape:
        return derived(self.kind, self.M, self.N, self.K, device)

    @property
    def steps(self) -> int:
        """Steps of the loop over K, which a split divides."""
        return -(-self.K // (W8A8_BLOCK_K if self.op == "w8a8" else pack.planar_block(self.bits)))

    def shared(self, shape: Shape) -> int:
        """Bytes of shared memory that the pipeline of a configuration takes at least."""
        if self.op == "w8a8":
            step = (shape.block_m + shape.block_n) * W8A8_BLOCK_K
        else:
            columns, width = pack.planar_block(self.bits), 1 if self.op == "int8_activation" else self.dtype.itemsize
            step = shape.block_n * pack.PLANE * 2 + shape.block_m * columns * width
        return step * (shape.num_stages - 1)


def candidates(problem: TunedProduct, device: Device, shared: int) -> list[Choice]:
    """The configurations worth compiling: the derived one first, then every tile and split that fits."""
    derived = problem.derived(device)
    found: list[Choice] = [derived]
    tokens = [max(16, table.bucket(problem.M))] if problem.M <= 64 else [64, 128, 256]
    for block_m in tokens:
        for block_n, warps in TILES:
            for split in SPLITS:
                shape = Shape(block_m, block_n, split, warps, derived.num_stages)
                if not why_not(problem, shape, device, shared):
                    found.append(shape)
    if problem.op == "weight_only" and problem.M >= DEQUANTIZE_FROM:
        found.append(DEQUANTIZE)
    return list(dict.fromkeys(found))


def why_not(problem: TunedProduct, shape: Shape, device: Device, shared: int) -> list[str]:
    """Reasons not to compile a configuration for a problem."""
    reasons = []
    if shape.block_n > max(64, table.bucket(problem.N)):
        reasons.append(f"{shape.block_n} rows per tile for {problem.N} outputs")
    if problem.shared(shape) > shared:
        reasons.append(f"{problem.shared(shape)} bytes of shared memory; {shared} are there")
    # int32 sums of a group beside the fp32 sums of all.
    most = SUMS_PER_THREAD // (2 if problem.op == "int8_activation" else 1)
    if shape.block_m * shape.block_n > most * 32 * shape.num_warps:
        reasons.append(f"a tile of {shape.block_m}x{shape.block_n} spills with {shape.num_warps} warps")
    if shape.split_k > 1:
        tiles = -(-problem.M // shape.block_m) * -(-problem.N // shape.block_n)
        if tiles > workspace.SLICE or tiles * shape.split_k > WAVES * device.processors:
            reasons.append(f"{tiles} tiles need no split by {shape.split_k}")
        if 2 * shape.split_k > problem.steps:
            reasons.append(f"{problem.steps} steps are too few to split by {shape.split_k}")
    return reasons


class TuningOperands:
    """Copies of one quantized weight, enough to be out of the cache when their turn comes, and the true product."""

    def __init__(self, problem: TunedProduct, device: torch.device) -> None:
        g = torch.Generator(device=device).manual_seed(problem.M + problem.N + problem.K)
        self.problem = problem
        N, K, half = problem.N, problem.K, 2 ** (problem.bits - 1)
        size = N * K * problem.bits // 8
        self.copies = min(products.MAX_COPIES, max(2, -(-products.CACHE_BYTES // size)))
        codes = torch.randint(-half, half, (N, K), generator=g, device=device, dtype=torch.int8)
        x = torch.randn(problem.M, K, generator=g, device=device)
        if problem.op == "w8a8":
            self.x, self.x_scale, self.x_zero = reference.quantize_tokens(x, not problem.zero)
            self.scale = torch.rand(N, generator=g, device=device) * 1e-3 + 1e-3
            self.codes = [codes.clone() for _ in range(self.copies)]
            self.row_sum = reference.row_sums(codes)
            x_true, values = self.x.double(), codes.double() * self.scale[:, None]
            x_true = (x_true if self.x_zero is None else x_true - self.x_zero[:, None]) * self.x_scale.double()[:, None]
        else:
            self.x = x.to(problem.dtype)
            groups = 1 if problem.group_size == -1 else K // problem.group_size
            scale = torch.rand(N, groups, generator=g, device=device) * 0.01 + 0.005
            zero = torch.randint(-half, half, scale.shape, generator=g, device=device, dtype=torch.int8)
            planar = pack.to_planar(codes, scale, zero if problem.zero else None, problem.bits, problem.dtype)
            self.planar = [planar._replace(words=planar.words.clone()) for _ in range(self.copies)]
            x_true, values = self.x.double(), pack.planar_weight(planar, K).double()
            if problem.op == "int8_activation":
                rounded, step, _ = reference.quantize_tokens(self.x)
                x_true = rounded.double() * step.double()[:, None]
        self.truth = x_true @ values.t()
        self.allowed = reference.tolerance(x_true, values, self.truth, problem.dtype)
        # Weights may be rounded to the dtype of x, or not: half a unit in the last place.
        self.allowed += torch.finfo(problem.dtype).eps / 2 * (x_true.abs() @ values.abs().t())

    def error(self, out: Tensor) -> float:
        """Largest distance from the true product over the tolerance; NaN and above 1: wrong."""
        return ((out.double() - self.truth).abs() / self.allowed).max().item()

    def calls(self, choice: Choice) -> list[Call]:
        """The product by one configuration, once per copy."""
        from compress.kernels.triton.dequantize_gemm import dequantize_gemm
        from compress.kernels.triton.int8_gemm import w8a8_gemm
        from compress.kernels.triton.int8_planar_gemm import int8_planar_gemm
        from compress.kernels.triton.planar_gemm import planar_gemm

        if choice == DEQUANTIZE:
            return [partial(dequantize_gemm, self.x, w) for w in self.planar]
        if self.problem.op == "weight_only":
            return [partial(planar_gemm, self.x, w, None, choice) for w in self.planar]
        if self.problem.op == "int8_activation":
            assert isinstance(choice, Shape)
            return [partial(int8_planar_gemm, self.x, w, None, -1, choice) for w in self.planar]
        x, scales, dtype = (self.x, self.x_scale, self.x_zero), (self.scale, self.row_sum), self.problem.dtype
        return [partial(w8a8_gemm, *x, w, *scales, None, dtype, choice) for w in self.codes]


def time_graphs(calls: Calls) -> dict[Choice, float]:
    """Median of one call of each on a GPU, in captured graphs that take turns."""
    names = {str(choice): choice for choice in calls}
    timed = time_gpu({name: calls[choice] for name, choice in names.items()}, ROUNDS)
    return {choice: float(timed[name]["median_ms"]) for name, choice in names.items()}


def checked(operands: TuningOperands, choice: Choice) -> tuple[list[Call], str]:
    """(the calls of a configuration, "") where its product is right, or (none, the reason why it is left out)."""
    try:
        calls = operands.calls(choice)
        errors = [operands.error(calls[turn % len(calls)]()) for turn in range(CHECKS)]
        worst = max(errors, key=lambda error: math.inf if math.isnan(error) else error)
    except Exception as reason:  # noqa: BLE001  compilers and drivers raise what they like
        return [], f"{type(reason).__name__}: {reason}".splitlines()[0]
    return (calls, "") if worst <= 1 else ([], f"wrong result: {worst:.3g} of the tolerance")


def tune_one(problem: TunedProduct, operands: TuningOperands, device: Device, shared: int, timer: Timer) -> TunedEntry:
    """The entry of one problem. Raises CompressError where not even the derived configuration runs."""
    tried: dict[Choice, tuple[list[Call], str]] = {}

    def runnable(choices: Iterable[Choice]) -> Calls:
        for choice in choices:
            if choice not in tried:
                tried[choice] = checked(operands, choice)
        return {choice: calls for choice in choices if (calls := tried[choice][0])}

    found = candidates(problem, device, shared)
    if not runnable(found[:1]):
        raise CompressError(f"{problem}: the derived configuration {found[0]} does not run: {tried[found[0]][1]}")
    times = timer(runnable(found))
    best = min(times, key=times.__getitem__)
    if isinstance(best, Shape):
        depths = [replace(best, num_stages=depth) for depth in DEPTHS]
        deeper = [shape for shape in depths if not why_not(problem, shape, device, shared)]
        times = timer(runnable(list(dict.fromkeys([found[0], best, *deeper]))))
        best = min(times, key=times.__getitem__)
    if times[best] > GAIN * times[found[0]]:
        best = found[0]
    measured: dict[str, Any] = {"median_ms": times[best], "derived_ms": times[found[0]], "tried": len(tried)}
    measured["left_out"] = sorted({reason for _, reason in tried.values() if reason})
    name = device.names[0] if device.names else "none"
    sizes = (table.bucket(problem.M), problem.N, problem.K)
    return TunedEntry(problem.kind, name, *sizes, run=best, measured=measured)


def tune(
    problems: Sequence[TunedProduct],
    device: torch.device,
    timer: Timer = time_graphs,
    path: Path | None = None,
    say: Callable[[str], object] = print,
) -> list[TunedEntry]:
    """Measure every problem; after each, add its entry to a table, the user's by default."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    shared = int(getattr(properties, "shared_memory_per_block_optin", HOPPER_SHARED))
    origin = source(device)
    found = []
    for problem in problems:
        entry = tune_one(problem, TuningOperands(problem, device), device_of(device), shared, timer)
        entry = replace(entry, measured=entry.measured | origin)
        table.write(path or table.user_table(), [entry], "Measured by compress.recipes.studies.kernels.tune.")
        found.append(entry)
        gain = entry.measured["derived_ms"] / entry.measured["median_ms"]
        say(
            f"{problem.op} w{problem.bits} group {problem.group_size} M={problem.M} {problem.N}x{problem.K}: "
            f"{entry.run} {entry.measured['median_ms']:.4f} ms, {gain:.2f}x of derived, "
            f"{len(entry.measured['left_out'])} reasons to leave others out"
        )
    return found


def source(device: torch.device) -> dict[str, Any]:
    """The origin of a figure: device, versions, commit."""
    whole = timing_origin(device)
    return {name: whole[name] for name in ("commit", "modified", "device", "versions", "cuda")}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Find the fastest configuration of products on this GPU.")
    parser.add_argument("--shapes", nargs="+", required=True, help="outputs x inputs, such as 4096x4096")
    parser.add_argument("--tokens", nargs="+", type=int, required=True)
    parser.add_argument("--op", choices=table.OPS, default="weight_only")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    parser.add_argument("--group", type=int, default=128, help="-1: one scale per output channel")
    parser.add_argument("--zero", action="store_true", help="with zero points (w8a8: of the activations)")
    parser.add_argument("--out", type=Path, help="the table to add to; the user's by default")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("tuning needs a CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    workspace.prepare(device)
    bits, group = (8, -1) if options.op == "w8a8" else (options.bits, options.group)
    sizes = [(int(n), int(k)) for n, k in (shape.split("x") for shape in options.shapes)]
    problems = [TunedProduct(options.op, M, N, K, bits, group, options.zero) for N, K in sizes for M in options.tokens]
    tune(problems, device, path=options.out)


if __name__ == "__main__":
    main()
