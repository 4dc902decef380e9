"""Attention of one token over a cache, by the loop of the CPU: against the formula in float64, and what it refuses."""

import math

import pytest
import torch
from combinations import every

from compress.kernels.cpu import direct

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Batch, heads, key heads, keys, size of a key, of a value: heads in tiles of 4 and what is left, parts of vectors.
SIZES = ((1, 9, 3, 50, 64, 64), (2, 7, 1, 16, 80, 48), (2, 4, 4, 1, 20, 33), (1, 5, 1, 131, 8, 16))


def truth(query, key, value, mask, scale):
    share = query.shape[1] // key.shape[1]
    key, value = (each.double().repeat_interleave(share, 1) for each in (key, value))
    scores = query.double() @ key.transpose(-1, -2) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.double()
    return (scores.softmax(-1).nan_to_num(0) @ value).transpose(1, 2)


def given(sizes, dtype, kind):
    torch.manual_seed(0)
    batch, heads, key_heads, keys, size, value_size = sizes
    query = torch.randn(batch, 1, heads, size).to(dtype).transpose(1, 2) * 3
    key = torch.randn(batch, key_heads, keys + 3, size).to(dtype)[:, :, :keys]  # a part of a cache
    value = torch.randn(batch, keys, key_heads, value_size).to(dtype).transpose(1, 2)
    if kind is None:
        return query, key, value, None, size**-0.5
    seen = torch.rand(batch, heads if kind == "heads" else 1, 1, keys) > 0.4
    seen[..., 0] = True
    added = torch.where(seen, torch.randn(seen.shape), -math.inf).to(dtype)
    return query, key, value, added if kind == "added" else seen, 0.3


@every("dtype", DTYPES)
@every("sizes", SIZES)
@every("kind", [None, "seen", "heads", "added"])
def test_the_formula(looped, sizes, dtype, kind):
    query, key, value, mask, scale = given(sizes, dtype, kind)
    assert direct.attends(query, key, value, mask)
    out = direct.attention(query, key, value, mask, scale)
    exact = truth(query, key, value, mask, scale)
    assert out.shape == exact.shape
    assert out.dtype == dtype
    # Sums of fp32, of values of at most 5, and one rounding.
    allowed = 2e-5 + torch.finfo(dtype).eps / 2 * exact.abs()
    assert ((out.double() - exact).abs() <= allowed).all()


def test_large_and_small_scores(looped):
    query = torch.tensor([1.0, 100, 1000]).view(1, 3, 1, 1)
    key, value = torch.tensor([0.0, -0.5, 1.0, -80]).view(1, 1, 4, 1), torch.tensor([1.0, 2, 3, 4]).view(1, 1, 4, 1)
    out = direct.attention(query, key, value, None, 1.0)
    torch.testing.assert_close(out.double(), truth(query, key, value, None, 1.0), rtol=3e-7, atol=0)


def test_what_is_no_number_and_what_is_not_seen(looped):
    query, key, value, _, scale = given((2, 2, 1, 20, 16, 16), torch.float32, None)
    seen = torch.ones(2, 1, 1, 20, dtype=torch.bool)
    seen[0, ..., 7:] = False
    key[0, 0, 9], value[0, 0, 11] = math.nan, math.nan  # where nobody looks
    expected = truth(query[:1], key[:1, :, :7], value[:1, :, :7], None, scale)
    out = direct.attention(query, key, value, seen, scale)
    torch.testing.assert_close(out[:1].double(), expected, rtol=1e-5, atol=1e-6)
    assert direct.attention(query, key, value, None, scale)[0].isnan().all()
    assert torch.equal(direct.attention(query, key, value, ~seen & ~seen.roll(1, 0), scale)[1], torch.zeros(1, 2, 16))


def test_contract():
    if direct.why_not():
        pytest.skip("; ".join(direct.why_not()))
    query, key, value, mask, scale = given(SIZES[0], torch.float32, "seen")
    asked = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.compress.cpu_attention.default, (query, key, value, mask, scale), test_utils=asked)
    for wrong, words in (
        ((query[:, :8], key, value, None), "do not fit the query"),
        ((query, key, value[:, :, :5], None), "do not fit the query"),
        ((query, key.half(), value, None), "several dtypes"),
        ((query, key, value, mask[..., :7]), "not one of these keys"),
        ((query, key.transpose(2, 3), value, None), "do not fit|do not lie"),
    ):
        with pytest.raises(RuntimeError, match=words):
            direct.attention(*wrong, scale)
        assert not direct.attends(*wrong)
    assert not direct.attends(query[:, :0], key, value, None)
    assert direct.attention(query[:0], key[:0], value[:0], None, scale).shape == (0, 1, 9, 64)
    assert not direct.attends(query.requires_grad_(), key, value, mask)
    assert not direct.attends(query.detach().repeat(1, 1, 2, 1), key, value, mask)
    assert not direct.attends(query.detach(), key.double(), value.double(), mask)
