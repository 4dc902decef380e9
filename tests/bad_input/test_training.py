"""What training refuses that makes zeros: one line with what is allowed, before anything is trained."""

import pytest
import torch
import transformers
from models import build, tokens
from torch import nn

import compress
from compress.base.errors import InputError
from compress.passes.train import Train
from compress.recipes.studies.quality.tickets import Lottery, draw, lesson
from compress.train.inputs.samples import Rows

IDS = {"calibration": tokens(4), "batch_size": 4}
ALONE = {"teacher": "none", "logits": 0, "task": 1}


def convolutions(*passes):
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.Flatten(), nn.Linear(32, 10))
    batch = {"input": torch.randn(4, 4, 4, 4), "labels": torch.arange(4)}
    return compress.quantize(model, passes, training=[batch])


def keeping_activations():
    config = transformers.OpenAIGPTConfig(vocab_size=96, n_embd=32, n_layer=2, n_head=4)
    return transformers.OpenAIGPTLMHeadModel(config)


CASES = {
    "no temperature": (lambda: Train(temperature=float("inf")), "temperature inf; allowed: above 0, finite"),
    "everything zero": (lambda: Train(sparsity=1), "sparsity 1; allowed: 0 or more, below 1"),
    "no pattern": (lambda: Train(pattern="4:2"), "pattern '4:2'; allowed: N:M"),
    "pattern and another share": (lambda: Train(pattern="2:4", sparsity=0.6), "makes 0.5 of weights zero, not"),
    "pattern of a layer": (lambda: Train(pattern="2:4", prune_per="row"), "prune_per row has no say in pattern 2:4"),
    "place unknown": (lambda: Train(sparsity=0.5, prune_per="block"), "prune_per 'block'; allowed: row, layer, model"),
    "end before the start": (
        lambda: Train(sparsity=0.5, prune_from=0.5, prune_until=0.4),
        "prune_from 0.5, prune_until 0.4; allowed",
    ),
    "never": (lambda: Train(sparsity=0.5, prune_every=0), "prune_every 0; allowed: 1 or more"),
    "a schedule of nothing": (lambda: Train(prune_every=5), "prune_every is of pruning, which nothing asks for"),
    "l1 below 0": (lambda: Train(l1=-1.0), "l1 -1.0; allowed: 0 or more"),
    "no number": (lambda: Train(group_lasso=float("nan")), "group_lasso nan; allowed: 0 or more"),
    "groups without lasso": (lambda: Train(lasso_groups="inputs"), "lasso_groups=inputs is of group_lasso, which is 0"),
    "direction of nothing": (lambda: Train(**ALONE, divergence="reverse"), "divergence=reverse is of logits, which"),
    "temperature of nothing": (lambda: Train(**ALONE, temperature=2), "temperature=2 is of logits, which is 0"),
    "distance of nothing": (lambda: Train(distance="cosine"), "distance=cosine is of features, which is 0"),
    "measure of nothing": (lambda: Train(measure="mse"), "measure=mse is of attention, which is 0"),
    "heads of nothing": (lambda: Train(heads="mean"), "heads=mean is of attention, which is 0"),
    "vectors of nothing": (lambda: Train(related="all"), "related=all is of relations, which is 0"),
    "relations of nothing": (lambda: Train(relation_heads=2), "relation_heads=2 is of relations, which is 0"),
    "contrast of nothing": (lambda: Train(contrast=0.1), "contrast=0.1 is of contrastive, which is 0"),
    "layers of nothing": (
        lambda: Train(layer_map="last", contrastive=1),
        "layer_map=last is of features or attention or relations, which is 0; give both or neither",
    ),
    "tail of all tokens": (lambda: Train(tail="conditional"), "tail=conditional is of a file of cached logits; give"),
    "shrunk and left alone": (lambda: Train(l1=0.1, trains="scales"), "trains=scales leaves weights as they are"),
    "inputs of groups": (
        lambda: convolutions(Train(**ALONE, group_lasso=0.1, lasso_groups="inputs")),
        "0 is a convolution of 2 groups",
    ),
    "pattern that does not fit": (
        lambda: convolutions(Train(**ALONE, pattern="2:4")),
        "pattern 2:4 needs inputs in multiples of 4; 0 has 18",
    ),
    "zeros among signs": (
        lambda: compress.quantize(build("llama"), [compress.Binary(group_size=16), Train(sparsity=0.5)], **IDS),
        "as signs, none of which is zero",
    ),
    "zeros of a sum": (
        lambda: compress.quantize(
            build("llama"), [compress.RTN(scheme="w4a16", group_size=-1, outliers=0.02), Train(sparsity=0.5)], **IDS
        ),
        "in terms that make no zero together",
    ),
    "zeros that the next does not keep": (
        lambda: compress.quantize(build("llama"), [Train(sparsity=0.5), compress.Binary(group_size=16)], **IDS),
        "'binary' does not keep the zeros of .* which 'train' has pruned",
    ),
    "ticket of nothing": (lambda: Lottery(sparsity=0), "sparsity 0; allowed: above 0, below 1"),
    "rewound to nowhere": (lambda: Lottery(rewind="rates"), "rewind 'rates'; allowed: weights, learning-rate"),
    "rewound beyond the end": (
        lambda: draw(nn.Linear(2, 2), lesson([object()], Rows({}), Train(**ALONE, steps=5)), Lottery(to=5)),
        "to 5; allowed: below steps, which are 5",
    ),
    "ticket with a teacher": (lambda: lesson([object()], Rows({}), Train()), "give teacher=none and trains=all"),
}

# What is known of a model and a recipe before any work.
KNOWN = {
    "codes that stay": (
        lambda: compress.quantize(build("llama"), [compress.SpQR(), Train()], **IDS),
        "self_attn.q_proj is stored as w3a16 .*, of which nothing is trained; quantize it by another pass, or train",
    ),
    "activations of a model that keeps them": (
        lambda: compress.quantize(keeping_activations(), [compress.RTN(), Train(checkpointing=True)], **IDS),
        "OpenAIGPTLMHeadModel cannot compute activations again; leave checkpointing out",
    ),
    "words of an encoder": (
        lambda: compress.quantize(build("bert"), Train(on_policy=1), **IDS),
        "on_policy continues what the student writes, and this one generates no text",
    ),
}


@pytest.mark.parametrize("name", [*CASES, *KNOWN])
def test_one_line_says_what_is_allowed(name, monkeypatch):
    call, says = {**CASES, **KNOWN}[name]
    if name in KNOWN:
        monkeypatch.setattr("compress.jobs.job.Job.finish", None)
    with pytest.raises(InputError, match=says) as refused:
        call()
    assert "\n" not in str(refused.value)
