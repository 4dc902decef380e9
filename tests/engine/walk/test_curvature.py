"""Curvature of the loss by layers' outputs: that of the whole model, though one block at a time is run."""

from copy import deepcopy

import pytest
import torch
from mixtures import made
from mixtures import tokens as mixed_tokens
from models import build, strong, tokens
from torch import Tensor, nn
from torch.nn import functional

import compress
from compress.base.errors import InputError
from compress.engine.walk import gradients, output_gradients
from compress.engine.walk.output_gradients import drawn
from compress.passes.gptq import GPTQ
from compress.passes.protocol.stages import LossCurvature

Batches = list[dict[str, Tensor]]
LOSS = GPTQ(scheme="w3a16", group_size=16, objective="loss")


def padded() -> Batches:
    mask = torch.ones(4, 16, dtype=torch.int64)
    mask[1, 10:] = 0
    return [{"input_ids": tokens(4), "attention_mask": mask}, {"input_ids": tokens(2, seed=7)}]


def seen(monkeypatch: pytest.MonkeyPatch, model: nn.Module, batches: Batches) -> dict[str, LossCurvature]:
    """The curvature that a pass is given."""
    given: dict[str, LossCurvature] = {}
    usual = GPTQ.apply
    monkeypatch.setattr(GPTQ, "apply", lambda self, site: given.update(site.stats["curvature"]) or usual(self, site))
    compress.quantize(model, LOSS, calibration=batches)
    monkeypatch.undo()
    return given


def of_the_whole_model(model: nn.Module, name: str, batches: Batches) -> tuple[list[Tensor], Tensor]:
    """(|g|^2 [M] of each micro-batch, E g g^T [N, N]) by one backward of the whole model a batch."""
    kept: list[Tensor] = []
    hook = model.get_submodule(name).register_forward_hook(lambda _m, _a, y: kept.append(y))
    rows = []
    for batch in batches:
        logits, draws = drawn(model(**batch), batch)
        (gradient,) = torch.autograd.grad(logits, [kept.pop()], draws)
        mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        rows.append(gradient.flatten(0, -2)[mask.flatten()])
    hook.remove()
    every = torch.cat(rows).double()
    return [row.square().sum(1) for row in rows], every.t() @ every / len(every)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "opt"])
def test_a_pass_is_given_the_curvature_of_the_whole_model(kind, monkeypatch):
    model, whole = build(kind), build(kind)
    found = seen(monkeypatch, model, padded())
    assert found.keys() == {
        layer.name for layer in compress.quantize(build(kind), LOSS, calibration=padded()).record.layers
    }
    for name in found:
        sizes, moments = of_the_whole_model(whole, name, padded())
        relative = moments / moments.diagonal().mean()
        given = found[name].of_outputs.double()
        torch.testing.assert_close(given.diagonal(), relative.diagonal(), rtol=1e-3, atol=1e-4)
        # As `Hessian` is: the share of noise is taken off.
        off = ~torch.eye(len(given), dtype=torch.bool)
        share = float((given[off] @ relative[off]) / relative[off].square().sum())
        assert 0 <= share < 1
        torch.testing.assert_close(given[off], share * relative[off], rtol=1e-3, atol=1e-3)
        mean = torch.cat(sizes).mean()
        for i, size_M in enumerate(sizes):  # and so are tokens, towards their mean
            expected = 1 - share + share * size_M / mean
            torch.testing.assert_close(found[name].of_tokens[i], expected, rtol=1e-3, atol=1e-4)


def test_parts_of_the_micro_batches_give_the_curvature_of_all(monkeypatch):
    whole = seen(monkeypatch, build("llama"), padded())

    def parts(run, stack, micro):
        for i in range(len(micro.batches)):
            yield gradients.MicroBatches([micro.batches[i]], [[calls[i]] for calls in micro.calls])

    monkeypatch.setattr(output_gradients, "in_memory", parts)
    for name, other in seen(monkeypatch, build("llama"), padded()).items():
        torch.testing.assert_close(other.of_outputs, whole[name].of_outputs)
        assert all(torch.equal(size_M, whole[name].of_tokens[i]) for i, size_M in other.of_tokens.items())


ROUNDED = {
    "gptq, levels": lambda objective: GPTQ(scheme="mxfp4a16", objective=objective),
    "gptq": lambda objective: GPTQ(scheme="w3a16", group_size=16, objective=objective),
    "spqr": lambda objective: compress.SpQR(scheme="w2a16", group_size=16, tile_rows=12, objective=objective),
}


@pytest.mark.parametrize("method", ROUNDED)
def test_predictions_change_less_than_by_the_error_of_each_layer(method):
    model, held_out = strong("gpt2"), tokens(64, 24, seed=5)
    lost = {}
    with torch.no_grad():
        expected = model(input_ids=held_out).logits.log_softmax(-1)
        for objective in ("layer", "loss"):
            one = ROUNDED[method](objective)
            changed = compress.quantize(deepcopy(model), one, calibration=tokens(256, 24)).model
            log_probs = changed(input_ids=held_out).logits.log_softmax(-1)
            lost[objective] = float(functional.kl_div(log_probs, expected, log_target=True, reduction="sum"))
    assert lost["loss"] < 0.95 * lost["layer"]


def test_layers_without_gradients_of_their_outputs_are_named():
    result = compress.quantize(made("mixtral"), LOSS, calibration=mixed_tokens(8), experts=True)
    objectives = {layer.name: layer.figures["objective"] for layer in result.record.layers}
    assert all(("experts" in name) == (how != "loss") for name, how in objectives.items())
    count = sum(how != "loss" for how in objectives.values())
    said = f"{count} of {len(objectives)} layers are rounded for what they return, not for the loss"
    assert f"{said} ({count} no gradient of its outputs)" in result.record.notes


def test_pruned_layers_are_rounded_for_what_they_return():
    passes = (compress.only(compress.Magnitude(sparsity=0.5), "*.down_proj"), LOSS)
    result = compress.quantize(build("llama"), passes, calibration=tokens(8))
    assert "2 of 14 layers are rounded for what they return, not for the loss (2 pruned)" in result.record.notes


REFUSED = {
    "an encoder": (lambda: build("bert"), LOSS, "gptq with objective=loss looks at predictions of next tokens"),
    "scaled before": (
        lambda: build("llama"),
        (compress.AWQ(scheme="w3a16", group_size=16, rounding="none"), LOSS),
        "'awq' changes channels whose gradients 'gptq' has seen before",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_such_curvature_is_refused_before_any_work(name):
    make, passes, says = REFUSED[name]
    with pytest.raises(InputError, match=says):
        compress.quantize(make(), passes, calibration=[{"input_ids": tokens()}])


def test_small_floats_are_refused():
    with pytest.raises(InputError, match="fp8 has float8 weights"):
        GPTQ(objective="loss", scheme="fp8")
