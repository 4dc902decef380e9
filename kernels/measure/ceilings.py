"""The limits of a machine, measured in the same run as the figures that are held against them.

    copy, read          bytes per second between memory and the processor, far beyond its caches
    float32 ... int8    operations per second of a square product by the vendor's library; int8 is `torch._int_mm`

Float products are true ones: float32 is not TF32. A product that a device does not have is left out with the reason.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compress.kernels.measure.timing import Call, elapsed_ms, time_cpu, time_gpu

FLOATS = ("float32", "float16", "bfloat16")
COPY_BYTES = {"cuda": 2**30, "cpu": 2**28}
SIDE = {"cuda": 8192, "cpu": 1024}
ROUNDS = 20
# On a CPU that other processes use, a short call needs many tries until one is undisturbed.
CPU_SECONDS, QUICK_SECONDS, MAX_ROUNDS = 2.0, 0.5, 1000


def measure_ceilings(device: torch.device, quick: bool = False) -> dict[str, dict[str, Any]]:
    """name -> {"per_s": ..., "unit": "B/s" or "op/s", its times} or {"skipped": why}."""
    side = SIDE[device.type]
    count = COPY_BYTES[device.type] // 4
    floats: dict[str, Callable[[], Call]] = {name: _float_call(name, side, device) for name in FLOATS}
    # The unsigned form exists on CPUs only, where it is the natural one.
    signs = (torch.int8,) if device.type == "cuda" else (torch.int8, torch.uint8)
    integers = {str(sign).removeprefix("torch."): _int_call(sign, side, device) for sign in signs}
    builders = {"copy": _copy_call(count, device), "read": _read_call(count, device), **floats, **integers}
    amounts = dict.fromkeys((*floats, *integers), 2 * side**3) | {"copy": 2 * 4 * count, "read": 4 * count}
    found: dict[str, dict[str, Any]] = {}
    for name, build in builders.items():
        unit = "B/s" if name in ("copy", "read") else "op/s"
        found[name] = {"unit": unit, "amount": amounts[name]}
        try:
            call = build()
            call()
        except (RuntimeError, TypeError) as reason:
            found[name]["skipped"] = f"{type(reason).__name__}: {reason}".splitlines()[0]
            continue
        calls = {name: [call]}
        times = (time_gpu(calls, ROUNDS) if device.type == "cuda" else time_cpu(calls, _rounds(call, quick)))[name]
        found[name] |= times | {"per_s": amounts[name] / times["time_ms"] * 1e3}
    return found


def _rounds(call: Call, quick: bool) -> int:
    seconds = QUICK_SECONDS if quick else CPU_SECONDS
    return max(ROUNDS, min(MAX_ROUNDS, int(seconds * 1e3 / elapsed_ms(call, torch.device("cpu")))))


def _copy_call(count: int, device: torch.device) -> Callable[[], Call]:
    def build() -> Call:
        source = torch.ones(count, device=device)
        target = torch.zeros_like(source)
        return lambda: target.copy_(source)

    return build


def _read_call(count: int, device: torch.device) -> Callable[[], Call]:
    def build() -> Call:
        source = torch.ones(count, device=device)
        return lambda: source.sum()

    return build


def _float_call(name: str, side: int, device: torch.device) -> Callable[[], Call]:
    def build() -> Call:
        g = torch.Generator(device=device).manual_seed(0)
        x, weight = (torch.randn(side, side, generator=g, device=device).to(getattr(torch, name)) for _ in range(2))
        return lambda: torch.nn.functional.linear(x, weight)

    return build


def _int_call(sign: torch.dtype, side: int, device: torch.device) -> Callable[[], Call]:
    def build() -> Call:
        how: dict[str, Any] = {"device": device, "generator": torch.Generator(device=device).manual_seed(0)}
        x, weight = (torch.randint(-128, 128, (side, side), dtype=torch.int8, **how) for _ in range(2))
        given: Tensor = x.view(sign)
        return lambda: torch.ops.aten._int_mm(given, weight.t())

    return build
