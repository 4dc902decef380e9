"""How fast the low-bit linears are, against what one would use without them.

    python -m compress.kernels.benchmark --out speed.json                 this machine's GPU, or its CPU
    python -m compress.kernels.benchmark --tokens 1 16 --shapes 4096x4096 --device cpu --out speed.json

Every candidate is first held to the product of its dequantized weights; one that is wrong is not timed. Weights are
rotated over enough copies that none is still in the cache when its turn comes. On a GPU a round is one CUDA graph with
one call per copy, timed by events, so that the launch from Python is not what is measured (a candidate that cannot be
captured is launched eagerly, and says so). On a CPU the candidates take turns round by round, because another process
on the machine would otherwise be charged to whichever candidate was running.

The JSON holds everything needed to quote a figure: command, commit, versions, device, and for every time the median,
the minimum and the number of rounds.
"""

import argparse
import itertools
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.kernels import cpu, ops, pack, reference

Call = Callable[[], Tensor]

# Outputs x inputs of the linears of Llama-3-8B (qkv, o, gate_up, down) and Llama-3-70B.
GPU_SHAPES = (
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (10240, 8192),
    (8192, 8192),
    (57344, 8192),
    (8192, 28672),
)
CPU_SHAPES = ((2048, 2048), (4096, 4096))
GPU_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
CPU_TOKENS = (1, 8, 64, 512)
GROUP = 128
# More than the last-level cache of the machines this runs on: 50 MiB of L2 on Hopper, 32 MiB of L3 per CPU complex.
CACHE_BYTES = 128 * 2**20
MAX_COPIES = 64
SETTLE_SECONDS = 4e-3


