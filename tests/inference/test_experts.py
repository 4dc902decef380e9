"""Experts of loaded mixtures multiply together: the same outputs as one by one, and one by one where they cannot."""

import copy
import json
import pickle

import pytest
import torch
from combinations import each
from commands import command
from mixtures import FAMILIES, made, tokens

import compress
from compress.inference.check.dense_twin import compare_layers
from compress.inference.layers.experts import ExpertStack, StackedExperts
from compress.inference.layers.linear import PackedLinear
from compress.kernels.cpu import direct
from compress.model.experts import SortedExperts
from compress.passes.protocol.base import but, only

# Settings of RTN, by what their layers are. Rows of tiny experts have one scale.
SCHEMES = {
    "w4a16": {"scheme": "w4a16", "group_size": -1},
    "w4a16 asymmetric": {"scheme": "w4a16", "group_size": -1, "grid": "asymmetric"},
    "w8a16": {"scheme": "w8a16", "group_size": -1},
    "w2a16": {"scheme": "w2a16", "group_size": -1},
    "w8a8": {"scheme": "w8a8"},
    "w4a8": {"scheme": "w4a8", "group_size": -1},
    "mxfp4a16": {"scheme": "mxfp4a16"},
}


@pytest.fixture(scope="module", autouse=True)
def operator():
    if direct.why_not():
        pytest.skip("; ".join(direct.why_not()))


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """(family, name of a scheme, settings of its model) -> a checkpoint."""
    made_of = {}

    def find(family="qwen3-moe", scheme="w4a16", dtype=torch.float32, **settings):
        key = (family, scheme, dtype, *settings.items())
        if key not in made_of:
            folder = tmp_path_factory.mktemp("mixture")
            made(family, **settings).to(dtype).save_pretrained(folder / "model")
            compress.quantize(folder / "model", compress.RTN(**SCHEMES[scheme]), output=folder / "out", verify=False)
            made_of[key] = folder / "out"
        return made_of[key]

    return find


def mixtures(model):
    return [module for module in model.modules() if isinstance(module, StackedExperts)]


def logits(model, x=None):
    with torch.no_grad():
        return model(tokens(2) if x is None else x).logits


@pytest.fixture
def calls(monkeypatch):
    """A list that grows with every product of a stack."""
    made_calls, call = [], ExpertStack.__call__
    monkeypatch.setattr(ExpertStack, "__call__", lambda self, *given: made_calls.append(self) or call(self, *given))
    return made_calls


@pytest.mark.parametrize(
    ("family", "scheme", "dtype"), each(list(FAMILIES), list(SCHEMES), [torch.float32, torch.bfloat16])
)
def test_together_they_return_what_they_do_one_by_one(family, scheme, dtype, quantized, calls):
    wide = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 96} if "mxfp" in scheme else {}
    out = quantized(family, scheme, dtype, **wide)
    model = compress.load(out)
    assert [experts.reasons for experts in mixtures(model)] == [[]] * len(mixtures(model)) != []
    close = 2e-5 if dtype == torch.float32 else 2e-2
    for experts in mixtures(model):
        for given in rows_for(experts, dtype):
            found, stacks = experts(*given), experts.stacks
            assert len(calls) == len(stacks) == 2
            calls.clear()
            experts.stacks = None
            expected = experts(*given)
            experts.stacks = stacks
            assert (found - expected).abs().max() <= close * expected.abs().max()
    if dtype == torch.float32 and "a8" not in scheme:
        dense = logits(compress.load(out, dequantize=True))
        assert (logits(model) - dense).abs().max() <= 1e-4 * dense.abs().max()


def rows_for(experts, dtype):
    """Arguments of experts: few and many tokens, some of no expert."""
    columns, count = experts.get_submodule("0").get_submodule(experts.leaves[0]).in_features, len(experts.numbers)
    g = torch.Generator().manual_seed(0)
    for tokens_there in (1, 30):
        rows = torch.randn(tokens_there * (count if isinstance(experts, SortedExperts) else 1), columns, generator=g)
        if isinstance(experts, SortedExperts):
            yield (rows.to(dtype),)
        else:
            index = torch.randint(count + (tokens_there > 1), (tokens_there, 2), generator=g)
            yield rows.to(dtype), index, torch.rand(tokens_there, 2, generator=g).to(dtype)


def test_layers_stay_what_they_are(quantized, tmp_path):
    out = quantized()
    model = compress.load(out)
    expected = logits(model)
    stored = {name: value.clone() for name, value in model.state_dict().items()}
    plain = compress.load(out, dequantize=True)
    for experts in mixtures(model):
        layer = experts.get_submodule("2.down_proj")
        assert isinstance(layer, PackedLinear)
        assert layer.words.data_ptr() == experts.stacks[-1].held["words"][2].data_ptr()
    # Other codes are taken up, copies and pickles have their own, and a dtype goes through all.
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(other), expected)
        assert all(stack.is_whole() for experts in mixtures(other) for stack in experts.stacks)
        mixtures(other)[0].stacks[-1].held["scale"].zero_()
        assert not torch.equal(logits(other), expected)
    assert torch.equal(logits(model), expected)
    changed = {name: value * 2 if "experts" in name and "scale" in name else value for name, value in stored.items()}
    model.load_state_dict(changed)
    assert all(stack.is_whole() for experts in mixtures(model) for stack in experts.stacks)
    assert not torch.allclose(logits(model), expected)
    model.load_state_dict(stored)
    assert torch.equal(logits(model), expected)
    assert all(torch.equal(value, stored[name]) for name, value in model.state_dict().items())
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(compress.load(tmp_path)), expected)
    again = compress.load(out)
    again.dequantize()
    assert not again.model.layers[0].mlp.experts._together(torch.zeros(1, 32))
    assert torch.equal(logits(again), logits(plain))
    model.bfloat16()
    assert all(stack.is_whole() for experts in mixtures(model) for stack in experts.stacks)
    assert logits(model).isfinite().all()


