"""Experts whose weights lie in one parameter are layers like others, found by the products with them."""

import pytest
import torch
import transformers
from experts import INNER, WIDTH, Experts, Grouped, Separate, Transposed, Unbound, routed, shown
from models import GATED, tokens
from torch import nn

import compress
from compress.base.errors import CompressError, InputError
from compress.engine.walk.block import ELSEWHERE
from compress.engine.walk.products import Products
from compress.engine.walk.sites import structure_of
from compress.model.calls import Call
from compress.model.layers import Layer, layers_of
from compress.model.untreated_layers import UNASKED_EXPERTS

GPTQ = compress.GPTQ(group_size=8, drift=0.0)
PASSES = {
    "rtn": compress.RTN(group_size=8),
    "gptq": GPTQ,
    "awq": compress.AWQ(group_size=8),
    "2:4 before gptq": [compress.Wanda(pattern="2:4"), GPTQ],
    "sparsegpt": compress.SparseGPT(pattern="2:4", drift=0.0),
}
NEVER = {f"blocks.{i}.experts.{key}.3" for i in range(2) for key in ("up", "down")}


def quantized(kind, passes, batches=None, **options):
    model = routed(kind)
    if kind is not Separate:
        options["experts"] = True
    return model, compress.quantize(model, passes, calibration=batches or shown(), **options).record


def weights(model):
    """{layer: [N, K]}; of a parameter with an index each expert's."""
    found = {layer.name: layer.weight for name, block in model.blocks.named_children() for layer in layers(block, name)}
    assert len(found) == 20
    return found


def layers(block, name):
    return layers_of(block, f"blocks.{name}", experts=True)


@pytest.mark.parametrize("name", PASSES)
def test_experts_in_one_parameter_become_what_they_do_as_modules_bit_for_bit(name):
    apart, expected = quantized(Separate, PASSES[name])
    fused, record = quantized(Experts, PASSES[name])
    assert [r.name for r in record.layers] == [r.name for r in expected.layers]
    assert [r.figures.get("tokens") for r in record.layers] == [r.figures.get("tokens") for r in expected.layers]
    other = weights(apart)
    for layer, weight in weights(fused).items():
        assert torch.equal(weight, other[layer]), layer
    # What no token reaches: nothing is known to round it by.
    reasons = dict.fromkeys(NEVER, "no calibration token reached it")
    assert record.left_alone == ({} if name == "rtn" else reasons)
    before, changed = weights(routed(Experts)), weights(fused)
    same = {layer for layer, weight in before.items() if torch.equal(weight, changed[layer])}
    assert same == (set() if name == "rtn" else NEVER)


@pytest.mark.parametrize("kind", [Transposed, Unbound, Grouped])
@pytest.mark.parametrize("name", ["rtn", "gptq"])
def test_however_the_products_are_made_each_expert_sees_its_own_tokens(kind, name):
    apart, expected = quantized(Separate, PASSES[name])
    fused, record = quantized(kind, PASSES[name])
    figures = {r.name: r.figures for r in record.layers}
    for layer in expected.layers:
        assert figures[layer.name].get("tokens") == layer.figures.get("tokens")
    other = weights(apart)
    for layer, weight in weights(fused).items():
        # Sums in another order let a few weights fall on the other side of a code.
        assert (weight != other[layer]).float().mean() < 0.15, layer
    if kind is Grouped and name == "gptq":
        assert [r.name.rpartition("experts.")[2] for r in record.layers[1:7]] == [
            *(f"up.{i}" for i in range(3)),
            *(f"down.{i}" for i in range(3)),
        ]


def test_drift_is_corrected_where_the_original_routes_as_the_compressed_model_does():
    """The first block's experts are chosen by what comes in, which is the same for both."""
    models = []
    for kind in (Experts, Separate):
        torch.manual_seed(0)
        models.append(routed(kind, blocks=1))
        options = {} if kind is Separate else {"experts": True}
        compress.quantize(models[-1], compress.GPTQ(scheme="w2a16", group_size=8), calibration=shown(), **options)
    mine, other = ({n: p.clone() for n, p in m.named_parameters()} for m in models)
    for key in ("up", "down"):
        for i, weight in enumerate(mine[f"blocks.0.experts.{key}"]):
            assert torch.equal(weight, other[f"blocks.0.experts.{key}.{i}.weight"])
    _, record = quantized(Experts, compress.GPTQ(scheme="w2a16", group_size=8))  # the second block's see other tokens
    assert ELSEWHERE in record.notes
    assert any("elsewhere" in layer.figures for layer in record.layers)
    assert all(layer.figures["loss"] <= layer.figures["rtn_loss"] for layer in record.layers)


def test_an_expert_that_only_a_later_micro_batch_reaches_is_calibrated():
    first, *others = shown()
    few = {"x": first["x"].clone()}
    few["x"][..., :2] = -1  # every token to expert 0
    _, record = quantized(Experts, GPTQ, [few, *others])
    assert {r.name for r in record.layers if "blocks.0.experts" in r.name} == {
        f"blocks.0.experts.{key}.{i}" for key in ("up", "down") for i in range(3)
    }
    assert set(record.left_alone) == NEVER


