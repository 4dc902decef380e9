"""Small models of classes of transformers, and the shares of weights that are told of them."""

import pytest
import torch
import transformers
from models import build

import compress
from compress.base.errors import first_line
from compress.recipes.studies.models.architectures import MOST, verdict
from compress.recipes.studies.models.shares import CODES, fates, shares, sizes
from compress.recipes.studies.models.small import MOST as PARAMETERS
from compress.recipes.studies.models.small import divided, shallow, small, uncalled


def test_a_model_cut_in_depth_keeps_a_layer_of_each_kind() -> None:
    model, batch = small(transformers.Qwen3NextForCausalLM, "causal")
    assert {*model.config.layer_types} == {"linear_attention", "full_attention"}
    assert model.config.num_hidden_layers == len(model.config.layer_types) < 5
    assert sum(p.numel() for p in model.parameters()) < PARAMETERS[0]
    assert batch["input_ids"].max() < model.config.vocab_size


def test_settings_of_single_layers_move_with_them() -> None:
    own = {"2": {"head_dim": 8}, "5": {"head_dim": 8}}
    kinds = ["near", "near", "far"] * 2
    found = shallow({"num_hidden_layers": 6, "layer_types": kinds, "per_layer_config": own, "name": "a"}, 2)
    assert found["num_hidden_layers"] == 2
    assert (found["layer_types"], found["per_layer_config"]) == (["near", "far"], {1: {"head_dim": 8}})


def test_division_keeps_sums_and_products_of_sizes() -> None:
    settings = {"hidden_size": 1024, "n_head": 16, "d_head": 64, "axial_pos_embds_dim": [256, 768], "vocab_size": 5000}
    found = divided({**settings, "kernel_size": 32, "is_decoder": True, "image_token_id": 4999}, 16, 4)
    assert found["hidden_size"] == found["n_head"] * found["d_head"] == sum(found["axial_pos_embds_dim"]) == 64
    assert (found["kernel_size"], found["is_decoder"]) == (32, True)
    assert 100 <= found["image_token_id"] < found["vocab_size"]


def test_what_stands_against_the_best_way_is_told() -> None:
    with pytest.raises(ValueError, match="rope_theta"):
        small(transformers.DbrxForCausalLM, "causal")


def test_a_decoder_of_an_encoder_decoder_gets_states_that_reach_all_of_its_layers() -> None:
    model, batch = small(transformers.BartForCausalLM, "causal")
    assert "encoder_hidden_states" in batch
    assert uncalled(model, batch) == 0 < uncalled(model, {"input_ids": batch["input_ids"]})


def test_shares_are_those_of_the_large_model() -> None:
    """The small one has as much in its head as in its blocks."""
    model = build("llama")
    made = compress.quantize(build("llama"), compress.RTN(scheme="w4a16"), ignore=["*.down_proj"])
    found = fates(model, made.record)
    assert found["model.layers.#.mlp.up_proj.weight"] == CODES
    assert found["model.layers.#.input_layernorm.weight"] == "norms and biases"
    large = sizes(model) | {"model.layers.#.mlp.down_proj.weight": 3 * (sum_of_codes := counted(model, found))}
    assert shares(found, large) == {"ignored by '*.down_proj'": 0.75, CODES: 0.25}
    assert sum_of_codes > 0


def counted(model: torch.nn.Module, found: dict[str, str]) -> int:
    return sum(count for name, count in sizes(model).items() if found[name] == CODES)


def test_a_row_below_half_is_not_partly() -> None:
    assert verdict({CODES: 1.0}) == {"result": "works", "share": 1.0}
    dense = [{"why": "outside the blocks", "share": 0.4}]
    assert verdict({CODES: 0.6, "outside the blocks": 0.4}) == {"result": "partly", "share": 0.6, "dense": dense}
    assert verdict({"outside the blocks": 1 - 0.9 * MOST, CODES: 0.9 * MOST})["result"] == "little"
    assert verdict({"outside the blocks": 1.0})["result"] == "little"


def test_a_line_that_announces_the_next_brings_it_along() -> None:
    said = "Class validation error for validator 'validate_architecture':\n    ValueError: heads must divide\n more"
    assert first_line(ValueError(said)).endswith("'validate_architecture': ValueError: heads must divide")
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(ValueError("alone:")) == "alone:"
    assert first_line(ValueError()) == "ValueError"
