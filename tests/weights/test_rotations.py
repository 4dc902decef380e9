"""Hadamard matrices by Paley's constructions, and rotations made of them."""

import pytest
import torch

from compress.weights.rotations.orthogonal import base_order, hadamard_rotation, random_orthogonal
from compress.weights.rotations.paley import irreducible, jacobsthal, paley, prime_power

EXACT = {"rtol": 0, "atol": 1e-12}
# Multiples of 4 up to 120 that neither construction has by itself; powers of two are Sylvester's.
MISSING = {16, 40, 56, 64, 88, 92, 96, 112, 116, 120}


def generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_paley_matrices_are_hadamard_matrices():
    found = {order for order in range(4, 121, 4) if paley(order) is not None}
    assert set(range(4, 121, 4)) - found == MISSING
    for order in found:
        matrix = paley(order)
        assert matrix is not None
        assert set(matrix.unique().tolist()) == {-1.0, 1.0}
        assert torch.equal(matrix @ matrix.T, order * torch.eye(order, dtype=torch.float64))
    assert paley(6) is None


@pytest.mark.parametrize(("prime", "exponent"), [(7, 1), (3, 2), (5, 2), (3, 3)])
def test_fields_have_as_many_squares_as_others(prime, exponent):
    matrix, q = jacobsthal(prime, exponent), prime**exponent
    assert torch.equal(matrix.sum(1), torch.zeros(q, dtype=torch.float64))
    assert torch.equal(matrix @ matrix.T, (q * torch.eye(q) - torch.ones(q, q)).double())
    assert torch.equal(matrix, matrix.T * (1 if q % 4 == 1 else -1))


def test_polynomials_that_no_other_divides():
    assert irreducible(2, 3) == (1, 0, 1, 1)  # x^3 + x^2 + 1, whose coefficients come before those of x^3 + x + 1
    assert irreducible(3, 2) == (1, 0, 1)
    assert [prime_power(n) for n in (1, 7, 12, 27, 343)] == [None, (7, 1), None, (3, 3), (7, 3)]


@pytest.mark.parametrize("size", [1, 2, 7, 8, 12, 36, 90, 96, 128, 576])
@pytest.mark.parametrize("ones", [False, True])
def test_rotations_are_orthogonal_and_repeatable(size, ones):
    rotation = hadamard_rotation(size, generator(), ones=ones)
    matrix = rotation.matrix()
    torch.testing.assert_close(matrix.T @ matrix, torch.eye(size, dtype=torch.float64), **EXACT)
    assert torch.equal(matrix, hadamard_rotation(size, generator(), ones=ones).matrix())
    x = torch.randn(3, size, generator=generator(), dtype=torch.float64)
    torch.testing.assert_close(rotation.apply(x), x @ matrix, **EXACT)
    if size > 2:
        assert not torch.equal(matrix, hadamard_rotation(size, generator(2), ones=ones).matrix())
    if ones:
        torch.testing.assert_close(matrix.sum(0), torch.ones(size, dtype=torch.float64), **EXACT)
    elif base_order(size) is not None:
        torch.testing.assert_close(matrix.abs(), torch.full((size, size), size**-0.5, dtype=torch.float64), **EXACT)


@pytest.mark.parametrize("ones", [False, True])
def test_blocks_do_not_mix(ones):
    matrix = hadamard_rotation(48, generator(), block=16, ones=ones).matrix()
    for i in range(3):
        rows, inside = matrix[16 * i : 16 * (i + 1)].clone(), slice(16 * i, 16 * (i + 1))
        torch.testing.assert_close(rows[:, inside] @ rows[:, inside].T, torch.eye(16, dtype=torch.float64), **EXACT)
        assert rows[:, inside].abs().max() < 0.8
        rows[:, inside] = 0
        assert torch.equal(rows, torch.zeros_like(rows))


@pytest.mark.parametrize(("size", "order"), [(4096, 1), (576, 36), (11008, 344), (14336, 28), (1472, 368), (90, None)])
def test_widths_of_models_have_a_base(size, order):
    assert base_order(size) == order
    matrix = random_orthogonal(6, generator())
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(6, dtype=torch.float64), **EXACT)
