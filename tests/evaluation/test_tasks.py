"""Questions from files: how they are read, and every log-probability and figure against a plain computation."""

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from asking import answered
from commands import CONTEXT, HIDDEN, VOCABULARY, Largest, command, make_llama
from models import build
from torch.nn import functional

import compress
from compress.base.errors import CompressError, InputError
from compress.checkpoint.read.pretrained import load_tokenizer
from compress.checkpoint.read.source import DEMO, find_source
from compress.evaluation.evaluation_file import read_evaluation
from compress.evaluation.quality.exact_intervals import clopper_pearson
from compress.evaluation.report.verdict import verdict
from compress.evaluation.tasks import likelihood
from compress.evaluation.tasks.evaluate import prepare_tasks, read_tasks
from compress.evaluation.tasks.likelihood import ContinuationPair, count_appended, encode, likelihoods
from compress.evaluation.tasks.questions import read_task

WORDS = (DEMO / "heldout.txt").read_text(encoding="utf-8").split()
PIQA = [
    {"goal": " ".join(WORDS[i : i + 5]), "sol1": WORDS[i + 9], "sol2": f"{WORDS[i]} a {WORDS[i + 7]}"} for i in range(9)
]
ROWS = {
    "piqa": [{**row, "label": i % 2} for i, row in enumerate(PIQA)],
    "hellaswag": [
        {"ctx": r["goal"], "endings": [r["sol1"], r["sol2"], "so"], "label": str(i % 3)} for i, r in enumerate(PIQA)
    ],
    "choices": [{"question": r["goal"], "choices": ["no", r["sol1"]], "answer": "no"} for r in PIQA],
    "cloze": [{"text": " ".join(WORDS[i : i + 6 + i % 4])} for i in range(9)],
}


@pytest.fixture(scope="module")
def tokenizer() -> object:
    return load_tokenizer(find_source("demo"))


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(rows: list[object] | str | bytes, name: str = "task.jsonl") -> Path:
        path = tmp_path / name
        if isinstance(rows, list):
            rows = "".join(json.dumps(row) + "\n" for row in rows)
        path.write_bytes(rows if isinstance(rows, bytes) else rows.encode())
        return path

    return write


def plain(model: torch.nn.Module, tokenizer: object, context: str, continuation: str) -> tuple[float, bool]:
    """log p and whether it is greedy, one text at a time, token by token, in float64."""
    before = tokenizer(context).input_ids
    ids = tokenizer(context + continuation).input_ids
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double()
    total, greedy = 0.0, True
    for at in range(len(before), len(ids)):
        total += float(functional.log_softmax(logits[at - 1], -1)[ids[at]])
        greedy &= int(logits[at - 1].argmax()) == ids[at]
    return total, greedy


# --- log-probabilities ---------------------------------------------------------------------------------------------


def random_pairs(sizes: list[tuple[int, int]], vocabulary: int = 96) -> list[ContinuationPair]:
    draw = torch.Generator().manual_seed(3)
    ids = [torch.randint(vocabulary, (a + b,), generator=draw).tolist() for a, b in sizes]
    return [ContinuationPair(row[:a], row[a:]) for row, (a, _) in zip(ids, sizes, strict=True)]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2", "opt"])
def test_log_probabilities_are_sums_over_continuations_whatever_shares_the_batch(kind: str) -> None:
    model = build(kind)
    pairs = random_pairs([(5, 3), (1, 1), (20, 2), (4, 9), (7, 1)])
    found = likelihoods(model, pairs)
    for pair, (log_prob, greedy) in zip(pairs, found, strict=True):
        ids = pair.context + pair.continuation
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].double()
        rows = functional.log_softmax(logits[len(pair.context) - 1 : -1], -1)
        expected = sum(float(row[token]) for row, token in zip(rows, pair.continuation, strict=True))
        assert log_prob == pytest.approx(expected, abs=1e-5)
        assert greedy == (rows.argmax(-1).tolist() == pair.continuation)
        assert likelihoods(model, [pair])[0].log_prob == pytest.approx(log_prob, abs=1e-5)


