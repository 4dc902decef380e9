"""What is measured of each layer, against the same computed by other means; and passes that share a forward."""

import copy

import pytest
import torch
from commands import DRIFT_GPTQ, fast_gptq, save
from models import strong, tokens
from sensitivities import measure_sensitivity
from torch.nn import functional

import compress
import compress.search.sensitivity as measuring
from compress.checkpoint.read.source import find_source
from compress.evaluation.cost.size import size_result
from compress.evaluation.document import SizeResult
from compress.passes.protocol.recipe import parse_recipe
from compress.search.budget import Budget, allocate
from compress.search.candidate import Candidate

CALIBRATION, HELD_OUT = tokens(24, 32), tokens(5, 32, seed=7)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPRESS_CACHE_DIR", str(tmp_path / "cache"))


def rounding(bits: int, **options: object) -> Candidate:
    return Candidate(f"w{bits}", (compress.RTN(scheme=f"w{bits}a16", group_size=16, **options),))


def log_probs(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return functional.log_softmax(model(input_ids=HELD_OUT).logits[:, :-1].double(), -1)


def divergence(model: torch.nn.Module, *passes: compress.Pass) -> float:
    """KL(model || the same quantized), nats per token, of a copy."""
    other = compress.quantize(copy.deepcopy(model), passes).model
    expected = log_probs(model)
    return float((expected.exp() * (expected - log_probs(other))).sum(-1).mean())


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
def test_a_uniform_model_costs_what_the_quantized_model_does(kind):
    model = strong(kind)
    found = measure_sensitivity(model, [rounding(3)], calibration=CALIBRATION, text=HELD_OUT)
    assert len(found.units) == 8
    assert found.uniform_kl["w3"] == pytest.approx(divergence(model, rounding(3).passes[0]), rel=1e-3)


def test_a_loss_is_that_of_the_outputs_of_the_original_model():
    model = strong()
    found = measure_sensitivity(model, [rounding(3)], calibration=CALIBRATION, text=HELD_OUT)
    other = compress.quantize(copy.deepcopy(model), rounding(3).passes[0]).model
    seen: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0]} if args else {}))
    with torch.no_grad():
        model(input_ids=CALIBRATION)
    for unit in found.units:
        losses, energies = 0.0, 0.0
        for layer in unit.layers:
            weight, new = (m.get_submodule(layer).weight.data.double() for m in (model, other))
            x = seen[layer].double().flatten(0, 1)
            losses += float((x @ (weight - new).T).square().sum(1).mean())
            energies += float((x @ weight.T).square().sum(1).mean())
        assert unit.tried["w3"].relative_loss == pytest.approx(losses / energies, rel=1e-4)


def tensor_bytes(size: SizeResult) -> int:
    """Of weight files without their headers."""
    return sum(part.bytes for part in size.components if part.name != "file headers")


def test_bytes_are_those_of_the_file(tmp_path):
    model = save(strong().half(), tmp_path / "model")
    candidates = [
        Candidate("w3", (fast_gptq(scheme="w3a16", group_size=32),)),
        Candidate("w4", (fast_gptq(scheme="w4a16", group_size=16, grid="asymmetric"),)),
        Candidate("ternary", (compress.Ternary(group_size=32),)),
    ]
    found = measure_sensitivity(str(model), candidates, calibration=CALIBRATION, text=HELD_OUT)
    rest = tensor_bytes(size_result(find_source(str(model)))) - 2 * found.weights  # of float16
    for share in (0.2, 0.5, 0.9):
        sizes = [[tried.bytes + tried.header_bytes for tried in unit.tried.values()] for unit in found.units]
        least, most = sum(map(min, sizes)), sum(map(max, sizes))
        made = allocate(found, Budget(bytes=round(least + share * (most - least)) + found.other_bytes))
        output = tmp_path / f"{share}"
        compress.quantize(model, parse_recipe(made.recipe, "it"), calibration=CALIBRATION, output=output, verify=False)
        size = compress.evaluate(output, text=HELD_OUT).size
        assert size.bits_per_weight == pytest.approx(made.bits_per_weight, rel=1e-12)
        assert tensor_bytes(size) == made.bytes + rest
        assert 0.9 * made.total_bytes < size.bytes <= made.total_bytes  # a small file is a third headers
    assert len(set(made.chosen.values())) > 1


def test_a_candidate_is_tried_where_it_suits():
    model = strong()
    wide = Candidate("g64", (compress.RTN(scheme="w4a16", group_size=64),))  # hidden 32, MLP 64
    found = measure_sensitivity(model, [rounding(3), wide], calibration=CALIBRATION, text=HELD_OUT)
    assert {unit.kind for unit in found.units if "g64" in unit.tried} == {"mlp.down_proj"}
    assert all("w3" in unit.tried for unit in found.units)
    alone = measure_sensitivity(model, [wide], calibration=CALIBRATION, text=HELD_OUT)
    assert {unit.kind for unit in alone.units} == {"mlp.down_proj"}
    assert alone.left_out["model.layers.0.self_attn.q_proj"] == "no candidate suits it"


def test_layers_that_read_one_tensor_are_one_unit():
    model = strong()
    how = {"calibration": CALIBRATION, "text": HELD_OUT}
    fused = measure_sensitivity(model, [rounding(3)], **how)
    kinds = [unit.kind for unit in fused.units[:4]]
    assert kinds == ["self_attn.q_proj+k_proj+v_proj", "self_attn.o_proj", "mlp.gate_proj+up_proj", "mlp.down_proj"]


def test_what_was_measured_is_kept_by_content(monkeypatch):
    model, how = strong(), {"calibration": CALIBRATION, "text": HELD_OUT}
    first = measure_sensitivity(model, [rounding(3)], **how)

    def nothing(*_: object, **__: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(measuring, "measure_layers", nothing)
    assert measure_sensitivity(copy.deepcopy(model), [rounding(3)], **how) == first
    for changed in ({"text": HELD_OUT.flip(0)}, {"calibration": CALIBRATION.flip(0)}):
        with pytest.raises(AssertionError, match="again"):
            measure_sensitivity(model, [rounding(3)], **{**how, **changed})
    with pytest.raises(AssertionError, match="again"):
        measure_sensitivity(strong(seed=1), [rounding(3)], **how)
    with pytest.raises(AssertionError, match="again"):
        measure_sensitivity(model, [rounding(3, clip=True)], **how)


def test_passes_of_other_layers_decide_as_one_pass_of_all_would():
    """Every layer behind the compressed ones before it, in whatever order the recipe names them."""
    whole = compress.quantize(strong(), fast_gptq(group_size=16), calibration=CALIBRATION)
    split = [
        compress.but(fast_gptq(group_size=16), "*attn*", "*gate*"),
        compress.only(fast_gptq(group_size=16), "*q_proj", "*gate*"),
        compress.only(fast_gptq(group_size=16), "*k_proj", "*v_proj", "*o_proj"),
    ]
    parts = compress.quantize(strong(), split, calibration=CALIBRATION)
    assert parts.record.block_forwards == whole.record.block_forwards
    for name, parameter in whole.model.named_parameters():
        assert torch.equal(parameter, parts.model.get_parameter(name)), name
    assert DRIFT_GPTQ["drift"] == 1.0  # or the order would not matter
