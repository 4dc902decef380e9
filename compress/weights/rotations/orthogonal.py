"""Rotations of channels by a fast product: random signs, then a Hadamard matrix, block by block.

    Q = diag(s) (A x F x ... x F)       one block; A a Hadamard matrix of Paley's, F Sylvester's, x Kronecker's product
    Q' = Q (I - 2 v v^T / v^T v)        v = Q^T 1 - 1: the reflection after which the vector of ones stays itself

A block of D = m 2^k channels takes the smallest Paley matrix A whose order is D's odd part times a power of two; the
rest is Sylvester's. Where there is none, A is a random orthogonal matrix of the odd part. Every entry of a Hadamard
matrix has the same magnitude, so that one channel's outlier is shared by all of its block (QuaRot, Ashkboos et al.
2024, arXiv 2404.00456; the signs: QuIP#, Tseng et al. 2024, arXiv 2402.04396).

The reflection is for norms that subtract the mean over channels: with 1^T Q = 1^T they may stay as they are. It
changes entries of 1 / sqrt(D) by about 1 / D.

Shapes: C channels in B blocks of D.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod, sqrt

import torch
from torch import Tensor

from compress.weights.rotations.paley import paley

LARGEST_PALEY = 1024  # a larger one is a matrix product of its own size, and no longer a fast transform
LARGEST_SYLVESTER = 64  # of one factor: a few products with small matrices are faster than many butterflies


@dataclass(frozen=True, eq=False)
class Orthogonal:
    """An orthogonal matrix [C, C]. signs: [B, D]. factors: orthogonal, of Kronecker's product [D, D]. mirrors: [B, D],
    the vector v of each block's reflection, of length one, or zero for none."""

    signs: Tensor
    factors: tuple[Tensor, ...]
    mirrors: Tensor | None = None

    @property
    def size(self) -> int:
        """C."""
        return self.signs.numel()

    @property
    def block(self) -> int:
        """D."""
        return self.signs.shape[1]

    def apply(self, x: Tensor) -> Tensor:
        """x @ Q [..., C], in the dtype of x, which should be float32 or better."""
        y = x.unflatten(-1, self.signs.shape) * self.signs.to(x)
        y = kronecker_product(y, [factor.to(x) for factor in self.factors])
        if self.mirrors is not None:
            mirrors = self.mirrors.to(x)
            y = y - 2 * (y * mirrors).sum(-1, keepdim=True) * mirrors
        return y.flatten(-2)

    def matrix(self) -> Tensor:
        """Q [C, C] in float64."""
        return self.apply(torch.eye(self.size, dtype=torch.float64))

    def parts(self) -> dict[str, Tensor]:
        """The tensors that it is made of, by name."""
        named = {f"factor.{i}": factor for i, factor in enumerate(self.factors)}
        return {"signs": self.signs, **named, **({} if self.mirrors is None else {"mirrors": self.mirrors})}


def kronecker_product(x: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """x [..., D] @ (F1 x F2 x ...)."""
    y = x.unflatten(-1, [len(factor) for factor in factors])
    for i, factor in enumerate(factors):
        axis = i - len(factors)
        y = (y.movedim(axis, -1) @ factor).movedim(-1, axis)
    return y.flatten(-len(factors))


def hadamard_rotation(
    size: int, generator: torch.Generator, block: int | None = None, ones: bool = False
) -> Orthogonal:
    """A randomised Hadamard rotation of `size` channels. block: its blocks' size, which divides `size` (None: one
    block). ones: whether it leaves the vector of ones as it is."""
    block = size if block is None else block
    assert size % block == 0, f"blocks of {block} do not divide {size} channels"
    signs = (torch.randint(2, (size // block, block), generator=generator) * 2 - 1).double()
    plain = Orthogonal(signs, hadamard_factors(block, generator))
    if not ones:
        return plain
    turned = plain.apply(torch.ones(size, dtype=torch.float64)).view_as(signs)
    flips = torch.where(turned.sum(1, keepdim=True) > 0, -1, 1)  # of a long mirror, whose reflection changes less
    signs, mirrors = signs * flips, turned * flips - 1
    length = mirrors.norm(dim=1, keepdim=True)
    still = length <= sqrt(block) * torch.finfo(length.dtype).eps * block
    return Orthogonal(signs, plain.factors, torch.where(still, 0, mirrors / length))


def hadamard_factors(size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Orthogonal factors of a Hadamard matrix of this order. Where no construction here has it, the factor of the odd
    part is a random orthogonal matrix."""
    base = base_order(size)
    first = None if base is None else base_matrix(base)
    if base is None or first is None:
        base = size // (size & -size)
        first = random_orthogonal(base, generator)
    return (first, *sylvester_factors(size // base)) if base > 1 or size == 1 else sylvester_factors(size)


def base_order(size: int) -> int | None:
    """The smallest order m of Paley's matrices with size = m 2^k; 1 for a power of two, None where there is none."""
    power = size & -size
    odd = size // power
    if odd == 1:
        return 1
    orders = [odd * 2**k for k in range(2, power.bit_length()) if odd * 2**k <= LARGEST_PALEY]
    return next((order for order in orders if base_matrix(order) is not None), None)


@cache
def base_matrix(order: int) -> Tensor | None:
    """[m, m] Paley's matrix, orthogonal; None where there is none."""
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    found = paley(order)
    return None if found is None else found / sqrt(order)


def sylvester_factors(size: int) -> tuple[Tensor, ...]:
    """Sylvester's matrix of a power of two, as orthogonal factors of at most LARGEST_SYLVESTER."""
    found: list[Tensor] = []
    while prod(len(each) for each in found) < size:
        found.append(sylvester(min(LARGEST_SYLVESTER, size // prod(len(each) for each in found))))
    return tuple(found)


@cache
def sylvester(size: int) -> Tensor:
    """[2^k, 2^k] orthogonal, float64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / sqrt(size)


def random_orthogonal(size: int, generator: torch.Generator) -> Tensor:
    """[D, D] float64, uniformly distributed: the Q of a QR decomposition with the signs of R's diagonal."""
    q, r = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    return (q * r.diagonal().sign()).contiguous()