def test_the_most_probable_tokens_are_greedy_and_others_are_not() -> None:
    model, context = build("llama"), [5, 6, 7]
    ids = list(context)
    with torch.no_grad():
        for _ in range(3):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    wrong = [*ids[:-2], (ids[-2] + 1) % 96, ids[-1]]
    found = likelihoods(model, [ContinuationPair(context, each[3:]) for each in (ids, wrong)])
    assert [each.greedy for each in found] == [True, False]


def test_no_logits_but_those_of_continuations_are_made_and_those_a_chunk_at_a_time(monkeypatch) -> None:
    model = make_llama()
    pairs = random_pairs([(40, 3)] * 8, VOCABULARY)
    monkeypatch.setattr(likelihood, "CHUNK_VALUES", 4 * VOCABULARY)
    with Largest() as seen:
        found = likelihoods(model, pairs)
    assert seen.elements == HIDDEN * VOCABULARY  # a view of the head's weight; all logits would be 5 times as many
    monkeypatch.setattr(likelihood, "output_head", lambda model, inputs: (None, "", model(**inputs).logits))
    monkeypatch.setattr(likelihood, "LOGIT_VALUES", 2 * 42 * VOCABULARY)
    with Largest() as seen:
        whole = likelihoods(model, pairs)
    assert seen.elements <= 2 * 42 * VOCABULARY
    assert [each.log_prob for each in found] == pytest.approx([each.log_prob for each in whole], abs=1e-4)


def test_logits_that_are_no_numbers_are_said_to_be(tokenizer: object) -> None:
    model = build("llama")
    with torch.no_grad():
        model.model.norm.weight.fill_(math.nan)
    with pytest.raises(CompressError, match="not finite numbers"):
        likelihoods(model, random_pairs([(5, 3)]))


def test_blanks_at_the_end_of_a_context_belong_to_what_follows(tokenizer: object) -> None:
    one, other = (encode(tokenizer, a, b, None, "") for a, b in (("the end ", "of it"), ("the end", " of it")))
    assert one == other
    assert one.context + one.continuation == tokenizer("the end of it").input_ids
    assert one.context == tokenizer("the end").input_ids


