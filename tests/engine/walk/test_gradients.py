"""Scores by gradients: those of the whole model, though one block at a time is run."""

from copy import deepcopy

import pytest
import torch
from models import build, tokens
from torch import Tensor, nn
from torch.nn import functional

import compress
from compress.base.errors import CompressError, InputError
from compress.engine.walk import gradients as stage


def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The cross entropy of next tokens, none of which is padding."""
    ids, mask = batch["input_ids"], batch.get("attention_mask")
    log_probs = model(**batch).logits[:, :-1].float().log_softmax(-1)
    lost = -log_probs.gather(-1, ids[:, 1:, None])[..., 0]
    return lost.mean() if mask is None else (lost * mask[:, 1:]).sum() / mask[:, 1:].sum()


def whole_model_scores(model: nn.Module, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Sums of (w g)^2 by one backward of the whole model a batch."""
    found = {}
    for batch in batches:
        model.zero_grad()
        loss = model(**batch).loss if "labels" in batch else losses(model, batch)
        loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                change = (parameter.detach().double() * parameter.grad.double()) ** 2
                found[name] = found.get(name, 0) + change
    return found


def assert_lowest_are_zero(model: nn.Module, scores: dict[str, Tensor], result: compress.Result, share: float) -> None:
    assert result.record.layers
    for layer in result.record.layers:
        score = scores[f"{layer.name}.weight"].flatten()
        kept = score > score.sort().values[int(len(score) * share) - 1]
        assert torch.equal(model.get_parameter(f"{layer.name}.weight").flatten() != 0, kept), layer.name


def padded() -> list[dict[str, Tensor]]:
    mask = torch.ones(4, 16, dtype=torch.int64)
    mask[1, 10:] = 0
    return [{"input_ids": tokens(4), "attention_mask": mask}, {"input_ids": tokens(2, seed=7)}]


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "opt"])
def test_the_lowest_of_a_layer_become_zero(kind: str) -> None:
    model, whole = build(kind), build(kind)
    for parameter in model.parameters():
        parameter.requires_grad_(False)  # as a person has frozen them, and finds them again
    result = compress.quantize(model, compress.Taylor(per="layer", sparsity=0.4), calibration=padded())
    assert_lowest_are_zero(model, whole_model_scores(whole, padded()), result, 0.4)
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())


def test_what_the_model_returns_for_labels_is_its_loss() -> None:
    """An encoder and a decoder, run as one block; and what no loss depends on is left alone."""
    ids = tokens(4)
    batches = [{"input_ids": ids, "decoder_input_ids": ids.flip(1), "labels": ids}] * 2
    model, whole = build("t5"), build("t5")
    one = compress.Taylor(per="layer", sparsity=0.3)
    result = compress.quantize(model, one, calibration=batches)
    assert_lowest_are_zero(model, whole_model_scores(whole, batches), result, 0.3)


class Two(nn.Module):
    """Two heads, of which the loss knows one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.known, self.other = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.body(x).relu()
        found = {"logits": self.known(hidden), "other": self.other(hidden)}
        return found if labels is None else {**found, "loss": functional.cross_entropy(found["logits"], labels)}


def test_what_no_loss_depends_on_is_left_alone() -> None:
    data = [{"x": torch.randn(20, 8, generator=torch.Generator().manual_seed(1)), "labels": torch.arange(20) % 4}]
    model = Two()
    result = compress.quantize(model, compress.Taylor(per="layer"), calibration=data)
    assert result.record.left_alone["other"] == "no gradient of the loss reached it"
    assert [layer.name for layer in result.record.layers] == ["body", "known"]
    assert torch.all(model.other.weight != 0)
    assert sum(int((layer.weight == 0).sum()) for layer in (model.body, model.known)) == (8 * 16 + 16 * 4) // 2


def test_parts_of_the_micro_batches_give_the_sums_of_all(monkeypatch) -> None:
    found = []
    for at_once in (None, 1, 3):
        if at_once is not None:
            ends = list(range(0, 4, at_once))

            def parts(run, stack, whole, ends=ends, at_once=at_once):
                for start in ends:
                    some = slice(start, start + at_once)
                    yield stage.MicroBatches(run.batches[some], [each[some] for each in whole.calls])

            monkeypatch.setattr(stage, "in_memory", parts)
        model = build("llama")
        compress.quantize(model, compress.Taylor(), calibration=tokens(8), batch_size=2)
        found.append({name: p != 0 for name, p in model.named_parameters()})
    assert all(torch.equal(mask, other[name]) for other in found[1:] for name, mask in found[0].items())


def test_memory_of_the_forwards_is_bounded_by_the_weights(monkeypatch) -> None:
    lengths = []
    through = stage._pass_through

    def note(run, stack, part, sums):
        lengths.append(len(part.batches))
        return through(run, stack, part, sums)

    monkeypatch.setattr(stage, "_pass_through", note)
    compress.quantize(build("llama"), compress.Taylor(), calibration=tokens(60), batch_size=5)
    # 18,432 weights and two norms of 32 in two blocks; 5 x 16 x 32 numbers of a micro-batch before each of them.
    assert lengths == [3, 3, 3, 3]


def test_a_mask_by_gradients_is_the_reason_of_a_better_model_than_one_by_size() -> None:
    """Weights of half of the inputs are large, and those inputs as much smaller: size is misled, the loss is not."""
    text = tokens(24, 32, seed=4)
    model = build("llama")
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        losses(model, {"input_ids": text}).backward()
        optimizer.step()
    model.zero_grad()
    for block in model.model.layers:
        attention, mlp = block.self_attn, block.mlp
        for norm, layers in (
            (block.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (block.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            norm.weight.data[::2] /= 1024
            for layer in layers:
                layer.weight.data[:, ::2] *= 1024
    lost = {}
    for one in (compress.Magnitude(sparsity=0.6), compress.Taylor(sparsity=0.6)):
        pruned = deepcopy(model)
        compress.quantize(pruned, one, calibration=text, batch_size=4)
        with torch.no_grad():
            lost[one.name] = float(losses(pruned, {"input_ids": text}))
    assert lost["taylor"] < 0.95 * lost["magnitude"]


REFUSED = {
    "no labels": (lambda: build("bert"), {"input_ids": tokens()}, "taylor needs a loss, and calibration batch 1"),
    "labels that nothing comes of": (
        lambda: nn.Sequential(nn.Linear(8, 8)),
        {"input": torch.ones(2, 8)},
        r"\(input\) has no labels; allowed: token ids for a model that generates text, or batches",
    ),
    "one token": (lambda: build("llama"), {"input_ids": tokens(4, 1)}, "has one token a sample"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_cannot_be_told_is_refused_before_any_work(name: str) -> None:
    make, batch, says = REFUSED[name]
    with pytest.raises(InputError, match=says):
        compress.quantize(make(), compress.Taylor(), calibration=[batch])


class Silence(Two):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return super().forward(x)["logits"]


def test_a_model_that_returns_no_loss_or_one_without_end_is_named() -> None:
    data = [{"x": torch.ones(3, 8), "labels": torch.zeros(3, dtype=torch.int64)}]
    with pytest.raises(CompressError, match="returns no loss for the labels of its batch"):
        compress.quantize(Silence(), compress.Taylor(), calibration=data)
    model = build("llama")
    model.lm_head.weight.data.fill_(torch.finfo(torch.float32).max)
    with pytest.raises(CompressError, match="the loss of a calibration batch is not finite"):
        compress.quantize(model, compress.Taylor(), calibration=tokens())
