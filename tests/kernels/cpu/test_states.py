"""The loops for rotations and key-value caches: what torch computes, on this processor and in an emulator of ARM."""

import pytest
import torch

from compress.kernels.operators import states
from compress.weights.kv_cache_codes import CacheScheme, decode_states, encode_states
from compress.weights.rotations.hadamard import plain_hadamard, rotated
from compress.weights.rotations.orthogonal import kronecker_product

SCHEMES = [
    CacheScheme(),
    *(
        CacheScheme(bits=bits, group=group, rotated=turned)
        for bits in (4, 3)
        for group, turned in ((64, True), (16, False))
    ),
]


@pytest.fixture
def by_torch(monkeypatch):
    """Calls a function without the loops."""

    def call(function, *arguments):
        with monkeypatch.context() as patched:
            for name in ("why_not_rotate", "why_not_codes"):
                patched.setattr(states, name, lambda *arguments: ["not now"])
            return function(*arguments)

    return call


def of_sizes(*shape):
    """Whole numbers, of any size from one token to the next, whose rotations are exact in float32."""
    x = torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(0)).float()
    return x * 2.0 ** torch.arange(-20, 20, 40 / shape[-2]).unsqueeze(-1)


@pytest.mark.usefixtures("state_loops")
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_codes_are_those_of_torch(scheme, by_torch):
    x = of_sizes(2, 3, 20, 64)
    x[0, 1, 2] = 0
    assert not states.why_not_codes(x, scheme.bits, scheme.group or 64, scheme.rotated)
    stored = encode_states(x, scheme, None, True)
    assert torch.equal(stored, by_torch(encode_states, x, scheme, None, True))
    found = decode_states(stored, scheme, None, x, True)
    expected = by_torch(decode_states, stored, scheme, None, x, True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(scheme.rotated))
    assert not found[0, 1, 2].any()


@pytest.mark.usefixtures("state_loops")
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_what_is_no_number_stays_none(scheme):
    x = torch.ones(1, 1, 3, 64)
    x[..., 1, 5] = torch.nan
    found = decode_states(encode_states(x, scheme, None, True), scheme, None, x, True)
    assert found.isnan().any(-1).tolist() == [[[False, True, False]]]


@pytest.mark.usefixtures("state_loops")
@pytest.mark.parametrize("size", [8, 64, 2048, 96, 1536])
def test_rotation_is_the_product_with_a_hadamard_matrix_and_back(size):
    x = torch.randn(3, 2 * size, generator=torch.Generator().manual_seed(0))
    factors = plain_hadamard(size, torch.float64, x.device)
    expected = kronecker_product(x.double().unflatten(-1, (2, size)), factors).flatten(-2)
    torch.testing.assert_close(rotated(x, size).double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(rotated(rotated(x, size), size, back=True), x, rtol=0, atol=1e-5)
    assert rotated(x.half(), size).dtype == torch.half


def test_operators_are_of_torch():
    x = torch.randn(2, 3, 64, requires_grad=True)
    stored = encode_states(x.detach(), CacheScheme(bits=3, group=64), None)
    torch.library.opcheck(states.rotate_rows.registered, (x,))
    torch.library.opcheck(states.encode_states.registered, (x.detach(), 3, 64, True))
    torch.library.opcheck(states.decode_states.registered, (stored, 64, 3, 64, True))


@pytest.mark.parametrize(
    ("size", "bits", "group", "turned", "reason"),
    [
        (40, 4, 40, False, "heads of 40 in groups of 40; allowed: multiples of 16 and 8"),
        (96, 3, 48, False, "heads of 96 in groups of 48; allowed: multiples of 64 and 8"),
        (48, 4, 12, False, "heads of 48 in groups of 12; allowed: multiples of 16 and 8"),
        (96, 4, 48, True, "a matrix of order 96; allowed: powers of two from 8 on"),
    ],
)
def test_reasons_against_loops(size, bits, group, turned, reason):
    assert states.why_not_codes(torch.ones(1, size), bits, group, turned) == [reason]
    assert "x is float64" in states.why_not_codes(torch.ones(1, size).double(), bits, group, turned)[0]
