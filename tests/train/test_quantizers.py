"""Layers that round while they are trained: what they see is what is stored, and they stay the modules they were."""

import copy

import pytest
import torch
from combinations import every
from torch import nn
from transformers.pytorch_utils import Conv1D

from compress.base.errors import InputError
from compress.kernels.layouts.k_quants import K_QUANTS
from compress.model.layers import Layer
from compress.solvers.k_quants.solve import nearest_blocks
from compress.solvers.trellis.solve import nearest_states
from compress.train.rounding.latents import places_of, start_weight
from compress.train.rounding.swapped_layers import PARTS, attach, decision_after, detach, quantizers_of, scales_in
from compress.weights.decision import Decision
from compress.weights.formats.dense import dense
from compress.weights.formats.k_quants import KQuant
from compress.weights.formats.levels import LEVEL_FORMATS
from compress.weights.formats.trellis import TrellisCodes
from compress.weights.grid import Grid, quantize
from compress.weights.matrix import Weight
from compress.weights.rounding import ActivationCodes

GROUPED = {"granularity": "group", "group_size": 9}
GRIDS = [
    Grid(bits=2, signed_scale=True, **GROUPED),
    Grid(bits=4, symmetric=False, **GROUPED),
    Grid(bits=3, granularity="channel"),
    Grid(bits=8, granularity="tensor"),
    Grid(bits=8, granularity="channel", type="float"),
    Grid(bits=8, granularity="block", block=(4, 8), type="float"),
    Grid(bits=1, type="sign", **GROUPED),
]
STATIC = ActivationCodes(
    Grid(bits=4, symmetric=False, granularity="tensor"), torch.tensor([[0.3]]), torch.tensor([[-2]], dtype=torch.int8)
)
DYNAMIC = ActivationCodes(Grid(bits=4, granularity="token"))


def layers() -> list[nn.Module]:
    """One of each kind, of 18 inputs (the convolution: 2 channels, 3 x 3) and 6 outputs."""
    torch.manual_seed(0)
    made = [nn.Linear(18, 6), Conv1D(6, 18), nn.Conv2d(2, 6, 3), nn.Conv2d(4, 6, 3, groups=2, bias=False)]
    for module in made:
        nn.init.normal_(module.weight)
    return made


def inputs(module: nn.Module) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(2, module.in_channels, 5, 5) if isinstance(module, nn.Conv2d) else torch.randn(4, 18)


@every(
    ["grid", "dtype", "scales"],
    [(g, d, s) for g in GRIDS for d in (torch.float32, torch.bfloat16) for s in ("learned", "anchored", "fitted")],
)
def test_what_training_sees_is_what_is_stored(grid, dtype, scales):
    for module in layers():
        layer = Layer("layer", module)
        kept = torch.rand(layer.shape) < 0.7 if not grid.signs else None
        start = layer.weight if kept is None else layer.weight * kept
        decision = Decision(quantize(start, grid, dtype), kept=kept)
        attach(layer, decision, scales)
        with torch.no_grad():  # as training would leave it
            for p in module.parameters():
                p += 0.05 * torch.randn_like(p)
        seen = module.rounded_weight
        made = decision_after(layer, layer.weight, decision, dtype)
        detach(module)
        assert torch.equal(layer.stored(made.weight.dequantize().float()), seen)
        assert made.weight.scale.dtype == dtype
        if kept is not None:
            assert not made.weight.dequantize()[~kept].any()
            assert torch.equal(made.kept, kept)


@every("codes", [STATIC, DYNAMIC])
def test_inputs_and_outputs_are_rounded_as_they_are_stored(codes):
    for module in layers():
        layer, x = Layer("layer", module), inputs(module)
        plain = copy.deepcopy(module)
        decision = Decision(quantize(layer.weight, Grid(bits=4)), inputs=codes, outputs=STATIC)
        attach(layer, decision, "learned")
        if codes is STATIC:
            with torch.no_grad():
                module.input_quantizer.log_factor += 0.1
                module.input_quantizer.zero_point += 1.6
        y = module(x)
        made = decision_after(layer, layer.weight, decision, torch.float32)
        detach(module)
        plain.weight.data = layer.stored(made.weight.dequantize())
        given = x
        if codes is STATIC:
            assert made.inputs.zero_point.item() == 0
            given = made.inputs.fake_quantize(x)
        elif isinstance(module, nn.Conv2d):
            given = made.inputs.fake_quantize(x.flatten(1)).reshape(x.shape)
        else:
            given = made.inputs.fake_quantize(x)
        assert torch.equal(y, made.outputs.fake_quantize(plain(given)))


def test_a_layer_stays_the_module_that_it_was():
    model = nn.Sequential(nn.Linear(18, 6), nn.ReLU())
    module, weight, before = model[0], model[0].weight, dict(model.state_dict())
    attach(Layer("0", module), Decision(quantize(weight.data, GRIDS[0])), "learned")
    assert model[0] is module
    assert isinstance(module, nn.Linear)
    assert type(module).__name__ == "QATLinear"
    assert dict(model.named_parameters())["0.weight"] is weight
    assert set(before) <= set(model.state_dict())
    detach(module)
    assert type(module) is nn.Linear
    assert model.state_dict().keys() == before.keys()
    assert module.weight is weight
    assert not any(hasattr(module, part) for part in PARTS)


