"""What a student learns from a teacher: losses on logits that nobody makes, and on what is inside of both."""

import pytest
import torch
from combinations import every
from commands import Largest
from models import DECODERS, strong, tokens
from torch import Tensor, nn

from compress.base.collectives import Comm
from compress.base.errors import InputError
from compress.passes.train import Train
from compress.train.inputs.samples import Rows
from compress.train.inputs.teacher_predictions import TopKRows
from compress.train.losses import chunked_logits
from compress.train.losses.attention import attention_loss
from compress.train.losses.contrastive import Candidates, info_nce
from compress.train.losses.logits import LogitsLoss, logits_loss
from compress.train.losses.relations import relations_loss
from compress.train.losses.top_k import top_k
from compress.train.objective.heads import output_head
from compress.train.objective.objective import Objective
from compress.train.objective.outputs import eager_attention

IDS = tokens(4, 12)


def exact(kind: str, seed: int = 0) -> nn.Module:
    """A random model of float64."""
    return strong(kind, torch.float64, seed)


def batch(ids: Tensor = IDS, padding: int = 0) -> dict[str, Tensor]:
    mask = torch.ones_like(ids)
    mask[0, len(ids[0]) - padding :] = 0
    return Rows({"input_ids": ids, "attention_mask": mask}).numbered().take(range(len(ids)))


def found(objective: Objective, given: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The sum of each loss, and gradients of the weighted sum."""
    student = objective.models[0]
    student.zero_grad()
    totals = objective(given)
    sum(objective.weights[name] * total for name, total in totals.items()).backward()
    return totals, {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}


@every("kind", [*DECODERS, "scaled"])
def test_logits_that_nobody_makes_give_the_same_losses_and_gradients(monkeypatch, kind):
    """A few tokens at a time, in models whose head is bare, scaled, under a softcap, or the embedding itself."""
    monkeypatch.setattr(chunked_logits, "CHUNK_VALUES", 5 * 96)
    if kind == "scaled":
        import transformers

        config = transformers.GraniteConfig(
            vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, logits_scaling=3.0,
        )  # fmt: skip
        pair = [transformers.GraniteForCausalLM(config).double().eval() for _ in range(2)]
    else:
        pair = [exact(kind, seed) for seed in range(2)]
    options = Train(logits=0.7, task=0.3, temperature=2.0)
    given = batch(padding=3)
    plain, made = Objective(options, *pair), Objective(options, *pair)
    made.begin(Rows(given))
    assert all(made.heads), made.notes
    assert not made.notes
    (expected, gradients), (sums, others) = found(plain, given), found(made, given)
    assert sums.keys() == expected.keys() == {"logits", "task"}
    for name, total in sums.items():
        torch.testing.assert_close(total, expected[name], rtol=1e-9, atol=0)
    assert gradients.keys() == others.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            others[name], gradient, rtol=1e-8, atol=1e-10, msg=lambda said, n=name: f"{n}: {said}"
        )
    assert "forward" not in made.heads[0].module.__dict__
    assert all(p.grad is None for p in pair[1].parameters())


@every("sizes", [(96, 100), (100, 96)])
@every("whole", [False, True])
def test_a_vocabulary_that_is_padded_further_is_cut_for_a_student_and_forbidden_to_it(monkeypatch, sizes, whole):
    """Of a larger teacher the student is taught its own tokens; tokens that a smaller teacher lacks lose their mass."""
    import transformers

    monkeypatch.setattr(chunked_logits, "CHUNK_VALUES", 5 * 96)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    torch.manual_seed(0)
    student, teacher = (
        transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=size, **shape)).double().eval()
        for size in sizes
    )
    objective, given = Objective(Train(), student, teacher), batch()
    objective.begin(Rows(given))
    assert all(objective.heads)
    objective.heads = (None, None) if whole else objective.heads
    totals, gradients = found(objective, given)
    with torch.no_grad():
        theirs, own = (model(input_ids=IDS).logits[:, :-1] for model in (teacher, student))
        log_p, log_q = theirs[..., : sizes[0]].log_softmax(-1), own.log_softmax(-1)[..., : sizes[1]]
        expected = (log_p.exp() * (log_p - log_q)).sum()
    torch.testing.assert_close(totals["logits"], expected, rtol=1e-9, atol=0)
    beyond = torch.autograd.grad(student(input_ids=IDS).logits[..., 96:].exp().sum(), student.lm_head.weight)[0]
    assert float((beyond * gradients["lm_head.weight"])[96:].sum()) >= (1e-6 if sizes[0] > 96 else 0)


BERT = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
T5 = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_heads": 4, "pad_token_id": 0}


def of_positions(kind: str) -> tuple[list[nn.Module], dict[str, Tensor]]:
    """(A student and its teacher, both with a label for each position, samples.)"""
    import transformers

    labels = tokens(4, 12, seed=1) % 5 + 1
    labels[0, 9:] = -100
    if kind == "t5":
        models = [transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)) for _ in range(2)]
        ids = tokens(4, 12, seed=2)  # as many as labels: nothing tells these from next tokens
        return models, {"input_ids": ids, "decoder_input_ids": tokens(4, 12, seed=3), "labels": labels}
    named = {"masked": transformers.BertForMaskedLM, "labelled": transformers.BertForTokenClassification}
    models = [named[kind](transformers.BertConfig(**BERT, num_labels=6)) for _ in range(2)]
    return models, {"input_ids": tokens(4, 12, seed=2), "labels": labels}


@every("kind", ["masked", "labelled", "t5"])
@every("labelled", [True, False])
def test_labels_of_positions_are_not_shifted(kind, labelled):
    """Losses are means over positions: the model's own for a task, the divergence of what both predict there."""
    pair, data = of_positions(kind)
    pair = [model.double().eval() for model in pair]
    mask = data["labels"] != -100 if labelled else torch.ones(4, 12, dtype=torch.bool)
    inputs = {name: value for name, value in data.items() if name != "labels"}
    rows = Rows(data if labelled else inputs).numbered()
    objective = Objective(Train(logits=1.0, task=0.5 * labelled), *pair)
    objective.begin(rows)
    given = rows.take(range(4))
    totals, counts = objective(given), objective.counts(given)
    log_q, log_p = (model(**inputs).logits.log_softmax(-1)[mask] for model in pair)
    assert set(counts.values()) == {int(mask.sum())}
    expected = {"logits": (log_p.exp() * (log_p - log_q)).sum(-1).mean()}
    expected |= {"task": pair[0](**data).loss} if labelled else {}
    assert totals.keys() == expected.keys()
    for name, total in totals.items():
        torch.testing.assert_close(total / counts[name], expected[name], rtol=1e-6, atol=0)


def test_a_task_of_positions_needs_their_labels():
    pair, data = of_positions("masked")
    for labels, says in (({}, "the batches have none"), ({"labels": data["labels"][:, :3]}, r"\[4, 3\]")):
        given = Rows({"input_ids": data["input_ids"], **labels})
        objective = Objective(Train(task=1.0), *pair)
        objective.begin(given)
        with pytest.raises(InputError, match=says):
            objective.counts(given.take(range(4)))


def test_logits_are_never_whole():
    """Of neither model, forward and backward: nothing is as large as tokens times vocabulary."""
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(vocab_size=4096, num_hidden_layers=1, **sizes)
    pair = [transformers.LlamaForCausalLM(config).eval() for _ in range(2)]
    ids = torch.arange(256).view(2, 128)
    objective = Objective(Train(task=1.0), *pair)
    objective.begin(Rows({"input_ids": ids[:1, :2]}).numbered())
    given = Rows({"input_ids": ids}).numbered().take([0, 1])

    def largest() -> int:
        with Largest() as mode:
            found(objective, given)
        return mode.elements

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked_logits, "CHUNK_VALUES", 16 * 4096)
        assert largest() < ids.numel() * 4096 / 4
    objective.heads = (None, None)
    assert largest() >= (ids.numel() - 2) * 4096


