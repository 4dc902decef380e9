"""The reference: asked once, kept, read back bit for bit; never more than a chunk of logits; its own rounding."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import VOCABULARY, make_llama, save
from torch.utils._python_dispatch import TorchDispatchMode

import compress
from compress.base.progress import Silent
from compress.evaluation import reference_model
from compress.evaluation.quality import predictor, reference_states
from compress.evaluation.tasks import evaluate as answering
from compress.kernels import private_folders


class Notes(Silent):
    """Keeps what is noted."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, message: str) -> None:
        self.said.append(message)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(reference_states, "cache_directory", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "references"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many windows a reference was asked about, batch by batch."""
    batches: list[int] = []
    original = reference_states.StatesWriter.states

    def states(says: reference_states.StatesWriter, batch: object) -> torch.Tensor:
        batches.append(len(batch.ids_BL))
        return original(says, batch)

    monkeypatch.setattr(reference_states.StatesWriter, "states", states)
    return batches


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(VOCABULARY, (4, 24), generator=torch.Generator().manual_seed(5))


def test_a_reference_is_asked_once_and_says_the_same_again(
    llama: Path, llama_w4: Path, ids: torch.Tensor, folder: Path, asked: list[int]
) -> None:
    notes = Notes()
    plain = compress.evaluate(llama_w4, reference=llama, text=ids, cache=False)
    assert not folder.exists()
    first = compress.evaluate(llama_w4, reference=llama, text=ids, reporter=notes)
    assert asked == [4]
    assert len(notes.said) == 1
    assert f"predictions of the original are cached in {folder}" in notes.said[0]
    second = compress.evaluate(llama_w4, reference=llama, text=ids, reporter=notes)
    assert asked == [4]
    assert len(notes.said) == 1
    assert first.texts == second.texts == plain.texts  # bit for bit
    assert first.reference == second.reference
    compress.evaluate(llama, reference=llama, text=ids)
    assert asked == [4], "of another model"
    compress.evaluate(llama_w4, reference=llama, text=ids[:3])
    assert asked == [4, 3], "another text"
    assert sorted(path.suffix for path in folder.iterdir()) == [".json", ".json", ".states", ".states"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda states, about: states.write_bytes(states.read_bytes()[:-4]),
        lambda states, about: states.write_bytes(b"\x01" + states.read_bytes()[1:]),
        lambda states, about: states.unlink(),
        lambda states, about: about.write_text("{}"),
        lambda states, about: about.write_text("{"),
        lambda states, about: about.write_text(about.read_text().replace("float32", "float99")),
    ],
)
def test_what_is_damaged_is_made_anew_with_a_note(
    llama: Path, ids: torch.Tensor, folder: Path, asked: list[int], damage: Callable[[Path, Path], object]
) -> None:
    first = compress.evaluate(llama, reference=llama, text=ids[:2])
    (states,), (about,) = folder.glob("*.states"), folder.glob("*.json")
    damage(states, about)
    notes = Notes()
    again = compress.evaluate(llama, reference=llama, text=ids[:2], reporter=notes)
    assert again.texts == first.texts
    assert asked == [2, 2]
    assert notes.said[0].startswith("what was kept of the reference is damaged and made anew (")
    assert folder.name in notes.said[0]
    compress.evaluate(llama, reference=llama, text=ids[:2])
    assert asked == [2, 2]


@pytest.mark.parametrize("file", ["*.states", "*.json"])
def test_what_another_user_may_have_written_is_made_anew_with_a_note(
    llama: Path, ids: torch.Tensor, folder: Path, asked: list[int], file: str
) -> None:
    compress.evaluate(llama, reference=llama, text=ids[:2])
    (path,) = folder.glob(file)
    path.chmod(0o666)
    notes = Notes()
    compress.evaluate(llama, reference=llama, text=ids[:2], reporter=notes)
    assert asked == [2, 2]
    said = f"what was kept of the reference is made anew: {path} can be written by other users (chmod go-w {path})"
    assert notes.said[0] == said
    with pytest.MonkeyPatch.context() as patch:  # as somebody who is neither the owner nor root
        owner = path.stat().st_uid
        patch.setattr(private_folders, "ROOT", owner + 1)
        patch.setattr(os, "geteuid", lambda: owner + 1)
        compress.evaluate(llama, reference=llama, text=ids[:2], reporter=notes)
    assert asked == [2, 2, 2]
    assert any(f"made anew: {path.with_suffix('')}" in said and "belongs to user" in said for said in notes.said)


def test_what_a_reference_answers_is_asked_once_and_damage_is_noted(
    llama: Path, llama_w4: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    likelihoods = answering.likelihoods
    monkeypatch.setattr(answering, "likelihoods", lambda *a: (asked.append(len(a[1])), likelihoods(*a))[1])
    choices = [{"goal": f"{word} is", "sol1": "one", "sol2": "two of it", "label": 0} for word in ("he", "it", "who")]
    tasks = [tmp_path / "piqa.jsonl", tmp_path / "lambada.jsonl"]
    for path, rows in zip(tasks, (choices, [{"text": "so it is he"}, {"text": "the end"}]), strict=True):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    how = {"reference": llama, "tasks": tasks}
    plain = compress.evaluate(llama_w4, **how, cache=False)
    assert not folder.exists()
    assert asked == [6, 2, 6, 2]
    first, second = (compress.evaluate(llama_w4, **how) for _ in range(2))
    assert asked[4:] == [6, 2, 6, 2, 6, 2]
    assert first.tasks == second.tasks == plain.tasks
    assert first.tasks[1].log_perplexity_ratio is not None
    compress.evaluate(llama_w4, **how, questions=1)
    assert asked[10:] == [2, 1, 2, 1], "other questions"
    kept_answers, notes = sorted(folder.iterdir()), Notes()
    for path, damage in zip(kept_answers, ("{", '{"format": 1, "asked": [], "answers": [1]}', "", "[]"), strict=True):
        path.write_text(damage)
    assert compress.evaluate(llama_w4, **how, reporter=notes).tasks == first.tasks
    assert asked[14:] == [6, 2, 6, 2]
    assert all("answers is damaged and made anew" in said for said in notes.said)
    assert len(notes.said) == 2


def test_other_weights_of_the_same_name_are_another_reference(
    llama: Path, ids: torch.Tensor, folder: Path, tmp_path: Path
) -> None:
    model = save(make_llama().half(), tmp_path / "model")
    first = compress.evaluate(llama, reference=model, text=ids)
    save(make_llama(seed=1).half(), model)
    assert compress.evaluate(llama, reference=model, text=ids).kl_mean > first.kl_mean == 0


def test_a_disk_that_takes_nothing_costs_a_note_and_nothing_else(
    llama: Path, llama_w4: Path, ids: torch.Tensor, folder: Path
) -> None:
    folder.parent.write_text("no folder")
    notes = Notes()
    found = compress.evaluate(llama_w4, reference=llama, text=ids, reporter=notes)
    assert notes.said == [f"predictions of the original are not cached in {folder}: Not a directory"]
    assert found.texts == compress.evaluate(llama_w4, reference=llama, text=ids, cache=False).texts


def test_what_fails_leaves_nothing_behind(llama: Path, ids: torch.Tensor, folder: Path) -> None:
    broken = make_llama()
    with torch.no_grad():
        broken.lm_head.weight.fill_(torch.nan)
    with pytest.raises(compress.CompressError, match="the model gives logits that are not finite numbers"):
        compress.evaluate(broken, reference=llama, text=ids)
    assert list(folder.iterdir()) == []


class OwnHead(torch.nn.Module):
    """No linear layer that anybody knows."""

    def __init__(self, head: torch.nn.Linear) -> None:
        super().__init__()
        self.weight = head.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.weight.T


def test_logits_of_a_head_that_cannot_be_told_are_taken_as_they_come(
    llama: Path, llama_w4: Path, ids: torch.Tensor, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = compress.evaluate(llama_w4, reference=llama, text=ids, cache=False)
    monkeypatch.setattr(predictor, "output_head", lambda model, inputs: (None, "somebody changed it", None))
    notes = Notes()
    found = compress.evaluate(llama_w4, reference=llama, text=ids, reporter=notes)
    assert notes.said == ["predictions of the original are not cached: somebody changed it"]
    assert not folder.exists()
    assert found.kl_mean == pytest.approx(usual.kl_mean, rel=1e-5)
    monkeypatch.undo()
    model = make_llama()
    model.lm_head = OwnHead(model.lm_head)
    own = compress.evaluate(model, reference=make_llama(), text=ids)
    assert own.kl_mean == pytest.approx(0, abs=1e-6)


class Widest(TorchDispatchMode):
    """How many values the largest tensor has whose last axis is the vocabulary; weights are not made here."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.t.default:  # of a weight
            return out
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, torch.Tensor) and each.ndim and each.shape[-1] == VOCABULARY:
                self.most = max(self.most, each.numel())
        return out


