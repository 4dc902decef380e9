"""Hadamard matrices without random signs, which a model multiplies by as it runs: a size says all about one.

Shapes: K channels in blocks of D.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from compress.kernels.operators import states
from compress.weights.rotations.orthogonal import base_matrix, base_order, kronecker_product, sylvester_factors


def has_hadamard(size: int) -> bool:
    """True where a Hadamard matrix of this order, 2 or more, can be made (`weights.rotations.orthogonal`)."""
    return size > 1 and base_order(size) is not None


def hadamard_sizes(width: int) -> list[int]:
    """The sizes of blocks of Hadamard matrices that divide a width, rising."""
    return [size for size in range(2, width + 1) if width % size == 0 and has_hadamard(size)]


@cache
def plain_hadamard(size: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Factors of a Hadamard matrix, orthogonal, of Kronecker's product: Paley's first, then Sylvester's."""
    base = base_order(size)
    assert base is not None, f"there is no Hadamard matrix of order {size}"
    first = [] if base == 1 else [base_matrix(base)]
    with torch.inference_mode(False), torch.no_grad():
        return tuple(each.to(device, dtype) for each in [*first, *sylvester_factors(size // base)] if each is not None)


def rotated(x: Tensor, size: int, back: bool = False) -> Tensor:
    """x [..., K] times a Hadamard matrix [D, D] block by block, computed in float32 or better, in the dtype of x.
    back: times its inverse."""
    working = torch.promote_types(x.dtype, torch.float32)
    factors: Sequence[Tensor] = plain_hadamard(size, working, x.device)
    base = base_order(size)
    assert base is not None
    power = size // base
    if not states.why_not_rotate(x, power):
        found = states.rotate_rows(x.to(working).unflatten(-1, (-1, base, power)))
        if base > 1:
            found = (factors[0] if back else factors[0].t()) @ found
        return found.flatten(-3).to(x.dtype)
    if back:
        factors = [factor.t() for factor in factors]
    return kronecker_product(x.to(working).unflatten(-1, (-1, size)), factors).flatten(-2).to(x.dtype)


def for_plain_inputs(weight: Tensor, block: int | None) -> Tensor:
    """The weight [N, K] of a layer that rotates its input in blocks of this size (None: it does not), for an input that
    nothing rotates."""
    return weight if block is None else rotated(weight, block, back=True)
