"""Mixtures of experts of transformers: taken apart, compressed from the tokens that are routed to them, loaded."""

import json
import re
from collections.abc import Collection

import pytest
import torch
from commands import DRIFT_GPTQ, command
from mixtures import FAMILIES, made, tokens
from safetensors.torch import load_file

import compress
from compress.model.experts import Calibration, Experts, calibrating
from compress.model.layers import is_linear
from compress.model.split_experts import split_experts

CODED = re.compile(r"\.(weight_packed|weight_scale|weight_shape)$")
# One parameter of all experts, as it is called on the hub.
JOINED = re.compile(r"(\.input_linear\.weight|\.output_linear\.weight|\.experts\.\w+)$")
ONE = re.compile(r"\.experts\.\d+\.\w+\.(weight|bias)$")


def check_names(stored: Collection[str], given: Collection[str]) -> None:
    """Compare the names of tensors of a compressed model with those that it came with. Where all experts lay in one
    parameter, they are numbered."""
    names = {CODED.sub(".weight", name) for name in stored}
    joined = {name for name in given if JOINED.search(name)}
    numbered = {name for name in names if ONE.search(name)}
    assert names - numbered == {name for name in given if not ONE.search(name)} - joined
    assert numbered if joined else numbered == {name for name in given if ONE.search(name)}


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_of_a_family_are_decided_stored_and_loaded(family, tmp_path):
    model, x = made(family), tokens(2)
    model.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        expected = model(x).logits
        apart = split_experts(model)
        assert torch.allclose(model(x).logits, expected, atol=1e-5)
        # What statistics see besides changes no output; nor does the routing that the other model has.
        seen = Calibration()
        with calibrating(seen):
            assert torch.allclose(model(x).logits, expected, atol=1e-5)
        with calibrating(Calibration({m: (r + 1) % 4 for m, r in seen.routes.items()}, reference=True)):
            assert torch.allclose(model(x).logits, expected, atol=1e-5)
    _, _, last, layers = FAMILIES[family]
    gptq = compress.GPTQ(scheme="w4a16", group_size=16, **DRIFT_GPTQ)
    out = tmp_path / "out"
    made_of = compress.quantize(tmp_path / "model", gptq, calibration=tokens(), output=out, batch_size=2, verify=False)
    assert len(made_of.record.layers) == layers
    assert not [name for name, why in made_of.record.left_alone.items() if "expert" in name and "gate" not in why]
    stored, given = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "model"))
    check_names(stored, given)
    assert any(name.endswith(f"{apart[-1].rpartition('.')[2]}.3.{last}.weight_packed") for name in stored)
    # Plain values have the names and the layout that the model came with.
    assert command("export", out, "--to", "dense", "--output", tmp_path / "dense").code == 0
    plain = load_file(tmp_path / "dense" / "model.safetensors")
    assert {name: value.shape for name, value in plain.items()} == {name: value.shape for name, value in given.items()}
    with torch.no_grad():
        packed, dense = (compress.load(out, dequantize=dequantize)(x).logits for dequantize in (False, True))
    assert torch.allclose(packed, dense, atol=1e-4)
    assert 0 < float((dense - expected).abs().mean()) < 0.5 * float(expected.abs().mean())


def test_an_expert_that_no_token_reaches_is_decided_by_tokens_of_the_others(tmp_path):
    model = made("mixtral")
    for block in model.model.layers:
        block.mlp.gate.weight.data[3] = 0
        block.mlp.gate.weight.data[:3] = block.mlp.gate.weight.data[:3].abs()
    model.model.embed_tokens.weight.data.abs_()
    model.save_pretrained(tmp_path / "model")
    torch.save(tokens(), tmp_path / "tokens.pt")
    words = ["--method", "gptq", "--group-size", 16, "--calibration", tmp_path / "tokens.pt", "--output"]
    ran = command("quantize", tmp_path / "model", *words, tmp_path / "out")
    assert ran.code == 0, ran.err
    assert "experts got no token" in ran.out
    losses = compress.quantize(
        tmp_path / "model", compress.GPTQ(scheme="w4a16", group_size=16), calibration=tokens(), verify=False
    ).record.layers
    never = [layer for layer in losses if layer.figures.get("routed_tokens") == 0]
    assert never
    assert all(layer.figures["loss"] <= layer.figures["rtn_loss"] for layer in never)


def test_the_original_is_shown_the_tokens_that_the_compressed_model_routes_to_an_expert():
    torch.manual_seed(0)
    model = made("qwen3-moe")
    name = split_experts(model)[0]
    experts = model.get_submodule(name)
    assert isinstance(experts, Experts)
    x, weights = torch.randn(24, 32), torch.full((24, 2), 0.5)
    here, elsewhere = torch.tensor([[0, 1], [2, 3]]).repeat(12, 1), torch.tensor([[0, 3], [1, 2]]).repeat(12, 1)
    rows: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    routes: dict[torch.nn.Module, torch.Tensor] = {}
    for reference, index in ((False, here), (True, elsewhere)):
        calibration = Calibration(routes, reference)

        def note(_module, args, reference=reference, calibration=calibration):
            rows[reference].append(args[0][: len(calibration.weight_M)].clone())

        hook = experts.get_submodule("2.gate_proj").register_forward_pre_hook(note)
        with torch.no_grad(), calibrating(calibration):
            experts(x, index, weights)
        hook.remove()
    (own,), (other,) = rows.values()
    assert torch.equal(own, other)
    assert {tuple(row.tolist()) for row in x[1::2]} <= {tuple(row.tolist()) for row in own}


class Product(torch.nn.Linear):
    """A linear layer in other words."""

    def forward(self, x):
        return x @ self.weight.T + self.bias


class Scores(torch.nn.Linear):
    """A router."""

    def forward(self, x):
        return super().forward(x).softmax(-1), self.weight


class Doubled(torch.nn.Linear):
    """More than a product."""

    def forward(self, x):
        return 2 * super().forward(x)


def test_a_subclass_is_a_linear_layer_if_it_computes_the_product_and_no_more():
    found = {kind: is_linear(kind(8, 4)) for kind in (torch.nn.Linear, Product, Scores, Doubled)}
    assert found == {torch.nn.Linear: True, Product: True, Scores: False, Doubled: False}


def test_a_configuration_may_name_many_layers_by_their_places(tmp_path):
    model = made("llama4")
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config["moe_layers"] = [*range(100)]
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert compress.load(tmp_path).config.moe_layers == [*range(100)]
