"""The study of K-quants: its ways are compared at equal bytes, layer by layer."""

import pytest
from commands import make_llama

pytest.importorskip("gguf", reason="the study reads and counts by gguf-py")


def test_layers_have_the_types_that_both_write():
    """The MLP's way down has 288 inputs, no multiple of 256, so that its types are llama.cpp's fallbacks."""
    from compress.recipes.studies.engines.k_quants import bits_of, types_of_layers

    model = make_llama(hidden_size=256, intermediate_size=288)
    types = types_of_layers(model, "q4_k_m")
    assert types["model.layers.0.mlp.down_proj"] == "q5_0"
    assert types["model.layers.1.mlp.down_proj"] == "q8_0"
    assert types["model.layers.0.self_attn.v_proj"] == types["model.layers.1.self_attn.q_proj"] == "q4_k"
    assert types["model.layers.1.self_attn.v_proj"] == "q6_k"
    assert types_of_layers(model, "iq4_xs")["model.layers.0.mlp.down_proj"] == "iq4_nl"
    plain = types_of_layers(model, "q4_0")
    assert plain.keys() == types.keys()
    assert bits_of(model, plain) == 4.5
    assert 4.5 < bits_of(model, types) < 6.5625
