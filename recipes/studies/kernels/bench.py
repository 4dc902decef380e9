"""Measures every kernel on this machine: its share of what the machine can do, its ratio to dense products.

    python -m compress.recipes.studies.kernels.bench [--shapes 4096x4096 --tokens 1,64] [--json speed.json]

`products` says how, `plot` makes a page of the file. With --tune, the fastest configurations of the Triton kernels for
these products are first found, and kept in the table of this user.
"""

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

from compress.base.device import find_device
from compress.base.errors import CompressError, InputError
from compress.base.progress import Reporter
from compress.cli.exit_codes import exits_cleanly
from compress.cli.option_groups import answer_options, device_option
from compress.cli.options import begin, write_report
from compress.cli.progress import reporting
from compress.evaluation.report.terminal import show
from compress.evaluation.speed.options import check_rounds, parse_dtype, parse_numbers
from compress.kernels import workspace
from compress.kernels.cpu import dense
from compress.recipes.studies.kernels import products
from compress.recipes.studies.kernels.ceilings import measure_ceilings
from compress.recipes.studies.kernels.tables import KernelReport, tables
from compress.recipes.studies.kernels.tune import TunedProduct, tune

# Outputs x inputs of the linears of Llama-3-8B (qkv, o, gate_up, down) and Llama-3-70B.
GPU_SHAPES: tuple[tuple[int, int], ...] = (
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (10240, 8192),
    (8192, 8192),
    (57344, 8192),
    (8192, 28672),
)
CPU_SHAPES: tuple[tuple[int, int], ...] = ((2048, 2048), (4096, 4096))
GPU_TOKENS: tuple[int, ...] = (1, 8, 16, 64, 256, 2048, 8192)
CPU_TOKENS: tuple[int, ...] = (1, 8, 64, 512)
# (operator, bits, columns per scale; -1: one per output) of our candidates.
TUNED = (("weight_only", 4, products.GROUP), ("weight_only", 8, -1), ("w8a8", 8, -1))


@dataclass(frozen=True, kw_only=True)
class LinearOptions:
    """Products of M tokens with N x K weights."""

    shapes: tuple[tuple[int, int], ...]
    tokens: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    rounds: int
    quick: bool
    tune: bool


def linear_options(
    *,
    shapes: str | None = None,
    tokens: str | None = None,
    dtype: str = "bfloat16",
    device: str | None = None,
    rounds: int | None = None,
    quick: bool = False,
    tune: bool = False,
) -> LinearOptions:
    """Options with defaults for those that are None: Llama's layers on a GPU, square ones on a CPU. Raises
    InputError."""
    sizes = parse_shapes(shapes) if shapes is not None else None
    numbers = parse_numbers("tokens", tokens) if tokens is not None else None
    arithmetic, target = parse_dtype(dtype), find_device(device)
    gpu = target.type == "cuda"
    if tune and not gpu:
        raise InputError(f"--tune measures Triton's kernels on a GPU; the device is {target}")
    if tune and arithmetic == torch.float32:
        raise InputError("--tune with --dtype float32; Triton's kernels take float16 and bfloat16")
    default_shapes, default_tokens = (GPU_SHAPES, GPU_TOKENS) if gpu else (CPU_SHAPES, CPU_TOKENS)
    if quick:
        default_shapes, default_tokens = default_shapes[:1], default_tokens[:4:2]
    return LinearOptions(
        shapes=sizes or default_shapes,
        tokens=numbers or default_tokens,
        dtype=arithmetic,
        device=target,
        rounds=check_rounds(rounds, 10 if quick else 50),
        quick=quick,
        tune=tune,
    )


def parse_shapes(text: str) -> tuple[tuple[int, int], ...]:
    """4096x4096,14336x4096 -> ((4096, 4096), (14336, 4096)): outputs x inputs. Raises InputError."""
    shapes = []
    for word in text.split(","):
        sizes = word.strip().split("x")
        if len(sizes) != 2 or not all(size.isascii() and size.isdigit() and int(size) > 0 for size in sizes):
            raise InputError(f"--shapes {text!r}; give outputs x inputs, like 4096x4096,14336x4096")
        N, K = map(int, sizes)
        if K % products.GROUP:
            raise InputError(f"--shapes {word.strip()!r}: {K} inputs; a multiple of {products.GROUP} is needed")
        shapes.append((N, K))
    return tuple(dict.fromkeys(shapes))


