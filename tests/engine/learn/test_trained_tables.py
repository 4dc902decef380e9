"""Embeddings that are trained in their codes: what is written is what the last forward looked up and multiplied."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from combinations import every
from models import GATED, SIZES, tokens
from torch import nn

import compress
from compress.model.layers import Layer, token_tables
from compress.train.rounding.swapped_layers import attach, computed_weight, detach
from compress.weights.decision import Decision
from compress.weights.grid import Grid, quantize

DATA = {"calibration": tokens(8), "batch_size": 4}
TABLES = compress.Embeddings(scheme="w4a16", group_size=16)
CODES = compress.RTN(scheme="w4a16", group_size=16)


def made(kind):
    torch.manual_seed(0)
    if kind == "masked":
        config = transformers.BertConfig(**SIZES, intermediate_size=64, max_position_embeddings=64)
        return transformers.BertForMaskedLM(config).eval()
    settings = {**GATED, "tie_word_embeddings": kind == "tied", "initializer_range": 0.1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).eval()


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=tokens(4, seed=9)).logits.float()


def stored(model):
    return computed_weight(model.get_input_embeddings()).detach()


@every("kind", ["tied", "untied", "masked"])
def test_a_loop_of_ones_own_trains_tables_in_their_codes(tmp_path_factory, kind):
    output = tmp_path_factory.mktemp("out") / "out"
    model = made(kind)
    start = stored(compress.quantize(made(kind), [TABLES, CODES]).model)
    prepared = compress.prepare_qat(model, [TABLES, CODES], **DATA)
    assert type(model.get_input_embeddings()).__name__ == "QATEmbedding"
    assert torch.equal(stored(model), start)
    names = [name for name, _ in model.named_parameters() if "embed" in name and name.endswith("log_factor")]
    assert len(names) == 1
    optimizer = torch.optim.AdamW(prepared.groups(1e-2, 1e-2))
    for seed in (20, 21, 22):
        ids = tokens(4, seed=seed)
        prepared.model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    seen, table = logits(model), stored(model)
    head = model.get_output_embeddings()
    assert torch.equal(computed_weight(head).detach(), table) == (kind != "untied")
    assert not torch.equal(table, start)
    result = prepared.convert(output, verify=False)
    assert type(model.get_input_embeddings()) is nn.Embedding
    assert type(head) is nn.Linear
    assert torch.equal(logits(model), seen)
    loaded = compress.load(output, dequantize=True)
    assert torch.equal(stored(loaded), table)
    assert torch.equal(logits(loaded), seen)
    methods = {layer.name: layer.method for layer in result.record.layers}
    assert sum("embed" in name for name in methods) == 1


@every("passes", [[TABLES, CODES], [TABLES]])
def test_a_step_of_a_recipe_trains_tables_in_their_codes(tmp_path_factory, passes):
    """Alone, too: codes of the embedding are all there is. Beside codes of layers: less is lost than before."""
    output = tmp_path_factory.mktemp("out") / "out"
    passes = [replace(each, scheme="w2a16") for each in passes]
    training = compress.Train(steps=12, rows=8, learning_rate=5e-4, held_out=0.25)
    result = compress.quantize(made("tied"), [*passes, training], output=output, verify=False, calibration=tokens(48))
    history = [json.loads(line) for line in (output / "training.jsonl").read_text().splitlines()]
    before, *_, after = (line["held_out"]["logits"] for line in history if "held_out" in line)
    assert after > 0
    assert len(passes) == 1 or after < before
    loaded = compress.load(output, dequantize=True)
    assert torch.equal(stored(loaded), stored(result.model))
    assert torch.equal(logits(loaded), logits(result.model))
    assert not torch.equal(stored(loaded), stored(compress.quantize(made("tied"), passes[0]).model))


@pytest.mark.parametrize("scales", ["learned", "fitted"])
def test_gradients_are_those_of_the_paper(scales):
    """Of what is looked up twice both, of padding none; of scales LSQ's (`train.rounding.straight_through`), by loops
    over elements."""
    torch.manual_seed(0)
    table = nn.Embedding(7, 8, padding_idx=2, dtype=torch.float64)
    weight = table.weight.detach().clone()
    weight[4, 0] *= 4
    decided = quantize(
        weight / 2, Grid(bits=3, granularity="group", group_size=4)
    )  # too narrow a grid: some are clipped
    table.weight.data = weight.clone()
    attach(Layer("table", table), Decision(decided), scales)
    ids = torch.tensor([[1, 4, 4], [2, 0, 4]])
    given = torch.randn(2, 3, 8, dtype=torch.float64)
    (table(ids) * given).sum().backward()
    latent, quantizer = table._parameters["weight"], table.weight_quantizer
    scale, zero = (t.detach() for t in quantizer.scale_and_zero(weight))
    expected, of_scale = torch.zeros_like(weight), torch.zeros_like(scale)
    grid = decided.grid
    for b in range(2):
        for t in range(3):
            row = int(ids[b, t])
            for k in range(8 if row != 2 else 0):
                s = float(scale[row, k // 4])
                v = float(weight[row, k]) / s + float(zero[row, k // 4])
                inside = grid.qmin - 0.5 <= v <= grid.qmax + 0.5
                g = float(given[b, t, k])
                expected[row, k] += g if inside else 0.0
                code = min(max(round(v), grid.qmin), grid.qmax) - float(zero[row, k // 4])
                of_scale[row, k // 4] += g * (code - (v - float(zero[row, k // 4]) if inside else 0.0)) * s
    torch.testing.assert_close(latent.grad, expected)
    if scales == "learned":
        torch.testing.assert_close(quantizer.log_factor.grad, of_scale, rtol=1e-5, atol=1e-8)


def test_a_tied_head_rounds_by_the_same_quantizer_and_is_itself_again():
    model = made("tied")
    keys = set(model.state_dict())
    (table,) = token_tables(model)
    attach(table, Decision(quantize(table.weight.clone(), Grid(bits=3, granularity="group", group_size=16))), "learned")
    model(input_ids=tokens(2), labels=tokens(2)).loss.backward()
    quantizer = model.get_input_embeddings().weight_quantizer
    assert quantizer.log_factor.grad.abs().sum() > 0
    with torch.no_grad():
        quantizer.log_factor += 0.5
    assert torch.equal(computed_weight(model.lm_head), stored(model))
    assert {key for key in model.state_dict() if "lm_head.weight_quantizer" in key} == set()
    for module in (model.lm_head, table.module):
        detach(module)
    assert set(model.state_dict()) == keys
    assert model.lm_head.weight is model.get_input_embeddings().weight
