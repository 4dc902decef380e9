"""The kernels of steps of generating, run as `interpreter_cases` runs the others."""

import pytest
import torch
from combinations import pairs
from interpreter_cases import guarded, weight_and_truth  # noqa: F401  every test here is held to it
from stepped import ACTIVATIONS, assert_near, attended, norm_of, normed, random, states_of

from compress.kernels import workspace
from compress.kernels.step_functions import Activation, Norm
from compress.kernels.triton.steps.attention import CachedTokens, attend_step
from compress.kernels.triton.steps.products import step_product
from compress.kernels.tuning.table import Shape

HALF = torch.empty(0, dtype=torch.float16)


@pytest.mark.parametrize(
    ("M", "variant", "weight", "split"),
    pairs(
        [1, 3, 16],
        [None, *Norm],
        [(4, 32, True), (4, 128, False), (8, -1, True), (8, 64, False)],
        [1, 2],
    ),
)
def test_norm_product_and_residual(M, variant, weight, split):
    """K is no whole number of blocks of words; the norm has several chunks where there are several tokens."""
    (bits, group, zero), N, K = weight, 40, 128 * 3 + (0 if weight[1] == 128 else 64)
    planar, truth = weight_and_truth(bits, N, K, group, zero, HALF.dtype, seed=M)
    x = random(M, K, seed=1, like=HALF) * 3 + 1
    bias, residual = random(N, seed=2, like=HALF), random(M, N, seed=3, like=HALF)
    norm = None if variant is None else norm_of(variant, K, HALF)
    out = step_product(x, planar, bias, norm=norm, residual_MN=residual, shape=Shape(16, 32, split, num_stages=2))
    assert_near(out, (normed(x, norm).double() @ truth.t() + bias.double()).half() + residual)
    assert workspace.counters(torch.device("cpu")).count_nonzero() == 0


@pytest.mark.parametrize(("activation", "gated", "split"), pairs([*Activation], [True, False], [1, 2]))
def test_activation_of_a_gate(activation, gated, split):
    M, width, K = 3, 24, 256  # half a tile is 16 rows: the second is filled in part
    planar, truth = weight_and_truth(4, width * (1 + gated), K, 64, True, HALF.dtype, seed=7)
    x, length = random(M, K, seed=1, like=HALF) * 0.3, torch.tensor([41])
    shape = Shape(16, 32, split, num_stages=2)
    out = step_product(x, planar, None, activation=activation, gated=gated, length=length, shape=shape)
    y = (x.double() @ truth.t()).half()
    gate = ACTIVATIONS[activation](y[:, :width])
    assert_near(out, gate * y[:, width:] if gated else gate)
    assert length.tolist() == [42]


def test_a_deviation_is_not_a_difference_of_large_squares():
    planar, truth = weight_and_truth(4, 16, 128, 128, False, HALF.dtype, seed=7)
    x, norm = random(2, 128, like=HALF) * 0.05 + 8, norm_of(Norm.LAYER, 128, HALF)
    assert_near(step_product(x, planar, norm=norm), (normed(x, norm).double() @ truth.t()).half())


@pytest.mark.parametrize(
    ("batch", "heads", "sizes", "head_norm", "count", "split", "mask"),
    pairs(
        [1, 2],
        [(2, 2), (6, 2), (20, 1)],  # 20 queries of a head of keys are more than a tile's least rows
        [(32, 32, 32), (24, 16, 16), (16, 32, 0)],
        [False, True],
        [1, 64, 65, 200],  # at the boundaries of blocks of 64 tokens and of their splits
        [1, 2, 4],
        [None, "bool", "length"],
    ),
)
def test_attention_over_a_cache(batch, heads, sizes, head_norm, count, split, mask):
    (heads, key_heads), (size, value_size, _) = heads, sizes
    states = states_of(batch, heads, key_heads, sizes, head_norm, HALF)
    room, first = count + 20, 0 if mask == "length" else 7
    keys, values = (random(batch, key_heads, room, n, seed=n, like=HALF) for n in (size, value_size))
    place = first + count - 1
    keys[:, :, place:], values[:, :, place:] = torch.nan, torch.nan  # not read
    given = None
    if mask is not None:
        given = torch.rand(batch, room if mask == "length" else count, generator=torch.Generator().manual_seed(3)) < 0.7
        given[:, count - 1] = True
    seen, wanted = slice(first, first + count), None if given is None else given[:, :count]
    expected, key, value = attended(states, keys, values, place, seen, wanted, 0.3)
    cached = CachedTokens(keys, values, place, first, count)
    if mask == "length":
        cached = CachedTokens(keys, values, -1, 0, room, torch.tensor([place]))
    assert_near(attend_step(states, cached, given, 0.3, split), expected)
    assert_near(keys[:, :, place], key)
    assert torch.equal(values[:, :, place], value)
    assert keys[:, :, place + 1 :].isnan().all()
    assert workspace.counters(torch.device("cpu")).count_nonzero() == 0