def test_what_is_asked_of_a_layer_is_done_one_by_one(quantized, calls):
    model = compress.load(quantized())
    expected = logits(model)
    calls.clear()
    # A hook.
    seen = []
    experts = mixtures(model)[0]
    hook = experts.get_submodule("1.up_proj").register_forward_hook(lambda *_: seen.append(1))
    assert torch.allclose(logits(model), expected, atol=1e-5)
    assert seen
    assert len(calls) == 2
    hook.remove()
    # The twin of every layer.
    calls.clear()
    with compare_layers(model) as worst:
        logits(model)
    assert sum("experts" in name for name in worst) > 0.5 * 2 * 3 * 4
    assert max(worst.values()) <= 1
    assert not calls
    # A gradient of the input.
    embedded = model.get_input_embeddings()(tokens(2)).detach().requires_grad_()
    model(inputs_embeds=embedded).logits.sum().backward()
    assert embedded.grad.abs().sum() > 0
    assert not calls
    # Another module in place of a layer.
    model.set_submodule("model.layers.0.mlp.experts.1.up_proj", torch.nn.Linear(32, 16, bias=False))
    assert not torch.allclose(logits(model), expected, atol=1e-5)
    assert len(calls) == 2


def test_options_of_load(quantized, calls):
    out = quantized()
    expected = logits(compress.load(out))
    calls.clear()
    invariant = compress.load(out, batch_invariant=True)
    assert torch.allclose(logits(invariant), expected, atol=1e-5)
    assert not calls
    assert "batch_invariant" in mixtures(invariant)[0].reasons[0]
    fused = compress.load(out, fuse=True)
    assert torch.allclose(logits(fused), expected, atol=1e-5)
    assert len(calls) == 2 * 2
    rounded = compress.load(out, int8_activations=True)
    assert all(stack.layer.input_group is not None for stack in mixtures(rounded)[0].stacks)
    assert 0 < (logits(rounded) - expected).abs().max() < 0.2 * expected.abs().max()


def test_a_graph_holds_a_product_of_all_experts_as_one_node(quantized):
    model = compress.load(quantized())
    experts = mixtures(model)[0]
    x, index, weights = torch.randn(3, 32), torch.tensor([[0, 2], [1, 4], [3, 3]]), torch.rand(3, 2)
    expected = experts(x, index, weights)
    nodes = []

    def look(graph, _):
        nodes.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        found = torch.compile(experts, backend=look, fullgraph=True)(x, index, weights)
    assert torch.equal(found, expected)
    assert nodes.count("compress.cpu_experts.default") == 2


def kernels_of(out):
    """{layer: (its kernel for 8 tokens, reasons)}, as `compress inspect` reports them."""
    shown = command("inspect", out, "--kernels", "--json", "-")
    assert shown.code == 0, shown.err
    return {row["name"]: (row["kernels"]["8"], "; ".join(row["why_not"])) for row in json.loads(shown.out)["layers"]}


def test_inspect_names_the_kernel_of_experts_and_the_reason_against_it(quantized, tmp_path):
    kernels = kernels_of(quantized("mixtral"))
    grouped = [kernel for name, (kernel, _) in kernels.items() if "experts" in name]
    assert len(grouped) == 2 * 3 * 4
    assert all(kernel.endswith(", all experts") for kernel in grouped)
    assert not any("experts" in kernel for name, (kernel, _) in kernels.items() if "experts" not in name)
    made("qwen3-moe").save_pretrained(tmp_path / "model")
    eight = "*.1.mlp.experts.0.*"
    compress.quantize(
        tmp_path / "model",
        [only(compress.RTN(scheme="w8a16", group_size=-1), eight), but(compress.RTN(group_size=16), eight)],
        output=tmp_path / "out",
        verify=False,
    )
    kernels = kernels_of(tmp_path / "out")
    kernel, why = kernels["model.layers.0.mlp.experts.3.down_proj"]
    assert kernel.endswith(", one by one")
    assert "experts one by one: group size 16; allowed: multiples of 32" in why
    assert "experts one by one: their schemes differ" in kernels["model.layers.1.mlp.experts.2.up_proj"][1]
    loaded = mixtures(compress.load(tmp_path / "out"))
    assert ["group size 16" in loaded[0].reasons[0], "schemes differ" in loaded[1].reasons[0]] == [True, True]
