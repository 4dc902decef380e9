"""Whole models whose blocks take a step in launches of Triton kernels, run as `interpreter_cases` runs kernels."""

from collections import Counter

import pytest
import torch
from models import tokens
from stepping import known, reasons, stepping, unfused
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import DynamicCache, LlamaForCausalLM, StaticCache
from transformers.modeling_outputs import CausalLMOutputWithPast
from triton.runtime.interpreter import InterpretedFunction

import compress
from compress.inference.steps import block as blocks
from compress.inference.steps import graph
from compress.inference.steps.block import remarks
from compress.kernels.triton.steps import attention

BOUND = 0.02  # of logits, relative to the largest: fp16 through two blocks
PROMPT, NEW = 5, 2


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch):
    """The interpreter takes as long for a program without work as for others."""
    monkeypatch.setattr(attention, "SPLIT_LIMIT", 2)


@torch.no_grad()
def answers(model, cache, batch):
    """Logits of steps behind a prompt, the first sequence of which is padded if there are several."""
    ids = tokens(batch, PROMPT + NEW)
    mask = torch.ones_like(ids)
    mask[0, : 2 * (batch > 1)] = 0
    model(ids[:, :PROMPT], attention_mask=mask[:, :PROMPT], past_key_values=cache)
    steps = range(PROMPT, PROMPT + NEW)
    read = (model(ids[:, i : i + 1], attention_mask=mask[:, : i + 1], past_key_values=cache) for i in steps)
    return torch.cat([each.logits for each in read], 1)


def cache_of(model, kind):
    return StaticCache(config=model.config, max_cache_len=9) if kind == "static" else DynamicCache(config=model.config)


def assert_same(model, kind, batch):
    cache, other = cache_of(model, kind), cache_of(model, kind)
    found, wanted = answers(model, cache, batch), answers(unfused(model), other, batch)
    torch.testing.assert_close(found, wanted, rtol=0, atol=BOUND * float(wanted.abs().max()))
    for one, two in zip(cache.layers, other.layers, strict=True):
        assert int(one.get_seq_length()) == int(two.get_seq_length())
        torch.testing.assert_close(one.keys, two.keys, rtol=BOUND, atol=BOUND)


@pytest.mark.parametrize(
    ("kind", "what", "cache", "batch"),
    [
        ("llama", {}, "static", 1),
        ("qwen3", {"grid": "asymmetric", "group_size": 32}, "dynamic", 3),
        ("qwen2", {"scheme": "w8a16"}, "static", 3),
        ("mistral", {"group_size": 32}, "dynamic", 2),  # a window
    ],
)
def test_launches_say_what_a_block_says(kind, what, cache, batch, tmp_path):
    model = stepping(tmp_path, kind, torch.float16, compress.RTN(**what), fuse=True)
    assert_same(model, cache, batch)
    assert known(model) == 2, reasons(model)
    assert remarks(model) == []


@pytest.mark.parametrize("what", ["a block in launches", "a block as it is", "no capture"])
def test_whole_steps_are_replayed(what, tmp_path, monkeypatch):
    """By a graph that runs the step in place of a GPU's; `generate` chooses a cache of fixed size by itself."""
    replayed = []

    def record(run):
        if what == "no capture":
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        out = CausalLMOutputWithPast()

        def replay():
            replayed.append(1)
            out.logits = run().logits

        return replay, out, set()

    monkeypatch.setattr(graph, "record", record)
    monkeypatch.setattr(LlamaForCausalLM, "_valid_auto_compile_criteria", lambda *_: True)
    model = stepping(tmp_path, "llama", torch.float16, fuse=what != "a block as it is")
    plain = unfused(model)
    del plain.get_compiled_call, plain.generate
    monkeypatch.setattr(LlamaForCausalLM, "get_compiled_call", lambda self, _: self)
    asked = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    ids = tokens(2, PROMPT)
    assert torch.equal(model.generate(ids, **asked), plain.generate(ids, **asked))
    # Of four steps behind the prompt, the first runs as it is.
    assert len(replayed) == (0 if what == "no capture" else 3)
    why = "a step cannot be captured (operation not permitted when stream is capturing)"
    said = [remark for remark in remarks(model) if "not replayed" in remark]
    assert said == ([f"steps are not replayed as one graph: {why}"] if what == "no capture" else [])
    model.generate(ids, num_beams=2, **asked)  # over a growing cache
    assert len(replayed) == (0 if what == "no capture" else 3)


class Operations(TorchDispatchMode):
    """Counts torch's operations."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names[str(function)] += 1
        return function(*args, **(kwargs or {}))


NO_LAUNCH = {"aten.empty", "aten.view", "aten.slice", "aten.select", "aten.detach", "aten._unsafe_view"}


@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_a_block_is_five_launches_and_nothing_else(cache, tmp_path, monkeypatch):
    model = stepping(tmp_path, "llama", torch.float16, fuse=True)
    launched, seen, run, step = Counter(), Counter(), InterpretedFunction.run, blocks.step

    def counted(self, *given, **asked):
        launched[self.fn.__name__] += 1
        with _disable_current_modes():  # the interpreter computes by torch
            return run(self, *given, **asked)

    def observed(*given):
        launched.clear()
        with Operations() as operations:
            out = step(*given)
        seen.clear()  # the first step makes room behind a growing cache
        seen.update(operations.names)
        return out

    monkeypatch.setattr(blocks, "step", observed)
    monkeypatch.setattr(InterpretedFunction, "run", counted)
    answers(model, cache_of(model, cache), 1)
    assert launched == {"token_kernel": 4, "attend_kernel": 1}
    assert {name.rpartition(".")[0] for name in seen} <= NO_LAUNCH, seen


@pytest.mark.parametrize(
    ("kind", "options", "batch", "reason"),
    [
        ("gemma3", {"fuse": True}, 1, "a norm stands behind its products"),
        ("llama", {"fuse": False}, 1, "gate and up are not one product, the gate first"),
        ("llama", {"fuse": True}, 17, "17 sequences; kernels of a step take 16"),
        ("llama", {"fuse": True, "what": compress.RTN(scheme="w4a8")}, 1, "kernels of a step do not multiply"),
    ],
)
def test_what_is_left_to_the_block_is_said(kind, options, batch, reason, tmp_path):
    model = stepping(tmp_path, kind, torch.float16, **options)
    assert_same(model, "dynamic", batch)
    (remark,) = remarks(model)
    assert remark.startswith(f"steps of 2 of 2 blocks are run by their own modules, not in one call: {reason}")
