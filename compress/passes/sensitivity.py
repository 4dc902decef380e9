"""Which weights of a layer are worth a value of their own: those whose errors cost most.

Shapes: N outputs, K inputs. An error e of one weight, all others right, costs e^2 H_jj.
"""

import torch
from torch import Tensor

from compress.errors import InputError

# 32 bits each: with more than a quarter exact, 8 more bits for every weight cost as much.
MOST = 0.25


def check_outliers(outliers: float) -> None:
    """Refuse a share of exact weights that cannot be. Raises InputError."""
    if not 0 <= outliers <= MOST:
        raise InputError(f"outliers {outliers}; allowed: 0 (none) to {MOST}, the share of weights that stay exact")


def dearest(error_NK: Tensor, diagonal_K: Tensor, share: float) -> Tensor:
    """Bool [N, K]: so large a share of all weights, those whose errors cost most; of equals the first."""
    cost = (error_NK.square() * diagonal_K).flatten()
    chosen = torch.zeros_like(cost, dtype=torch.bool)
    chosen[cost.argsort(descending=True, stable=True)[: int(share * len(cost))]] = True
    return chosen.view_as(error_NK)