class Operands:
    """One quantized weight in the layouts of every candidate, and the values it stands for."""

    def __init__(self, N: int, K: int, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        g = torch.Generator(device=device).manual_seed(seed)
        self.codes = torch.randint(-8, 8, (N, K), generator=g, device=device, dtype=torch.int8)
        self.scale = (torch.rand(N, K // GROUP, generator=g, device=device) * 0.01 + 0.005).to(dtype)
        self.int4 = pack.to_planar(self.codes, self.scale, None, 4, dtype)
        self.codes8 = torch.randint(-128, 128, (N, K), generator=g, device=device, dtype=torch.int8)
        self.scale8 = torch.rand(N, 1, generator=g, device=device) * 1e-3 + 1e-3
        self.int8 = pack.to_planar(self.codes8, self.scale8.to(dtype), None, 8, dtype)
        self.row_sum = reference.row_sums(self.codes8)
        self.dense = reference.dequantize(self.codes, self.scale)


def int4pack(weight: Operands, x: Tensor) -> Call:
    """torch's own 4-bit product: value = (code - 8) scale + zero, here with zero 0."""
    unsigned = (weight.codes + 8).to(torch.int32)
    scales = torch.stack([weight.scale.t(), torch.zeros_like(weight.scale.t())], -1).contiguous()
    if x.is_cuda:
        inner = 8
        packed = torch.ops.aten._convert_weight_to_int4pack(
            (unsigned[:, ::2] << 4 | unsigned[:, 1::2]).to(torch.uint8), inner
        )
        return lambda: torch.ops.aten._weight_int4pack_mm(x, packed, GROUP, scales)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(unsigned, 2)
    return lambda: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, GROUP, scales)


def dense_fp32(weight: Operands, x: Tensor) -> Call:
    """What a model in fp32 runs: twice the memory of half precision, and no instructions for it."""
    given, dense = x.float(), weight.dense.float()
    return lambda: torch.nn.functional.linear(given, dense)


def gemlite(weight: Operands, x: Tensor) -> Call:
    """GemLite's Triton product, where the package is installed."""
    core = import_module("gemlite.core")
    dtype = {torch.float16: core.DType.FP16, torch.bfloat16: core.DType.BF16}[x.dtype]
    N, K = weight.codes.shape
    layer = core.GemLiteLinear(
        4, group_size=GROUP, in_features=K, out_features=N, input_dtype=dtype, output_dtype=dtype
    )
    layer.pack((weight.codes + 8).to(torch.uint8), weight.scale.view(-1, 1), torch.full_like(weight.scale, 8), None)
    return lambda: layer(x)


def candidates(x: Tensor) -> dict[str, tuple[Callable[[Operands], Call], str]]:
    """name -> (builder of a call on one weight, which product it computes: w4, w8, w4a8, w8a8 or int32)."""
    codes, _, _ = reference.quantize_tokens(x)
    return {
        "dense": (lambda w: lambda: torch.nn.functional.linear(x, w.dense), "w4"),
        **({} if x.is_cuda or x.dtype == torch.float32 else {"dense fp32": (lambda w: dense_fp32(w, x), "w4")}),
        "w4a16": (lambda w: lambda: ops.weight_only_linear(x, *w.int4[:3], None, 4, w.int4.group_size), "w4"),
        "w8a16": (lambda w: lambda: ops.weight_only_linear(x, *w.int8[:3], None, 8, w.int8.group_size), "w8"),
        "w4a8": (
            lambda w: lambda: ops.int8_activation_linear(x, *w.int4[:3], None, 4, w.int4.group_size, -1),
            "w4a8",
        ),
        "w8a8": (
            lambda w: lambda: ops.w8a8_linear(x, w.codes8, w.scale8[:, 0], None, None, None, None, True),
            "w8a8",
        ),
        "torch._weight_int4pack_mm": (lambda w: int4pack(w, x), "w4"),
        "torch._int_mm": (lambda w: lambda: torch.ops.aten._int_mm(codes, w.codes8.t()), "int32"),
        "gemlite w4a16": (lambda w: gemlite(w, x), "w4"),
    }


def error_of(out: Tensor, x: Tensor, weight: Operands, kind: str) -> float:
    """Largest distance from the true product over what is tolerated: above 1 is a wrong kernel."""
    rows = slice(0, min(len(x), 64))
    values = weight.dense if kind == "w4" else weight.codes8.double() * weight.scale8
    if kind == "w8":
        values = weight.codes8.double() * weight.scale8.to(x.dtype).double()
    given = x[rows].double()
    if kind == "w4a8":
        values = weight.codes * weight.scale.double().repeat_interleave(GROUP, 1)
    if kind in ("w4a8", "w8a8", "int32"):
        codes, scale, _ = reference.quantize_tokens(x[rows])
        given = codes.double() * scale.double()[:, None]
        if kind == "int32":
            given, values = codes.double(), weight.codes8.double()
    truth = given @ values.double().t()
    allowed = reference.tolerance(given, values.double(), truth, x.dtype)
    if kind in ("w4", "w8"):
        # Weights may be rounded to the dtype of x, or not: half a unit in the last place each.
        allowed += torch.finfo(x.dtype).eps * (given.abs() @ values.double().abs().t())
    return ((out[rows].double() - truth).abs() / allowed).max().item()


def capture(calls: list[Call]) -> tuple[Callable[[], object], str]:
    """One round of all calls, as a CUDA graph where they can be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except RuntimeError:
        torch.cuda.synchronize()
        return (lambda: [call() for call in calls]), "eager"
    return graph.replay, "graph"


def time_gpu(calls: list[Call], rounds: int) -> dict[str, Any]:
    run, launch = capture(calls)
    run()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(calls))
    return summary(times) | {"launch": launch}


def time_cpu(calls: dict[str, list[Call]], rounds: int) -> dict[str, dict[str, Any]]:
    """Candidates take turns. In its turn a candidate runs untimed until the threads of the one before have stopped
    spinning (torch has more than one pool) and its own are awake; every call takes the next copy, the one not used
    for longest.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    turns = {name: itertools.cycle(copies) for name, copies in calls.items()}
    for _ in range(rounds):
        for name, turn in turns.items():
            settled = time.perf_counter() + SETTLE_SECONDS
            while time.perf_counter() < settled:
                next(turn)()
            call = next(turn)
            start = time.perf_counter()
            call()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: summary(values) for name, values in times.items()}


def summary(times_ms: list[float]) -> dict[str, Any]:
    return {"median_ms": statistics.median(times_ms), "min_ms": min(times_ms), "rounds": len(times_ms)}


def measure(N: int, K: int, M: int, dtype: torch.dtype, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """One entry per candidate: its times and their ratio to the dense product, or the reason why there is none."""
    count = min(MAX_COPIES, max(2, -(-CACHE_BYTES // (N * K // 2))))
    weights = [Operands(N, K, dtype, device, seed) for seed in range(count)]
    x = torch.randn(M, K, generator=torch.Generator(device=device).manual_seed(M), device=device).to(dtype)
    calls: dict[str, list[Call]] = {}
    entries = {}
    for name, (build, kind) in candidates(x).items():
        entries[name] = {"candidate": name, "N": N, "K": K, "M": M}
        try:
            built = [build(weight) for weight in weights]
            worst = error_of(built[0](), x, weights[0], kind)
        except (RuntimeError, ImportError, NotImplementedError, TypeError, AttributeError, KeyError) as reason:
            entries[name]["skipped"] = f"{type(reason).__name__}: {reason}".splitlines()[0]
            continue
        entries[name]["error_over_tolerance"] = worst
        if not worst <= 1:
            entries[name]["skipped"] = "wrong result"
            continue
        calls[name] = built
    if device.type == "cuda":
        timed = {name: time_gpu(copies, rounds) for name, copies in calls.items()}
    else:
        timed = time_cpu(calls, rounds)
    statistic = "median_ms" if device.type == "cuda" else "min_ms"
    for name, times in timed.items():
        entries[name] |= times | {"speedup_over_dense": timed["dense"][statistic] / times[statistic]}
    return list(entries.values())


def provenance(device: torch.device) -> dict[str, Any]:
    """What a figure needs beside it. `commit` is None outside of a checkout."""

    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    def git(*arguments: str) -> str | None:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).resolve().parent), *arguments], capture_output=True, text=True
        )
        return done.stdout.strip() if done.returncode == 0 else None

    return {
        "command": shlex.join(["python", "-m", "compress.kernels.benchmark", *sys.argv[1:]]),
        "commit": git("rev-parse", "HEAD"),
        "modified": bool(git("status", "--porcelain", "--untracked-files=no")),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "threads": torch.get_num_threads(),
        "cpu_kernels": list(cpu.why_not()) or cpu.library().instructions().decode(),
        "versions": {name: installed(name) for name in ("torch", "triton", "gemlite", "numpy")},
        "cuda": torch.version.cuda,
    }


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "cpu")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time the low-bit linears against dense and other kernels.")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", nargs="*", help="outputs x inputs, such as 4096x4096")
    parser.add_argument("--tokens", nargs="*", type=int)
    parser.add_argument("--dtype", choices=["float16", "bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    options = parser.parse_args(arguments)
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    gpu = device.type == "cuda"
    shapes = [tuple(map(int, s.split("x"))) for s in options.shapes or []] or (GPU_SHAPES if gpu else CPU_SHAPES)
    if gpu:
        from compress.kernels import workspace

        workspace.prepare(device)
    results = []
    for N, K in shapes:
        for M in options.tokens or (GPU_TOKENS if gpu else CPU_TOKENS):
            results += measure(N, K, M, getattr(torch, options.dtype), device, options.rounds)
            options.out.write_text(json.dumps(provenance(device) | {"results": results}, indent=1))
            print(
                f"{N}x{K} M={M}",
                *(brief(entry) for entry in results if (entry["N"], entry["K"], entry["M"]) == (N, K, M)),
            )


def brief(entry: dict[str, Any]) -> str:
    if "skipped" in entry:
        return f"| {entry['candidate']}: {entry['skipped'][:40]}"
    return f"| {entry['candidate']}: {entry['min_ms']:.3f} ms, {entry['speedup_over_dense']:.2f}x"


if __name__ == "__main__":
    main()
