"""Distillation through the commands: cached teachers, and encoders."""

import json
from pathlib import Path

import pytest
import torch
from commands import Desk, command, make_llama, save
from models import strong, tokens
from torch.nn.functional import cosine_similarity

import compress
from compress.base.collectives import Comm
from compress.engine.learn.on_policy import written_by


def distill(desk: Desk, model: object, *more: object, output: str = "out"):
    words = ["--rows", 4, "--learning-rate", 1e-3, "--train", "held_out=0.25", "--quiet"]
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
        "cache-logits", desk.model, "--output", said, "--calibration", desk.tokens, "--top-k", 2048, "--json", "-"
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
    asked = command("cache-logits", desk.model, "--output", few, "--calibration", desk.tokens, "--top-k", 8, "--quiet")
    assert asked.code == 0, asked.err
    assert distill(desk, desk.model, *common, "--train", f"teacher={few}", output="few").code == 0
    assert 0 < history(desk.here / "few")["steps"][0]["logits"] < live["steps"][0]["logits"]  # coarser, hence less


def test_a_teacher_that_is_padded_further_teaches_the_tokens_of_both(desk):
    """Live, and cached; what only one of them has is refused before any work."""
    longer, beyond = save(make_llama(vocab_size=2112), desk.here / "longer"), desk.here / "beyond.pt"
    torch.save(torch.full((12, 16), 2048), beyond)

    def taught(student: Path, teacher: Path, output: str, data: Path = desk.tokens):
        words = ["--student", student, "--training", data, "--train", f"teacher={teacher}", "--steps", 1]
        options = ["--rows", 4, "--learning-rate", 1e-3, "--train", "held_out=0"]
        return command("distill", longer, "--output", desk.here / output, *words, *options)

    done = taught(desk.model, longer, "live")
    assert done.code == 0, done.err
    assert "has 2112 tokens, the student 2048: it is taught the 2048 of both alone" in done.err
    few, all_tokens = desk.here / "few.safetensors", desk.here / "all.safetensors"
    for model, file, k in ((desk.model, few, 8), (longer, all_tokens, 2112)):
        words = ["--output", file, "--calibration", desk.tokens, "--top-k", k, "--quiet"]
        assert command("cache-logits", model, *words).code == 0
    assert taught(longer, few, "cached").code == 0
    for done, says in (
        (taught(desk.model, all_tokens, "no"), "2048 of the student, 2112 of the cached teacher (up to id 2111)"),
        (taught(longer, desk.model, "no", beyond), "training data holds token id 2048, which only one of the two"),
    ):
        assert (done.code, says in done.err) == (2, True), done.err


@pytest.mark.full
def test_a_student_without_masks_is_called_trained_and_not_pruned(desk):
    """A layer that training prunes is called pruned as before."""
    words = [desk.model, "--student-layers", 1, "--calibration", desk.tokens, "--steps", 1, "--train", "held_out=0"]
    for output, more in (("plain", []), ("pruned", ["--train", "sparsity=0.5"])):
        done = command("distill", *words, *more, "--output", desk.here / output)
        assert done.code == 0, done.err
        said = " ".join(f"{done.err} {done.out} {command('inspect', desk.here / output).out}".split())
        coverage = json.loads((desk.here / output / "compress.json").read_text())["coverage"]
        wrong = ["pruned", "a zero takes as much space", "compressed:", "layers compressed", "% zero"]
        if output == "plain":
            assert [word for word in wrong if word in said] == []
            assert "7 layers trained in" in said
            assert coverage is None
        else:
            assert [word for word in wrong if word not in said] == []
            assert coverage["rest"]["pruned, stored dense"] == sum(p.numel() for p in linears(desk.here / output))


@pytest.mark.full
def test_what_chooses_blocks_is_shown_the_training_data_where_there_is_no_other(desk):
    """The same blocks go, and as many samples are looked at, as with the first of the training data for calibration."""
    words = ["--student-layers", 1, "--training", desk.tokens, "--steps", 1, "--train", "held_out=0"]
    alone = command("distill", desk.model, *words, "--samples", 5, "--output", desk.here / "alone")
    assert alone.code == 0, alone.err
    said = "note: no calibration data is given: structure is shown samples of the training data instead"
    assert said in alone.err.splitlines()
    first = desk.here / "first.pt"
    torch.save(torch.load(desk.tokens)[:5], first)
    given = command("distill", desk.model, *words, "--calibration", first, "--output", desk.here / "given")
    assert "no calibration data" not in given.err
    found = [json.loads((desk.here / name / "compress.json").read_text())["structure"] for name in ("alone", "given")]
    assert found[0] == found[1]


def linears(output: Path) -> list[torch.Tensor]:
    layers = compress.load(output).model.layers
    return [module.weight for module in layers.modules() if isinstance(module, torch.nn.Linear)]


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


def test_words_of_the_student_are_taught_on_a_share_of_the_steps(desk):
    common = ["--student-layers", 1, "--calibration", desk.tokens, "--steps", 2, "--train", "divergence=reverse"]
    for output, more in (("given", []), ("own", ["--train", "on_policy=0.5"])):
        done = distill(desk, desk.model, *common, *more, output=output)
        assert done.code == 0, done.err
    given, own = (history(desk.here / output)["steps"] for output in ("given", "own"))
    assert own[0]["logits"] == given[0]["logits"]
    assert own[1]["logits"] != pytest.approx(given[1]["logits"], rel=1e-3)


def test_the_students_words_stand_behind_the_first_half_and_are_those_of_one_seed(desk):
    student, batch = make_llama().eval(), {"input_ids": torch.load(desk.tokens)}
    once, again, other = (written_by(student, batch, seed, Comm())["input_ids"] for seed in (1, 1, 2))
    assert once.shape == batch["input_ids"].shape
    assert torch.equal(once[:, :8], batch["input_ids"][:, :8])
    assert torch.equal(once, again)
    assert not torch.equal(once, other)


def test_words_of_the_student_need_a_teacher_that_can_be_asked_and_rows_without_padding(desk):
    padded = desk.here / "padded.pt"
    mask = torch.ones(12, 16, dtype=torch.int64)
    mask[0, 8:] = 0
    torch.save([{"input_ids": torch.load(desk.tokens), "attention_mask": mask}], padded)
    words = ["--student-layers", 1, "--steps", 1, "--train", "on_policy=1"]
    for more, says in (
        (["--train", "task=1", "--calibration", desk.tokens], "give a model as teacher, logits=1 and task=0"),
        (["--calibration", padded], "on_policy continues rows of token ids without padding; these samples have"),
    ):
        done = distill(desk, desk.model, *words, *more)
        assert (done.code, says in done.err) == (2, True), done.err