def test_pruned_weights_of_a_layer_without_codes_stay_zero_and_get_no_gradient():
    module = nn.Linear(18, 6)
    layer = Layer("layer", module)
    kept = torch.rand(6, 18) < 0.5
    decision = Decision(dense(layer.weight * kept), kept=kept)
    assert attach(layer, decision, "learned")
    module(torch.randn(3, 18)).sum().backward()
    gradient = module._parameters["weight"].grad
    assert not gradient[~kept].any()
    assert gradient[kept].all()
    made = decision_after(layer, layer.weight, decision, torch.float32)
    assert torch.equal(made.weight.dequantize(), layer.weight * kept)


def test_a_layer_that_nothing_is_to_be_rounded_of_stays_as_it_is():
    module = nn.Linear(18, 6)
    assert not attach(Layer("layer", module), Decision(dense(module.weight.data)), "learned")
    assert type(module) is nn.Linear


def test_of_a_trellis_scales_learn_and_codes_stay():
    torch.manual_seed(0)
    module = nn.Linear(32, 6, bias=False)
    codes = nearest_states(module.weight.data, TrellisCodes(bits=2, run=64), torch.bfloat16)
    layer, decision = Layer("layer", module), Decision(Weight((codes,)))
    attach(layer, decision, "learned")
    x = torch.randn(3, 32)
    assert torch.equal(module(x), x @ codes.dequantize().float().t())
    module(x).square().sum().backward()
    assert module._parameters["weight"].grad is None
    (factor,) = scales_in(quantizers_of([layer])).values()
    assert factor.grad.shape == (6, 1)
    assert factor.grad.all()
    with torch.no_grad():
        factor.add_(torch.randn(6, 1) / 10)
    (made,) = decision_after(layer, layer.weight, decision, torch.bfloat16).weight.terms
    assert torch.equal(module(x), x @ made.dequantize().float().t())
    assert torch.equal(made.states, codes.states)
    assert not torch.equal(made.scale, codes.scale)
    assert made.scale.dtype == torch.bfloat16


@every("kind", K_QUANTS)
def test_k_quants_keep_their_scales_and_train_their_codes(kind):
    torch.manual_seed(0)
    original = torch.randn(6, 512)
    original[:, 32:96] = 0  # groups whose scale is 0
    term = nearest_blocks(original + torch.randn(6, 512) * (original != 0), KQuant(type=kind))
    module, decision, x = nn.Linear(512, 6, bias=False), Decision(term), torch.randn(3, 512)
    places = places_of(decision, original)
    start = term.dequantize() if places is None else start_weight(decision, places, torch.float32)
    assert places is None or not torch.equal(start, term.dequantize())
    module.weight.data = start
    layer = Layer("layer", module)
    attach(layer, decision, "learned")
    assert torch.equal(module.rounded_weight, term.dequantize())
    module(x).square().sum().backward()
    assert module._parameters["weight"].grad.isfinite().all()
    assert module._parameters["weight"].grad.any()
    assert not scales_in(quantizers_of([layer]))
    with torch.no_grad():
        module._parameters["weight"].add_(torch.randn(6, 512))
    made = decision_after(layer, layer.weight, decision, torch.bfloat16).weight
    assert torch.equal(made.dequantize(), module.rounded_weight)
    assert torch.equal(made.steps(), term.steps())
    assert not torch.equal(made.blocks, term.blocks)
    with pytest.raises(InputError, match=f"scales of {kind} stay as they are"):
        module.weight_quantizer.fit(layer.weight)


def test_what_is_not_trained_is_refused_with_its_name():
    module = nn.Linear(18, 6)
    codes = quantize(module.weight.data, Grid(bits=4))
    with pytest.raises(InputError, match=r"mlp\.up is stored as .* \+ .*of which nothing is trained; quantize it"):
        attach(Layer("mlp.up", module), Decision(Weight((dense(module.weight.data), codes))), "learned")
    wide = nn.Linear(256, 6)
    kept = torch.ones(6, 256, dtype=torch.bool)
    decision = Decision(Weight((nearest_blocks(wide.weight.data, KQuant(type="q4_k")),)), kept=kept)
    with pytest.raises(InputError, match="stored as q4_k, in which zeros would not stay zero"):
        attach(Layer("mlp.up", wide), decision, "learned")


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by dynamo
def test_a_rounding_layer_compiles_in_one_graph():
    module = nn.Linear(18, 6)
    decision = Decision(quantize(module.weight.data, GRIDS[1]), inputs=DYNAMIC)
    attach(Layer("layer", module), decision, "learned")
    x = torch.randn(3, 18)
    expected = module(x)
    expected.sum().backward()
    gradients = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    found = torch.compile(module, backend="aot_eager", fullgraph=True)(x)
    found.sum().backward()
    torch.testing.assert_close(found, expected)
    for p, gradient in zip(module.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, gradient)


def test_a_group_of_zeros_of_scale_0_has_gradients_that_are_numbers() -> None:
    """IQ4_NL has no level 0, so the scale of such a group is 0."""
    module = nn.Linear(64, 4)
    module.weight.data[0, :32] = 0
    layer = Layer("layer", module)
    codes = quantize(layer.weight, LEVEL_FORMATS["iq4_nl"].on)
    assert attach(layer, Decision(codes), "anchored")
    module(torch.randn(3, 64)).square().sum().backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in module.parameters())