def bench_linears(options: LinearOptions, report: KernelReport, reporter: Reporter) -> None:
    """Fill a report, saving it after every shape and number of tokens."""
    steps = 1 + options.tune + len(options.shapes) * len(options.tokens)
    if options.device.type == "cuda":
        torch.cuda.set_device(options.device)
        workspace.prepare(options.device)
    report.ceilings |= measure_ceilings(options.device, options.quick)
    report.keep()
    done = 1
    reporter.step(done, steps, "ceilings")
    if options.tune:
        report.tuned += tune_products(options, reporter.note)
        report.keep()
        done += 1
        reporter.step(done, steps, "")  # tuning takes longer than measuring
        reporter.step(done, steps, "tuned")
    for N, K in options.shapes:
        measured = products.measure(
            N, K, options.tokens, options.dtype, options.device, options.rounds, report.ceilings
        )
        for M, entries in zip(options.tokens, measured, strict=True):
            report.results += entries
            report.failures += [
                f"{e['candidate']} {N}x{K} M={M}: {e['skipped']}, {e['error_over_tolerance']:.3g} times what is allowed"
                for e in entries
                if e["ours"] and e.get("skipped") == products.WRONG
            ]
            report.keep()
            done += 1
            reporter.step(done, steps, f"{N}x{K} M={M}")
    if options.device.type == "cpu":
        report.notes += dense.told()
        report.keep()


def tune_products(options: LinearOptions, say: Callable[[str], object]) -> list[dict[str, Any]]:
    """Measure configurations of the Triton kernels for these products and add the best to the table of this user."""
    problems = [
        TunedProduct(op, M, N, K, bits, group, dtype=options.dtype)
        for N, K in options.shapes
        for M in options.tokens
        for op, bits, group in TUNED
    ]
    return [entry.stored() for entry in tune(problems, options.device, say=say)]


@click.command()
@click.option(
    "--shapes", metavar="NxK,...", help="Outputs x inputs of the linear layers.  [default: Llama's; CPU: square ones]"
)
@click.option("--tokens", metavar="M,...", help="Numbers of tokens that a product is timed for.")
@click.option("--dtype", default="bfloat16", show_default=True, help="bfloat16, float16 or float32.")
@click.option("--rounds", type=int, help="Number of timings of each product.  [default: 50]")
@click.option("--quick", is_flag=True, help="Fewer shapes, tokens and rounds.")
@click.option("--tune", is_flag=True, help="First find the fastest kernel configurations for these products (GPU).")
@device_option
@answer_options
@exits_cleanly
def bench(json_file: str | None, quiet: bool, **options: Any) -> None:
    """Time every kernel against dense products and other libraries.

    What a kernel computes is checked before it is timed. Each time is compared with the best bandwidth and arithmetic
    rate of this machine, measured in the same run.
    """
    begin()
    asked = linear_options(**options)
    settings = {"shapes": [list(shape) for shape in asked.shapes], "tokens": list(asked.tokens)}
    settings |= {"dtype": str(asked.dtype).removeprefix("torch."), "rounds": asked.rounds, "quick": asked.quick}
    target = None if json_file in (None, "-") else Path(str(json_file))
    report = KernelReport("linears", asked.device, settings | {"tune": asked.tune}, target)
    report.facts["command"] = shlex.join(["python", "-m", "compress.recipes.studies.kernels.bench", *sys.argv[1:]])
    with reporting("bench", quiet) as reporter:
        bench_linears(asked, report, reporter)
        report.finish()
    if json_file == "-":
        write_report("-", report.content())
    elif not quiet:
        show(*tables(report))
    if report.failures:
        raise CompressError(report.complaint())


if __name__ == "__main__":
    bench()
