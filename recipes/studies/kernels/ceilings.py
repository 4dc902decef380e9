"""The limits of a machine, measured in the same run as the figures that are held against them.

    copy, read          bytes per second between memory and the processor, far beyond its caches
    float32 ... int8    operations per second of a square product by the vendor's library; int8 is `torch._int_mm`

Float products are true ones: float32 is not TF32. A product that a device does not have is left out with the reason.

    limit = max(bytes moved / bandwidth, operations / peak)        share = limit / time

A share of 1 is work that nothing could beat with this representation of the weights on this machine. It can be above 1
where a ceiling was measured while the machine was busy, or where the weights were still in a cache.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from compress.evaluation.speed.timing import elapsed_ms
from compress.recipes.studies.kernels.timing import Call, time_cpu, time_gpu

INT8 = "int8"
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


@dataclass(frozen=True)
class CallCost:
    """The least work of one call. arithmetic: the name of the ceiling that its operations run under."""

    bytes: int
    operations: int
    arithmetic: str


def bandwidth(ceilings: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Bytes per second: the best that was measured, read or copied."""
    return max(
        (ceilings[name]["per_s"] for name in ("copy", "read") if "per_s" in ceilings.get(name, {})), default=None
    )


def peak(ceilings: Mapping[str, Mapping[str, Any]], arithmetic: str) -> float | None:
    """Operations per second. int8: the better of signed and unsigned."""
    names = (INT8, "uint8") if arithmetic == INT8 else (arithmetic,)
    return max((ceilings[name]["per_s"] for name in names if "per_s" in ceilings.get(name, {})), default=None)


Bound = Literal["memory", "compute"]


def limit(need: CallCost, ceilings: Mapping[str, Mapping[str, Any]]) -> tuple[float, Bound] | None:
    """(least milliseconds, the binding resource); None where a ceiling could not be measured."""
    memory, compute = bandwidth(ceilings), peak(ceilings, need.arithmetic)
    if memory is None or compute is None:
        return None
    moving, computing = need.bytes / memory * 1e3, need.operations / compute * 1e3
    return (moving, "memory") if moving >= computing else (computing, "compute")


def achieved(need: CallCost, time_ms: float, ceilings: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The evaluation of a time: bytes and operations per second, the binding resource and the share of its limit
    reached."""
    found = {
        "bytes": need.bytes,
        "operations": need.operations,
        "bytes_per_s": need.bytes / time_ms * 1e3,
        "operations_per_s": need.operations / time_ms * 1e3,
        "arithmetic": need.arithmetic,
    }
    least = limit(need, ceilings)
    if least is None:
        return found | {"bound": None, "limit_ms": None, "share": None}
    return found | {"bound": least[1], "limit_ms": least[0], "share": least[0] / time_ms}