class Shifted(nn.Module):
    """A model whose logits are something else than its head's product."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.get_output_embeddings = model.get_output_embeddings

    def forward(self, **inputs: Tensor) -> object:
        output = self.model(**inputs)
        output.logits = output.logits + torch.arange(96.0) / 96
        return output


def test_other_logits_are_made_and_a_line_says_so():
    student, teacher = Shifted(exact("llama")), Shifted(exact("llama", 1))
    given = batch()
    for pair, says in (
        (
            (student, exact("llama", 1)),
            "logits of Shifted are made as a whole: they are not what its output embedding",
        ),
        (
            (exact("llama"), teacher),
            "the teacher's logits (Shifted) are made as a whole: they are not what its output",
        ),
    ):
        objective = Objective(Train(), *pair)
        objective.begin(Rows(given))
        (note,) = objective.notes
        assert note.startswith(says)
        total = objective(given)["logits"]
        expected = Objective(Train(), *pair)(given)["logits"]
        torch.testing.assert_close(total, expected)
    assert output_head(nn.Linear(2, 2), {"input": torch.ones(1, 2)})[0] is None


def test_a_cached_teacher_says_of_each_sample_what_it_said(monkeypatch):
    """All tokens of the vocabulary: the loss of the teacher itself; few: that of a bucket of the rest."""
    student, teacher = exact("llama"), exact("llama", 1)
    given = batch()
    with torch.no_grad():
        logits = teacher(input_ids=IDS).logits[:, :-1]
    for k in (96, 7):
        kept = top_k(logits, k)
        rows = TopKRows(kept.log_probs_Tk, kept.indices_Tk.int(), 1.0, 96)
        objective = Objective(Train(teacher="said.safetensors"), student, rows)
        objective.begin(Rows(given))
        assert objective.heads[0] is not None
        some = Rows(given).take([2, 0])
        own = student(input_ids=IDS[[2, 0]]).logits[:, :-1]
        expected = logits_loss(own, logits[[2, 0]] if k == 96 else top_k(logits[[2, 0]], k), how=LogitsLoss()).total
        torch.testing.assert_close(objective(some)["logits"], expected, rtol=1e-9, atol=0)


def test_attention_maps_are_those_of_eager_attention():
    pair = [exact("llama", seed) for seed in range(2)]
    given = batch(padding=3)
    with eager_attention(pair) as changed:
        assert changed == ["LlamaForCausalLM computes eager attention, not sdpa, for its maps"] * 2
        total = Objective(Train(logits=0, attention=1.0, measure="mse"), *pair)(given)["attention"]
        maps = [
            m(input_ids=IDS, attention_mask=given["attention_mask"], output_attentions=True).attentions for m in pair
        ]
    assert {m.config._attn_implementation for m in pair} == {"sdpa"}
    mask = given["attention_mask"]
    expected = [attention_loss(s, t, mask_BK=mask, measure="mse").total for s, t in zip(*maps, strict=True)]
    torch.testing.assert_close(total, torch.stack(expected).mean())


@every("kind", ["llama", "bert"])
def test_relations_are_of_the_vectors_that_attention_multiplies(kind):
    """A decoder's of tokens before, an encoder's of all; a student of half the depth learns from every second layer."""
    pair = [exact(kind, seed) for seed in range(2)]
    layers = pair[0].model.layers if kind == "llama" else pair[0].encoder.layer
    del layers[1]
    pair[0].config.num_hidden_layers = 1
    values: list[Tensor] = []
    for model, at in zip(pair, (0, 1), strict=True):
        inner = (
            model.model.layers[at].self_attn.v_proj if kind == "llama" else model.encoder.layer[at].attention.self.value
        )
        inner.register_forward_hook(lambda module, args, output: values.append(output))
    given = batch(padding=3)
    total = Objective(Train(logits=0, relations=1.0), *pair)(given)["relations"]
    student, teacher = values[1], values[0]  # the teacher is asked first
    heads = 2 if kind == "llama" else 4
    mask = given["attention_mask"]
    expected = relations_loss(student, teacher, heads, mask_BT=mask, causal=kind == "llama").total
    torch.testing.assert_close(total, expected)
    more = Objective(Train(logits=0, relations=1.0, related="all", relation_heads=1), *pair)(given)["relations"]
    assert not torch.isclose(more, total)


def test_micro_batches_have_no_say_in_who_is_told_apart():
    """The other samples of a step are negatives wherever they are; a sample that it has twice is none to itself."""
    student, teacher = exact("bert"), exact("bert", 1)
    rows = Rows({"input_ids": IDS}).numbered()
    objective = Objective(Train(logits=0, contrastive=1.0, contrast=0.5), student, teacher)
    objective.begin(rows)

    def total(micro: int, indices: list[int]) -> Tensor:
        objective.begin_step(rows, indices, micro, Comm())
        parts = [indices[i : i + micro] for i in range(0, len(indices), micro)]
        return sum(objective(rows.take(part))["contrastive"] for part in parts)

    with torch.no_grad():
        s, t = (m(input_ids=IDS[[3, 1, 2]]).last_hidden_state.mean(1) for m in (student, teacher))
    for micro in (3, 2, 1):
        torch.testing.assert_close(total(micro, [3, 1, 2]), info_nce(s, t, temperature=0.5).total)
    twice = total(2, [3, 1, 2, 3]) - info_nce(s, t, temperature=0.5).total
    torch.testing.assert_close(twice, info_nce(s[:1], Candidates(t, torch.tensor([0])), temperature=0.5).total)


def narrow() -> nn.Module:
    """An encoder of half the width."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=96, hidden_size=16, num_hidden_layers=1, num_attention_heads=4, intermediate_size=16
    )
    return transformers.BertModel(config).double().eval()


def test_widths_that_differ_learn_through_projectors():
    student, teacher = narrow(), exact("bert")
    rows = Rows({"input_ids": IDS}).numbered()
    objective = Objective(Train(logits=0, features=1.0, contrastive=1.0, relations=1.0), student, teacher)
    objective.begin(rows)
    objective.begin_step(rows, [0, 1], 2, Comm())
    _, gradients = found(objective, rows.take([0, 1]))
    assert {tuple(p.shape) for p in objective.parameters()} == {(32, 16)}
    assert all(p.grad is not None and p.grad.any() for p in objective.parameters())
    assert any(name.endswith("value.weight") for name in gradients)
