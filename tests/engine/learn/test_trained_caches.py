"""Training with a key-value cache of codes: what it computes with is what the written model's cache will hold."""

import json

import pytest
import torch
from combinations import every
from models import strong, tokens

import compress
from compress.inference.load.kv_caches import cache_hook
from compress.model.attention import attentions

DATA = {"calibration": tokens(8), "batch_size": 4}
CACHES = [("int8", "token"), ("int8", "head"), ("fp8", "tensor")]
CODES = compress.RTN(scheme="w8a16", group_size=-1)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=tokens(4, seed=9), use_cache=False).logits


@every("case", CACHES)
def test_a_loop_of_ones_own_sees_what_the_cache_will_hold(tmp_path_factory, case):
    output = tmp_path_factory.mktemp("out") / "out"
    kv = compress.KVCache(type=case[0], granularity=case[1])
    model, plain = strong("llama"), strong("llama")
    names = list(model.state_dict())
    compress.quantize(plain, CODES)
    prepared = compress.prepare_qat(model, [CODES, kv], **DATA)
    assert (logits(model) - logits(plain)).abs().max() > 1e-3  # of keys and values alone
    whole = strong("llama")
    compress.quantize(whole, [CODES, kv], **DATA)
    torch.testing.assert_close(logits(model), logits(whole), rtol=1e-4, atol=1e-4)
    optimizer = torch.optim.AdamW(prepared.groups(1e-3))
    ids = tokens(4, seed=20)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    for block in model.model.layers:
        for layer in (block.self_attn.k_proj, block.self_attn.v_proj):
            assert layer._parameters["weight"].grad.abs().sum() > 0
    optimizer.step()
    seen = logits(model)
    prepared.convert(output, verify=False)
    torch.testing.assert_close(logits(model), seen, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(compress.load(output)), seen, rtol=1e-4, atol=1e-4)
    assert [name for name in model.state_dict() if not name.endswith("_scale")] == names
    hooks = [h for a in attentions(model).values() for h in a._forward_pre_hooks.values()]
    assert len(hooks) == len([a for a in attentions(model).values() if cache_hook(a)]) == 2


@pytest.mark.parametrize("per", ["token", "head"])
def test_a_recipe_that_rounds_nothing_but_caches_trains_with_them(per, tmp_path):
    """Before the first step the original differs from its teacher, which is itself without a cache of codes."""
    kv = compress.KVCache(granularity=per)
    training = compress.Train(steps=2, rows=4, learning_rate=1e-4, held_out=0.5)
    result = compress.quantize(strong("llama"), [training, kv], output=tmp_path / "out", verify=False, **DATA)
    history = [json.loads(line) for line in (tmp_path / "out" / "training.jsonl").read_text().splitlines()]
    assert next(line["held_out"]["logits"] for line in history if "held_out" in line) > 1e-6
    torch.testing.assert_close(logits(compress.load(tmp_path / "out")), logits(result.model), rtol=1e-4, atol=1e-4)
    hooks = [h for a in attentions(result.model).values() for h in a._forward_pre_hooks.values()]
    assert len(hooks) == 2
