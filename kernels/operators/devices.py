"""The devices that kernels run on: Triton's, or a CPU, whose products are those of compiled loops or of torch."""

from functools import cache
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

Path = Literal["triton", "dequantize", "cpu", "reference"]

OLDEST_CAPABILITY = (8, 0)
HALF = (torch.float16, torch.bfloat16)
FLOATS = (*HALF, torch.float32)
# 255 * 128 * K, the largest sum with an asymmetric activation, must stay within int32.
MAX_INT8_COLUMNS = 2**16


@cache
def why_not_triton(device: torch.device) -> tuple[str, ...]:
    if find_spec("triton") is None:
        return ("triton is not installed",)
    from triton import knobs

    if knobs.runtime.interpret:
        return ()
    if device.type != "cuda":
        return (f"the device is {device.type}, not cuda",)
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        return (f"compute capability {capability[0]}.{capability[1]}; at least 8.0 is needed",)
    return ()


def why_not_floats(device: torch.device, **dtypes: torch.dtype) -> list[str]:
    """Reasons why Triton does not run on a device, on tensors of these dtypes by what they are; empty when it does."""
    reasons = [*why_not_triton(device)]
    for name, dtype in dtypes.items():
        if dtype not in FLOATS:
            verb = "is" if name == "x" else "are"
            reasons.append(f"{name} {verb} {dtype}; allowed: float16, bfloat16, float32")
    return reasons


def runs_on_cpu(device: torch.device) -> bool:
    """True for a device whose products are those of compiled loops, or of torch."""
    return path_of(device, [*why_not_triton(device)]) == "cpu"


def path_of(device: torch.device, reasons: list[str]) -> Path:
    """The path that runs on a device given the reasons against Triton."""
    if not reasons:
        return "triton"
    return "cpu" if device.type == "cpu" else "reference"


def as_rows(x: Tensor) -> Tensor:
    """x as [M, K], contiguous along K."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def shaped(out_MN: Tensor, x: Tensor) -> Tensor:
    """[M, N] in the leading shape of x."""
    return out_MN if x.dim() == 2 else out_MN.view(*x.shape[:-1], out_MN.shape[1])
