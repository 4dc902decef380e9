"""What a weight is worth: its size, and its size times what it multiplies (Wanda, arXiv 2306.11695).

Shapes: N outputs, K inputs.
"""

import torch
from torch import Tensor

from compress.weights.grid import working_dtype

# Of the largest norm: as good as never active, and above zero.
LEAST_NORM = 1e-12


def size_of(weight_NK: Tensor) -> Tensor:
    """|w|, in a dtype whose products do not overflow."""
    return weight_NK.to(working_dtype(weight_NK)).abs()


def relative_products(weight_NK: Tensor, norm_K: Tensor) -> Tensor:
    """[N, K] |W_ij| |X_j|, but for the scale of X, which decides nothing inside a layer; by size alone where no input
    is active."""
    most = norm_K.max()
    relative = (norm_K / most).clamp(min=LEAST_NORM) if most > 0 else norm_K.new_ones(norm_K.shape)
    size = size_of(weight_NK)
    return size * relative.to(size.dtype)


def products(weight_NK: Tensor, norm_K: Tensor) -> Tensor:
    """[N, K] |W_ij| |X_j| in float64, which layers can be compared by."""
    return relative_products(weight_NK, norm_K).double() * norm_K.max().to(torch.float64)