class Ending:
    """Words as tokens, 1 before every text and 2 behind it."""

    def encode(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> list[int]:
        ids = [3 + len(word) for word in text.split()]
        return [1, *ids, 2] if add_special_tokens else ids


def test_what_a_tokenizer_puts_behind_every_text_is_not_between_context_and_answer() -> None:
    behind = count_appended(Ending(), "a bb")
    assert behind == 1
    assert encode(Ending(), "a bb", " ccc d", None, "", behind) == ContinuationPair([1, 4, 5], [6, 4])


def test_a_long_context_loses_its_beginning_and_an_answer_longer_than_the_window_is_refused(tokenizer: object) -> None:
    context, answer = " ".join(WORDS[:80]), f" {WORDS[80]}"
    whole = encode(tokenizer, context, answer, None, "")
    cut = encode(tokenizer, context, answer, CONTEXT, "")
    assert len(cut.read) == CONTEXT
    assert cut.lost == len(whole.read) - CONTEXT > 0
    assert whole.read[cut.lost :] == cut.read
    with pytest.raises(InputError, match=r"here: an answer has \d+ tokens, the model reads at most 64"):
        encode(tokenizer, answer, f" {context}", CONTEXT, "here")


# --- files ---------------------------------------------------------------------------------------------------------


def test_questions_are_put_as_lm_eval_puts_them(write) -> None:
    piqa = read_task(write([{"goal": "Boil it", "sol1": "hot ", "sol2": "cold", "label": 1}]))
    assert piqa.questions[0].context == "Question: Boil it\nAnswer:"
    assert (piqa.questions[0].choices, piqa.questions[0].answer) == (("hot ", "cold"), 1)
    row = {"ctx": "", "ctx_a": "A man [x] sits.", "ctx_b": "he [title] eats", "activity_label": "Eating"}
    swag = read_task(write([{**row, "endings": ["so [title] on", " b  c "], "label": "0"}])).questions[0]
    assert swag.context == "Eating: A man sits. He. eats"
    assert swag.choices == ("so. on", "b c")
    cloze = read_task(write([{"text": "He said\nthe end \n"}])).questions[0]
    assert (cloze.context, cloze.choices) == ("He said\nthe", ("end",))
    generic = read_task(write([{"question": "1 + 1?", "choices": ["3", "2", "1"], "answer": a} for a in (1, "2", "0")]))
    assert [each.answer for each in generic.questions] == [1, 1, 0]


def test_labels_may_lie_beside_the_questions(write) -> None:
    path = write(PIQA, "valid.jsonl")
    write("".join(f"{i % 2}\n" for i in range(9)), "valid-labels.lst")
    labelled = write(ROWS["piqa"], "other.jsonl")
    assert read_task(path).fingerprint() == read_task(labelled).fingerprint()
    assert read_task(path, 3).fingerprint() == read_task(labelled, 3).fingerprint() != read_task(path).fingerprint()
    assert [len(read_task(path, n).questions) for n in (None, 3, 100)] == [9, 3, 9]


# --- figures -------------------------------------------------------------------------------------------------------


def test_figures_are_those_of_a_plain_computation(write, tokenizer: object, llama: Path, llama_w4: Path) -> None:
    paths = [write(rows, f"{name}.jsonl") for name, rows in ROWS.items()]
    found = compress.evaluate(llama_w4, reference=llama, tasks=paths)
    assert found.texts == []
    assert found.missing["texts"] == "no text was given"
    models = [compress.load(path, torch.float32, dequantize=path == llama_w4) for path in (llama_w4, llama)]
    for path, result in zip(paths, found.tasks, strict=True):
        task = read_task(path)
        right, norm, surprisal = ([], []), ([], []), ([], [])
        for i, model in enumerate(models):
            for question in task.questions:
                said = [plain(model, tokenizer, question.context, f" {choice}") for choice in question.choices]
                log_probs = [log_prob for log_prob, _ in said]
                shares = [p / len(choice) for p, choice in zip(log_probs, question.choices, strict=True)]
                surprisal[i].append(-log_probs[0])
                cloze = len(said) == 1
                right[i].append(said[0][1] if cloze else log_probs.index(max(log_probs)) == question.answer)
                norm[i].append(shares.index(max(shares)) == question.answer)
        ours, theirs = (np.array(each, float) for each in right)
        difference = ours - theirs
        assert (result.name, result.questions, result.available, result.truncated) == (path.stem, 9, 9, 0)
        assert result.accuracy.value == ours.mean()
        assert result.accuracy.error == (pytest.approx(ours.std(ddof=1) / 3) if ours.std() else None)
        assert result.accuracy.interval == clopper_pearson(int(ours.sum()), 9)
        assert result.reference_accuracy.value == theirs.mean()
        assert result.difference.value == pytest.approx(difference.mean())
        assert result.difference.error == (pytest.approx(difference.std(ddof=1) / 3) if difference.std() else None)
        assert result.interval == result.difference.interval
        assert (result.gained, result.lost) == ((difference > 0).sum(), (difference < 0).sum())
        assert result.outcomes == "".join(str(int(each)) for each in ours)
        assert result.reference_outcomes == "".join(str(int(each)) for each in theirs)
        if path.stem == "cloze":
            assert result.accuracy_norm is None
            assert result.perplexity.value == pytest.approx(math.exp(np.mean(surprisal[0])), rel=1e-4)
            ratio = np.subtract(*surprisal)
            assert result.log_perplexity_ratio.value == pytest.approx(ratio.mean(), abs=1e-5)
            assert result.log_perplexity_ratio.error == pytest.approx(ratio.std(ddof=1) / 3, rel=1e-3)
        else:
            assert result.perplexity is None
            assert result.accuracy_norm.value == np.mean(norm[0])
            assert result.difference_norm.value == pytest.approx(np.mean(norm[0]) - np.mean(norm[1]))


def test_what_is_cut_is_counted_and_the_smaller_window_counts_for_both(write, tokenizer: object) -> None:
    rows = [{"text": " ".join(WORDS[: n + 1])} for n in (10, 70, 90)]
    tasks = read_tasks([write(rows)])
    assert tasks[0].name == "task"
    models = [make_llama(), make_llama(1, max_position_embeddings=16)]
    prepared = prepare_tasks(tasks, tokenizer, [each.config for each in models])
    assert max(len(pair.read) for pair in prepared.pairs[0]) == 16
    (both,) = answered(prepared, *models)
    (alone,) = answered(prepare_tasks(tasks, tokenizer, [models[0].config]), models[0])
    lengths = [len(tokenizer(row["text"]).input_ids) - 1 for row in rows]
    assert (both.truncated, alone.truncated) == (sum(n > 16 for n in lengths), sum(n > CONTEXT for n in lengths))
    (single,) = answered(prepare_tasks(read_tasks([write(rows)], 1), tokenizer, [models[0].config]), *models)
    assert (single.difference.error, single.p_value) == (None, 1.0)
    assert single.interval == pytest.approx((-0.995, 0.995))
    assert (alone.difference, alone.interval, alone.p_value, alone.p_adjusted) == (None, None, None, None)


def test_files_of_one_name_are_called_by_their_paths(write, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    paths = [write(ROWS["cloze"]), write(ROWS["piqa"], "other/task.jsonl"), write(ROWS["piqa"], "third.jsonl")]
    assert [each.name for each in read_tasks(paths)] == [str(paths[0]), str(paths[1]), "third"]


def test_the_command_writes_reads_back_and_shows_what_was_answered(write, llama: Path, tmp_path: Path) -> None:
    paths = [write(ROWS[name], f"{name}.jsonl") for name in ("piqa", "cloze")]
    words = ["--task", paths[0], "--task", paths[1], "--questions", 4, "--reference", llama]
    outcome = command("evaluate", llama, *words, "--details", "--json", tmp_path / "found.json")
    assert outcome.code == 0, outcome.err
    found = read_evaluation(tmp_path / "found.json")
    assert [(each.name, each.questions, each.available, each.p_adjusted) for each in found.tasks] == [
        ("piqa", 4, 9, 1.0),
        ("cloze", 4, 9, 1.0),
    ]
    same = pytest.approx((-0.7341, 0.7341), abs=1e-4)  # of 4 questions with the same answers, 1 - 0.005^(1/4) at most
    assert found.tasks[0].interval == found.tasks[1].interval == same
    assert "-73.41 to +73.41" in outcome.out
    assert "0 (0 to 60.2) %" in outcome.out
    assert "± 0.00" not in outcome.out
    assert "Too few questions to tell: piqa (4), cloze (4)." in verdict(found)
    assert "+0 / -0" in outcome.out
    assert "cloze: perplexity" in outcome.out
    assert asdict(found)["texts"] == []


def test_a_text_and_a_task_are_measured_together_as_each_alone(write, llama, llama_w4, token_file) -> None:
    path, beside = write(ROWS["cloze"]), {"reference": llama}
    both = compress.evaluate(llama_w4, text=str(token_file), tasks=[path], **beside)
    assert both.tasks == compress.evaluate(llama_w4, tasks=[path], **beside).tasks
    assert both.perplexity == compress.evaluate(llama_w4, text=str(token_file), **beside).perplexity
    assert "texts" not in both.missing


def test_models_in_memory_are_asked_with_a_tokenizer_that_is_given(write, tokenizer: object) -> None:
    path = write(ROWS["cloze"])
    found = compress.evaluate(make_llama(), tasks=[path], tokenizer=tokenizer)
    assert found.tasks[0].questions == 9
    with pytest.raises(InputError, match="a model in memory has no tokenizer"):
        compress.evaluate(make_llama(), tasks=[path])
