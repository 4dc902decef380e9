"""Which blocks have a form that is known, in which formats; a step in one call says what their own forwards say."""

import pytest
import torch
from stepping import answer, assert_same_answers, known, reasons, stepping, unfused

import compress
from compress.inference.steps.block import installed_steps, remarks
from compress.inference.steps.program import Leave


@pytest.mark.parametrize(
    "kind",
    ["llama", "qwen2", "qwen3", "mistral", "gemma", "phi", "phi3", "olmo2", "gemma3", "smollm3", "qwen3_moe"],
)
def test_a_known_block_says_what_its_own_forward_says(kind, tmp_path):
    model = stepping(tmp_path, kind)
    plain = unfused(model)
    assert_same_answers(model, plain)
    assert known(model) == 2, reasons(model)
    assert remarks(model) == []


@pytest.mark.parametrize("kind", ["gemma2", "granite", "olmo_clipped", "cohere", "opt", "gpt2"])
def test_a_block_of_another_form_is_left_alone_with_a_reason(kind, tmp_path):
    model = stepping(tmp_path, kind)
    assert_same_answers(model, unfused(model))
    assert known(model) == 0
    assert kind == "gpt2" or reasons(model)  # GPT-2 calls its blocks in a way that is not tried
    (remark,) = remarks(model)
    assert remark.startswith("steps of 2 of 2 blocks are run by their own modules")


def test_bfloat16_rounds_as_torch_does(tmp_path):
    model = stepping(tmp_path, "qwen3", torch.bfloat16)
    plain = unfused(model)
    assert_same_answers(model, plain)
    assert known(model) == 2


@pytest.mark.parametrize(
    ("what", "left"),
    [
        (compress.RTN(scheme="w8a8"), 0),
        (compress.RTN(scheme="w4a8", group_size=32), 0),
        (compress.RTN(scheme="mxfp4a16"), 0),
        (compress.RTN(scheme="fp8"), 7),
        ({"ignore": ["*.down_proj"]}, 1),
    ],
    ids=lambda value: str(getattr(value, "scheme", value)),
)
def test_layers_without_a_loop_are_called_in_their_places(what, left, tmp_path):
    model = stepping(tmp_path, "llama", **(what if isinstance(what, dict) else {"what": what}))
    assert_same_answers(model, unfused(model))
    if left == 7:
        assert reasons(model) == {"no loop multiplies by its weights"}
        return
    assert known(model) == 2, reasons(model)
    for _, steps in installed_steps(model):
        assert sum(isinstance(part, Leave) for part in steps.known.planned.parts) == left


def test_layers_that_are_one_product_and_inputs_in_int8(tmp_path):
    model = stepping(tmp_path, "llama", fuse=True, int8_activations=True)
    assert_same_answers(model, unfused(model))
    assert known(model) == 2, reasons(model)


@pytest.mark.parametrize("what", ["position_ids", "length"])
def test_a_block_that_reads_positions_by_itself_is_left_alone(what, tmp_path, monkeypatch):
    """Like the attentions that scale queries from some thousand tokens on (Llama 4)."""
    model = stepping(tmp_path)
    attention = type(model.model.layers[0].self_attn)
    own = attention.forward

    def scaled(self, hidden_states, position_ids=None, past_key_values=None, **given):
        seen = position_ids.max() if what == "position_ids" else past_key_values.get_seq_length(self.layer_idx)
        out, weights = own(self, hidden_states, position_ids=position_ids, past_key_values=past_key_values, **given)
        return out * (2.0 if seen > 8192 else 1.0), weights

    monkeypatch.setattr(attention, "forward", scaled)
    answer(model)
    assert known(model) == 0
