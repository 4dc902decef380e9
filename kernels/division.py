"""Division by a number with the same result on every device."""

import torch
from torch import Tensor


def divide(x: Tensor, number: float) -> Tensor:
    """x / number, correctly rounded in the dtype of x.

    torch multiplies by 1 / number on a GPU where the divisor is a Python number, which is off by one unit in the last
    place for some x. A scale that differs by so little rounds a value on the border between two codes to the other one.
    """
    if x.device.type == "cpu":
        return x / number
    return x / torch.full((), number, dtype=x.dtype, device=x.device)
