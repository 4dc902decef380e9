"""Caches after steps that wrote to the room behind them hold what their own `update` would have left there."""

import copy

import pytest
import torch
from models import tokens
from stepping import stepping, unfused
from transformers import DynamicCache, StaticCache

from compress.inference.steps import room


@torch.no_grad()
def read(model, cache, ids):
    return model(ids, past_key_values=cache, use_cache=True).logits[:, -1]


def steps(model, cache, count, seed=3):
    ids = tokens(2, count, seed)
    return torch.stack([read(model, cache, ids[:, i : i + 1]) for i in range(count)])


def assert_same(cache, other):
    for one, two in zip(cache.layers, other.layers, strict=True):
        assert one.get_seq_length() == two.get_seq_length()
        torch.testing.assert_close(one.keys, two.keys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(one.values, two.values, rtol=1e-5, atol=1e-5)


def caches(model):
    return DynamicCache(config=model.config), DynamicCache(config=model.config)


@pytest.mark.parametrize("kind", ["llama", "mistral"])  # mistral: a window of 8
def test_growing_caches_hold_the_same(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(room, "LEAST_ROOM", 3)  # so that it is used up
    model = stepping(tmp_path, kind)
    plain = unfused(model)
    cache, other = caches(model)
    for m, c in ((model, cache), (plain, other)):
        read(m, c, tokens(2, 6))
    torch.testing.assert_close(steps(model, cache, 9), steps(plain, other, 9), rtol=1e-4, atol=1e-4)
    assert_same(cache, other)


def test_static_caches_hold_the_same(tmp_path):
    model = stepping(tmp_path, "mistral")
    plain = unfused(model)
    cache, other = (StaticCache(config=model.config, max_cache_len=16) for _ in range(2))
    for m, c in ((model, cache), (plain, other)):
        read(m, c, tokens(2, 6))
    torch.testing.assert_close(steps(model, cache, 9), steps(plain, other, 9), rtol=1e-4, atol=1e-4)
    assert_same(cache, other)


def test_a_cache_and_its_copies_go_their_own_ways(tmp_path):
    model = stepping(tmp_path)
    cache, _ = caches(model)
    read(model, cache, tokens(2, 6))
    steps(model, cache, 2)
    shallow = copy.copy(cache)
    shallow.layers = [copy.copy(layer) for layer in cache.layers]
    deep = copy.deepcopy(cache)
    before = [layer.keys.clone() for layer in cache.layers]
    steps(model, shallow, 3, seed=5)
    steps(model, deep, 3, seed=6)
    kept = [layer.keys for layer in shallow.layers]
    for layer, expected in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, expected)
    expected = [keys.clone() for keys in kept]
    steps(model, cache, 3, seed=7)
    for layer, wanted in zip(shallow.layers, expected, strict=True):
        assert torch.equal(layer.keys, wanted)


def test_a_cropped_cache_goes_on_from_there(tmp_path):
    model = stepping(tmp_path)
    plain = unfused(model)
    cache, other = caches(model)
    for m, c in ((model, cache), (plain, other)):
        read(m, c, tokens(2, 6))
        steps(m, c, 4)
        c.crop(-2)
    torch.testing.assert_close(steps(model, cache, 2, 8), steps(plain, other, 2, 8), rtol=1e-4, atol=1e-4)
    assert_same(cache, other)


def test_a_cache_of_other_sequences_raises_as_ever_and_keeps_what_it_has(tmp_path):
    model = stepping(tmp_path)
    cache, _ = caches(model)
    read(model, cache, tokens(2, 6))
    steps(model, cache, 2)
    with pytest.raises(RuntimeError):
        read(model, cache, tokens(3, 1))
    assert {layer.get_seq_length() for layer in cache.layers} == {8}
