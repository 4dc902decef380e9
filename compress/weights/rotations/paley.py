"""Hadamard matrices by Paley's constructions: entries 1 and -1, orthogonal rows.

    chi(a)  1 where a is a square of the field GF(q), -1 where it is none, 0 for zero
    J       [q, q]  J[a, b] = chi(a - b)

    Paley I    q = 3 mod 4, order q + 1       I + [[0, 1^T], [-1, J]]
    Paley II   q = 1 mod 4, order 2 (q + 1)   C x [[1, 1], [1, -1]] + I x [[1, -1], [-1, -1]]     C = [[0, 1^T], [1, J]]

q is a power of an odd prime; x is Kronecker's product. Source: R. E. A. C. Paley, On orthogonal matrices, Journal of
Mathematics and Physics 12, 1933. Elements of GF(p^e) are numbers whose digits in base p are the coefficients of a
polynomial, multiplied modulo an irreducible one, the first that is found.
"""

from functools import cache
from itertools import product

import torch
from torch import Tensor

Polynomial = tuple[int, ...]  # coefficients, the lowest first


def paley(order: int) -> Tensor | None:
    """[order, order] float64 of 1 and -1; None for an order that neither construction has."""
    if order % 4:
        return None
    if (field := prime_power(order - 1)) is not None:
        return torch.eye(order, dtype=torch.float64) + _bordered(jacobsthal(*field), -1)
    if (field := prime_power(order // 2 - 1)) is not None and (order // 2 - 1) % 4 == 1:
        return _second(jacobsthal(*field))
    return None


def prime_power(number: int) -> tuple[int, int] | None:
    """(p, e) with p^e = number; None for a number that is no power of a prime."""
    if number < 2:
        return None
    prime = next((d for d in range(2, int(number**0.5) + 1) if number % d == 0), number)
    exponent, rest = 0, number
    while rest % prime == 0:
        exponent, rest = exponent + 1, rest // prime
    return (prime, exponent) if rest == 1 else None


def jacobsthal(prime: int, exponent: int) -> Tensor:
    """J [q, q] of the field with q = prime^exponent elements."""
    elements = [tuple(reversed(digits)) for digits in product(range(prime), repeat=exponent)]
    modulus = irreducible(prime, exponent)
    squares = {_remainder(_times(a, a, prime), modulus, prime) for a in elements}
    chi = torch.tensor([0 if not any(a) else 1 if a in squares else -1 for a in elements], dtype=torch.float64)
    digits = torch.tensor(elements)
    places = prime ** torch.arange(exponent)
    return chi[((digits[:, None] - digits[None]) % prime * places).sum(-1)]


@cache
def irreducible(prime: int, degree: int) -> Polynomial:
    """The first monic polynomial of a degree that no other divides, modulo a prime."""
    for low in product(range(prime), repeat=degree):
        candidate = (*low, 1)
        divisors = (
            (*smaller, 1) for size in range(1, degree // 2 + 1) for smaller in product(range(prime), repeat=size)
        )
        if all(any(_remainder(candidate, divisor, prime)) for divisor in divisors):
            return candidate
    raise AssertionError("there is one of every degree")


def _times(a: Polynomial, b: Polynomial, prime: int) -> Polynomial:
    found = [0] * (len(a) + len(b) - 1)
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            found[i + j] = (found[i + j] + x * y) % prime
    return tuple(found)


def _remainder(a: Polynomial, monic: Polynomial, prime: int) -> Polynomial:
    """The rest of dividing `a` by a monic polynomial, with as many coefficients as that one's degree."""
    rest, degree = list(a), len(monic) - 1
    for place in range(len(rest) - 1, degree - 1, -1):
        factor = rest[place]
        for i, coefficient in enumerate(monic):
            rest[place - degree + i] = (rest[place - degree + i] - factor * coefficient) % prime
    return tuple((rest + [0] * degree)[:degree])


def _bordered(inner: Tensor, side: float) -> Tensor:
    """[[0, 1^T], [side, inner]]."""
    found = torch.zeros(len(inner) + 1, len(inner) + 1, dtype=inner.dtype)
    found[0, 1:], found[1:, 0], found[1:, 1:] = 1, side, inner
    return found


def _second(j: Tensor) -> Tensor:
    conference = _bordered(j, 1)
    kinds = torch.tensor([[[1, 1], [1, -1]], [[1, -1], [-1, -1]]], dtype=j.dtype)
    return torch.kron(conference, kinds[0].contiguous()) + torch.kron(torch.eye(len(conference)).to(j), kinds[1])