def test_there_are_never_more_logits_than_a_chunk(
    llama: Path, llama_w4: Path, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = compress.load(llama_w4, torch.float32, dequantize=True), compress.load(llama, torch.float32)
    monkeypatch.setattr(predictor, "CHUNK_VALUES", 10 * VOCABULARY)
    with Widest() as widest:
        compress.evaluate(models[0], reference=models[1], text=ids)
    assert widest.most == 10 * VOCABULARY
    assert ids.numel() > 4 * 10


# --- the noise floor -----------------------------------------------------------------------------------------------


def test_the_noise_floor_is_the_original_in_its_own_dtype_against_itself_in_float32(
    llama: Path, llama_w4: Path, ids: torch.Tensor, folder: Path, asked: list[int]
) -> None:
    found = compress.evaluate(llama_w4, reference=llama, text=ids, noise_floor=True)
    assert asked == [4], "the exact original is asked once, for the floor and for the model"
    by_hand = compress.evaluate(
        compress.load(llama, torch.float16), reference=compress.load(llama, torch.float32), text=ids
    )
    assert found.texts[0].noise == by_hand.texts[0].figures
    assert 0 < found.texts[0].noise["kl_mean"].value < 0.01 * found.kl_mean
    # In memory, and where the arithmetic is of 16 bits anyway.
    inside = compress.evaluate(llama_w4, reference=compress.load(llama, torch.float16), text=ids, noise_floor=True)
    narrow = compress.evaluate(llama_w4, reference=llama, text=ids, noise_floor=True, dtype=torch.float16)
    for other in (inside, narrow):
        assert other.texts[0].noise == by_hand.texts[0].figures


def test_an_original_of_float32_has_no_floor_and_says_why(ids: torch.Tensor, tmp_path: Path) -> None:
    model = save(make_llama(seed=236), tmp_path / "model")  # of which no other test keeps what it measured
    found = compress.evaluate(model, reference=model, text=ids, noise_floor=True)
    assert found.texts[0].noise is None
    assert found.missing == {
        "sensitivity": "nothing is kept of it: `compress fit` measures it",
        "noise": "the reference is stored in float32, as these figures are: its rounding cannot be told from theirs",
    }
    assert "noise" not in compress.evaluate(model, reference=model, text=ids).missing


def test_a_reference_that_is_kept_needs_no_body(
    llama: Path, ids: torch.Tensor, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compress.evaluate(llama, reference=llama, text=ids)
    made: list[reference_model.Original] = []
    original = reference_model.Original.__init__

    def noted(self: reference_model.Original, *arguments: object, **options: object) -> None:
        original(self, *arguments, **options)
        made.append(self)

    monkeypatch.setattr(reference_model.Original, "__init__", noted)
    compress.evaluate(llama, reference=llama, text=ids)
    assert made[0].asked is None