def test_experts_in_a_parameter_wait_to_be_asked_for_and_have_no_format_on_disk(tmp_path):
    model = routed(Experts)
    before = {name: p.clone() for name, p in model.named_parameters()}
    record = compress.quantize(model, GPTQ, calibration=shown()).record
    why = UNASKED_EXPERTS
    assert record.left_alone == {f"blocks.{i}.experts.{key}": why for i in range(2) for key in ("up", "down")}
    assert record.coverage.rest["fused experts"] == 2 * 4 * 2 * WIDTH * INNER
    for name, parameter in model.named_parameters():
        if "experts" in name:
            assert torch.equal(parameter, before[name])
    with pytest.raises(InputError, match=r"blocks\.0\.experts\.up\.0 is one of several experts .*split_experts"):
        compress.quantize(routed(Experts), GPTQ, calibration=shown(), experts=True, output=tmp_path / "out")


def test_patterns_name_single_experts_and_coverage_counts_them():
    model = routed(Experts)
    before = weights(model)
    p = compress.only(compress.RTN(group_size=8), "*.experts.*")
    record = compress.quantize(model, p, experts=True, ignore=["*.up.2"]).record
    assert {name for name in record.left_alone if "experts" in name} == {f"blocks.{i}.experts.up.2" for i in range(2)}
    each = WIDTH * INNER
    assert record.coverage.compressed_parameters == 2 * 7 * each
    assert record.coverage.rest["ignored by '*.up.2'"] == 2 * each
    changed = weights(model)
    for layer, weight in changed.items():
        assert torch.equal(weight, before[layer]) == ("experts" not in layer or layer.endswith("up.2"))


@pytest.mark.parametrize("p", [compress.RTN(scheme="w8a8"), compress.Train(steps=1), compress.Reconstruct(steps=1)])
def test_what_needs_a_module_of_its_own_is_refused(p):
    passes = [p] if isinstance(p, compress.RTN) else [compress.RTN(group_size=8), p]
    with pytest.raises(InputError, match="multiplied inside a Experts"):
        compress.quantize(routed(Experts), passes, calibration=shown(), experts=True)


def test_weights_stored_the_other_way_round_are_told():
    model = routed(Transposed)
    for block in model.blocks:
        block.experts.is_transposed = False
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(CompressError, match=r"multiplied as \[inputs, outputs\] and was taken for \[outputs, inputs\]"):
        compress.quantize(model, GPTQ, calibration=shown(), experts=True)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_failure_in_the_middle_of_a_parameter_leaves_the_model_as_it_was(monkeypatch):
    seen = []

    def fail(self, site):
        seen.extend(site.weights)
        if "blocks.1.experts.down.1" in site.weights:
            raise CompressError("stop here")
        return decided(self, site)

    decided = compress.RTN.apply
    monkeypatch.setattr(compress.RTN, "apply", fail)
    model = routed(Experts)
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(CompressError, match="stop here"):
        compress.quantize(model, compress.RTN(group_size=8), experts=True)
    assert "blocks.1.experts.down.0" in seen
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


class ByGate(nn.Module):
    """A recurrent layer, whose gates are parameters of other names."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.randn(12, 8))
        self.weight_hh_l0 = nn.Parameter(torch.randn(12, 12))

    def forward(self, x):
        return nn.functional.linear(x, self.weight_ih_l0) @ self.weight_hh_l0.t()


def test_parameters_of_any_name_are_layers():
    block = ByGate()
    gates = [Layer(key, block, key) for key in ("weight_ih_l0", "weight_hh_l0")]
    assert [gate.shape for gate in gates] == [(12, 8), (12, 12)]
    assert not any(gate.has_format or gate.transposed for gate in gates)
    seen = []
    with torch.no_grad(), Products(gates, lambda layer, x: seen.append((layer.name, tuple(x.shape)))):
        block(torch.randn(2, 5, 8))
    assert seen == [("weight_ih_l0", (2, 5, 8)), ("weight_hh_l0", (2, 5, 12))]
    found = structure_of(block, [Call((torch.randn(2, 5, 8),), {}, 0, None)], gates)
    assert found.sites == (("weight_ih_l0",), ("weight_hh_l0",))


@pytest.mark.parametrize("batched", [False, True])
def test_a_product_of_all_experts_at_once_gives_each_its_rows(batched):
    module = nn.Module()
    module.w = nn.Parameter(torch.randn(3, 8, 4))
    experts = [Layer(f"w.{i}", module, "w", i) for i in range(3)]
    x = torch.randn(3, 5, 4)
    seen = {}
    with torch.no_grad(), Products(experts, lambda layer, rows: seen.update({layer.index: rows})):
        torch.bmm(x, module.w.mT) if batched else torch.matmul(x[0], module.w.mT)
    assert all(torch.equal(rows, x[i] if batched else x[0]) for i, rows in seen.items())
    assert len(seen) == 3


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_experts_of_transformers_are_calibrated_one_by_one(implementation):
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**GATED, num_local_experts=4, num_experts_per_tok=2)
    model = transformers.MixtralForCausalLM(config).eval()
    model.set_experts_implementation(implementation)
    record = compress.quantize(model, GPTQ, calibration=tokens(), experts=True).record
    names = [r.name for r in record.layers if ".experts." in r.name]
    assert len(names) + sum(".experts." in name for name in record.left_alone) == config.num_hidden_layers * 4 * 2
    shares = [r.figures["tokens"] for r in record.layers if "layers.0.mlp.experts.gate_up_proj" in r.name]
    assert sum(shares) == 2 * tokens().numel()
    pruned = transformers.MixtralForCausalLM(config).eval()
    compress.quantize(pruned, compress.Taylor(pattern="2:4"), calibration=tokens(), experts=True)
    for expert in pruned.model.layers[0].mlp.experts.down_proj:
        assert (expert.unflatten(-1, (-1, 4)) == 0).sum(-1).eq(2).all()
