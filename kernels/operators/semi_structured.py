"""16-bit weights that are 2:4: torch's semi-structured layout where the GPU multiplies it, the dense weight elsewhere.

The sparse matrix instructions of compute capability 8.0 and later read two of every four weights and do half of the
multiplications. torch reaches them through cuSPARSELt, or through CUTLASS before Hopper. The converted weight is a
tensor subclass: `torch.nn.functional.linear` takes it in place of the dense weight. Whether it is faster depends on
sizes and library versions, so measure before using it; nothing here was measured on a GPU.
"""

import torch
from torch import Tensor

from compress.errors import InputError
from compress.kernels.layouts.words24 import check_kept
from compress.kernels.operators.words import HALF, OLDEST_CAPABILITY

# Multiples that both libraries take.
ROWS, COLUMNS = 32, 64
HOPPER = 9


def why_not_semi_structured(weight_NK: Tensor) -> list[str]:
    """Reasons why a 2:4 weight stays dense; empty when torch can multiply it in its semi-structured layout."""
    reasons = []
    rows, columns = weight_NK.shape
    if weight_NK.dtype not in HALF:
        reasons.append(f"the weight is {weight_NK.dtype}; allowed: float16, bfloat16")
    if rows % ROWS or columns % COLUMNS:
        reasons.append(f"{rows}x{columns}; multiples of {ROWS}x{COLUMNS} are needed")
    try:
        check_kept(weight_NK != 0)
    except InputError as reason:
        reasons.append(str(reason))
    if weight_NK.device.type != "cuda":
        return [*reasons, f"the device is {weight_NK.device.type}, not cuda"]
    capability = torch.cuda.get_device_capability(weight_NK.device)
    if capability < OLDEST_CAPABILITY:
        reasons.append(f"compute capability {capability[0]}.{capability[1]}; at least 8.0 is needed")
    if capability[0] >= HOPPER and not torch.backends.cusparselt.is_available():
        reasons.append("cuSPARSELt is not available, and CUTLASS' sparse product ends before Hopper")
    return reasons


def semi_structured(weight_NK: Tensor) -> tuple[Tensor, list[str]]:
    """The weight in torch's layout and no reasons, or the weight itself and the reasons why."""
    reasons = why_not_semi_structured(weight_NK)
    if reasons:
        return weight_NK, reasons
    return torch.sparse.to_sparse_semi_structured(weight_NK.contiguous()), []
