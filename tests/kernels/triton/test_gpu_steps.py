"""The kernels of a step on a GPU, against torch. Run with `pytest -m gpu`."""

import pytest
import torch
from stepped import assert_near, attended, norm_of, normed, random, states_of
from sums import planar_of
from torch.nn.functional import silu

from compress.kernels.layouts.words import planar_weight
from compress.kernels.step_functions import Activation, Norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def weight_on_gpu(N, K, bits, group, zero, dtype):
    """(Planar words, fp64 [N, K] values, small enough for float16 to hold products of two results)."""
    planar = planar_of(N, K, bits, group, zero, dtype)
    planar = planar._replace(scale=planar.scale / 64)
    parts = (None if part is None else part.cuda() for part in planar[:3])
    planar = planar._replace(**dict(zip(("words", "scale", "zero"), parts, strict=True)))
    return planar, planar_weight(planar, K).double()


@pytest.mark.kernels("products.step_kernel", "one_token.token_kernel", "norms.norm_kernel")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("M", [1, 4, 16])
@pytest.mark.parametrize(
    ("N", "K", "bits", "group", "zero"),
    [(6144, 4096, 4, 128, True), (1000, 1056, 4, 32, False), (4096, 14336, 8, -1, False)],
)
def test_products_of_a_step(N, K, bits, group, zero, M, dtype):
    """Twice: the second writes to memory that the first has used."""
    from compress.kernels.triton.steps.products import step_product

    like = torch.empty(0, dtype=dtype, device="cuda")
    planar, truth = weight_on_gpu(N, K, bits, group, zero, dtype)
    x, residual = random(M, K, seed=1, like=like), random(M, N, seed=2, like=like)
    for variant in (None, *Norm) if M == 4 else (Norm.RMS,):
        norm = None if variant is None else norm_of(variant, K, like)
        y = (normed(x, norm).double() @ truth.t()).to(dtype)
        for _ in range(2):
            assert_near(step_product(x, planar, norm=norm, residual_MN=residual), y + residual)
        gate, up = (silu(y[:, : N // 2]), y[:, N // 2 :])
        assert_near(step_product(x, planar, norm=norm, activation=Activation.SILU, gated=True), gate * up)


@pytest.mark.kernels("attention.attend_kernel")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize(("heads", "key_heads", "size"), [(32, 8, 128), (12, 12, 64), (40, 2, 96), (8, 1, 256)])
@pytest.mark.parametrize("count", [1, 64, 65, 2100])
def test_attention_of_a_step(count, heads, key_heads, size, batch, dtype):
    """Over a growing cache, and over one of fixed size."""
    from compress.kernels.triton.steps.attention import CachedTokens, attend_step

    like = torch.empty(0, dtype=dtype, device="cuda")
    states = states_of(batch, heads, key_heads, (size, size, size), True, like)
    room, place = count + 50, count - 1
    keys, values = (random(batch, key_heads, room, size, seed=n, like=like) for n in (7, 8))
    mask = torch.rand(batch, room, device="cuda") < 0.7
    mask[:, place] = True
    for given in (None, mask):
        wanted = None if given is None else given[:, :count]
        expected, key, value = attended(states, keys, values, place, slice(0, count), wanted, size**-0.5)
        cached = CachedTokens(keys, values, place, 0, count)
        if given is not None:
            cached = CachedTokens(keys, values, -1, 0, room, torch.tensor(place, device="cuda"))
        keys[:, :, place:], values[:, :, place:] = torch.nan, torch.nan
        assert_near(attend_step(states, cached, given, size**-0.5), expected)
        assert_near(keys[:, :, place], key)
        assert torch.equal(values[:, :, place], value)
