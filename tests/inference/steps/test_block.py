"""When steps run in one call, and when a block's own forward runs."""

import copy
import io

import pytest
import torch
from models import tokens
from stepping import answer, assert_same_answers, known, stepping, unfused
from transformers import DynamicCache

from compress.inference.steps import block as blocks
from compress.inference.steps.program import Planner


@pytest.fixture
def model(tmp_path):
    return stepping(tmp_path)


@pytest.fixture
def taken(monkeypatch):
    """One entry for each step in one call."""
    found, step = [], blocks.step

    def counted(*given):
        out = step(*given)
        found.append(out is not None)
        return out

    monkeypatch.setattr(blocks, "step", counted)
    return found


def test_every_step_but_the_first_of_an_answer_is_one_call_a_block(model, taken):
    answer(model, max_new_tokens=5, min_new_tokens=5)
    assert taken == [True] * 2 * 4


def test_beams_say_the_same(model, taken):
    ids, plain = tokens(2, 5), unfused(model)
    asked = {"num_beams": 3, "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **asked), plain.generate(ids, **asked))
    assert all(taken)
    assert taken


def test_a_static_cache_is_written_in_place(model, taken):
    assert_same_answers(model, unfused(model), cache_implementation="static")
    assert all(taken)
    assert taken


def test_hooks_inside_of_a_block_are_called(model, taken):
    plain, seen = unfused(model), []
    answer(model)
    taken.clear()
    handle = model.model.layers[1].mlp.register_forward_hook(lambda m, x, out: seen.append(1) or out * 2)
    plain.model.layers[1].mlp.register_forward_hook(lambda m, x, out: out * 2)
    assert_same_answers(model, plain)
    assert len(seen) == 12
    assert taken == [True] * 11
    handle.remove()
    taken.clear()
    assert_same_answers(model, unfused(model))
    assert taken == [True] * 22


def test_attention_weights_and_hidden_states_are_told(model):
    plain = unfused(model)
    for each in (model, plain):
        each.set_attn_implementation("eager")
    asked = {"output_attentions": True, "output_hidden_states": True, "return_dict_in_generate": True}
    ids = tokens(2, 5)
    found, wanted = (
        m.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, **asked) for m in (model, plain)
    )
    for one, other in zip(found.attentions[-1], wanted.attentions[-1], strict=True):
        torch.testing.assert_close(one, other)
    for one, other in zip(found.hidden_states[-1], wanted.hidden_states[-1], strict=True):
        torch.testing.assert_close(one, other)


def test_gradients_and_training_take_the_blocks_own_forward(model, taken):
    answer(model)
    taken.clear()
    cache = DynamicCache(config=model.config)
    weight = model.get_input_embeddings().weight.requires_grad_()
    model(tokens(1, 4), past_key_values=cache)
    model(tokens(1, 1), past_key_values=cache).logits.sum().backward()
    assert weight.grad.abs().sum() > 0
    with torch.no_grad():
        model.train()(tokens(1, 1), past_key_values=cache)
    assert not taken


def test_changed_weights_and_layers_count(model, taken):
    answer(model)
    norm = model.model.layers[0].input_layernorm
    norm.weight.data = norm.weight.data * 3  # in other memory
    other = copy.deepcopy(model.model.layers[0].mlp.down_proj)
    model.model.layers[1].mlp.down_proj = other
    taken.clear()
    assert_same_answers(model, unfused(model))
    assert known(model) == 2
    assert all(taken)


def test_copies_and_pickles_say_the_same(model):
    answer(model)
    written = io.BytesIO()
    torch.save(model, written)
    written.seek(0)
    for other in (copy.deepcopy(model), torch.load(written, weights_only=False)):
        assert_same_answers(other, unfused(model))


def test_another_dtype_is_tried_again(model):
    answer(model)
    model.bfloat16()
    assert_same_answers(model, unfused(model))
    assert known(model) == 2


def test_a_block_whose_step_differs_is_left_alone(model, monkeypatch):
    """The comparison with the block's own forward is what decides."""
    monkeypatch.setattr(Planner, "sum", lambda self, names: self.terms.update(s=self.x))
    assert_same_answers(model, unfused(model))
    assert known(model) == 0
    assert {s.why_not for _, s in blocks.installed_steps(model)} == {
        "a step in one call gives other result than its own forward"
    }
