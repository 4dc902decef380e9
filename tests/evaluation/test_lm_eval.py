"""Tasks of lm-eval on our models: the same answers as our own scorer gives on the same rows.

Needs the `eval` extra; skips, saying so, where it is missing. No network: the tasks are defined here.
"""

import json
import os
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from asking import answered
from commands import VOCABULARY, command, make_llama
from places import SHARED

import compress
from compress.base.errors import CompressError, InputError
from compress.checkpoint.read.pretrained import load_tokenizer
from compress.checkpoint.read.source import DEMO, find_source
from compress.evaluation.tasks import evaluate as evaluating
from compress.evaluation.tasks import lm_eval as adapter
from compress.evaluation.tasks.evaluate import ask_tasks, prepare_tasks, read_tasks
from compress.evaluation.tasks.lm_eval import read_harness, wrapped

TEXT = (DEMO / "heldout.txt").read_text(encoding="utf-8").split()
HEAD = "task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {rows}}}}}\ntest_split: test\n"
METRIC = "  - {{metric: {0}, aggregation: {1}, higher_is_better: {2}}}\n"
CHOICE = r"""output_type: multiple_choice
doc_to_text: "Question: {{goal}}\nAnswer:"
doc_to_target: label
doc_to_choice: "{{[sol1, sol2]}}"
metric_list:
"""
WORD = r"""output_type: loglikelihood
doc_to_text: "{{text.split(' ')[:-1]|join(' ')}}"
doc_to_target: "{{' ' + text.split(' ')[-1]}}"
metric_list:
"""
GENERATED = r"""output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{said}}"
generation_kwargs: {until: ["<|endoftext|>"], max_gen_toks: 2, do_sample: false}
metric_list:
"""
FILTERS = r"""filter_list:
  - {name: plain, filter: [{function: take_first}]}
  - {name: never, filter: [{function: regex, regex_pattern: "(no such words)"}, {function: take_first}]}
"""


@pytest.fixture(scope="module")
def lm_eval() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with warnings.catch_warnings():  # of what lm-eval imports
        warnings.simplefilter("ignore")
        pytest.importorskip("lm_eval", reason="needs the eval extra (lm-eval), which is not installed")
        import lm_eval.models.huggingface  # noqa: F401
        import lm_eval.tasks  # noqa: F401


def defined(folder: Path, name: str, rows: list[dict], body: str, *metrics: tuple[str, str, str]) -> tuple[Path, Path]:
    """A file of questions, and a task of lm-eval about it."""
    path, task = folder / f"{name}.jsonl", folder / f"{name}.yaml"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    listed = "".join(METRIC.format(*each) for each in metrics).replace("{{", "{").replace("}}", "}")
    task.write_text(HEAD.format(name=f"our_{name}", rows=path) + body + listed)
    return path, task


def both(folder: Path, piqa: list[dict], lambada: list[dict]) -> list[str]:
    """Two files of questions, each followed by lm-eval's task about it."""
    accuracy, norm = ("acc", "mean", "true"), ("acc_norm", "mean", "true")
    one = defined(folder, "piqa", piqa, CHOICE, accuracy, norm)
    other = defined(folder, "lambada", lambada, WORD, ("perplexity", "perplexity", "false"), accuracy)
    return [str(one[0]), f"lm-eval:{one[1]}", str(other[0]), f"lm-eval:{other[1]}"]


def same(found: list) -> None:
    """What pairs of results say that do not depend on who asked."""
    for ours, theirs in zip(found[::2], found[1::2], strict=True):
        assert theirs.kind == "lm-eval"
        for field in ("metric", "questions", "available", "outcomes", "reference_outcomes", "accuracy", "interval"):
            assert getattr(ours, field) == getattr(theirs, field), field
        for field in ("accuracy_norm", "reference_accuracy", "difference_norm", "gained", "lost", "p_value"):
            assert getattr(ours, field) == getattr(theirs, field), field
        assert (ours.perplexity is None) == (theirs.perplexity is None)
        if ours.perplexity is not None:
            assert ours.perplexity.value == pytest.approx(theirs.perplexity.value, rel=1e-4)
            assert ours.log_perplexity_ratio.value == pytest.approx(theirs.log_perplexity_ratio.value, abs=1e-4)


@pytest.mark.usefixtures("lm_eval")
def test_sets_name_tasks_that_lm_eval_has() -> None:
    from lm_eval.tasks import TaskManager

    assert {name for names in evaluating.SETS.values() for name in names} <= TaskManager().task_index.keys()


def test_a_set_is_its_tasks(monkeypatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        evaluating, "read_harness", lambda name, questions: asked.append(name) or SimpleNamespace(name=name)
    )
    read_tasks(["lm-eval:quick", "lm-eval:gsm8k"])
    assert tuple(asked) == (*evaluating.QUICK, "gsm8k")
    with pytest.raises(InputError, match="'lm-eval:piqa' is given twice"):
        read_tasks(["lm-eval:standard", "lm-eval:piqa"])


@pytest.mark.usefixtures("lm_eval")
@pytest.mark.filterwarnings("ignore")
def test_lm_eval_answers_as_our_scorer_on_compressed_and_original(tmp_path, llama, llama_w4) -> None:
    piqa = [
        {"goal": " ".join(TEXT[i : i + 4]), "sol1": TEXT[i + 5], "sol2": " ".join(TEXT[i + 7 : i + 9]), "label": i % 2}
        for i in range(24)
    ]
    lambada = [{"text": " ".join(TEXT[i : i + 8])} for i in range(12)]
    lambada.append({"text": " ".join(TEXT[:90])})  # longer than the window
    models = [compress.load(path, torch.float32) for path in (llama_w4, llama)]  # packed, and dense
    tasks = read_tasks(both(tmp_path, piqa, lambada), 20)
    tokenizer = load_tokenizer(find_source(str(llama)))
    found = answered(prepare_tasks(tasks, tokenizer, [each.config for each in models]), *models)
    same(found)
    assert [each.questions for each in found] == [20, 20, 13, 13]
    assert found[2].truncated == 1
    assert found[3].truncated is None  # lm-eval does not say
    assert len({each.sha256 for each in found}) == 4
    assert not models[0].training


@pytest.mark.usefixtures("lm_eval")
@pytest.mark.filterwarnings("ignore")
def test_a_reference_answers_a_task_once_unless_it_changed(tmp_path, llama, llama_w4, monkeypatch) -> None:
    rows, asked = [{"text": " ".join(TEXT[i : i + 6])} for i in range(5)], []
    inner = evaluating.ask
    monkeypatch.setattr(evaluating, "ask", lambda *a: (asked.append(a[0].name), inner(*a))[1])
    path, task = defined(tmp_path, "words", rows, WORD, ("acc", "mean", "true"))
    for before, rows_ in ((2, rows), (3, rows), (5, rows[1:])):  # asked in all
        path.write_text("".join(json.dumps(row) + "\n" for row in rows_))
        compress.evaluate(llama_w4, reference=llama, tasks=[f"lm-eval:{task}"])
        assert len(asked) == before
    task.write_text(task.read_text() + "num_fewshot: 1\nfewshot_split: test\n")
    (asked_with_examples,) = read_tasks([f"lm-eval:{task}"])
    assert asked_with_examples.fingerprint() is None


@pytest.mark.usefixtures("lm_eval")
@pytest.mark.filterwarnings("ignore")
def test_a_command_runs_a_task_of_lm_eval_and_refuses_those_that_it_cannot(tmp_path, llama) -> None:
    rows = [{"text": " ".join(TEXT[i : i + 6])} for i in range(5)]
    _, task = defined(tmp_path, "words", rows, WORD, ("acc", "mean", "true"))
    outcome = command("evaluate", llama, "--task", f"lm-eval:{task}", "--questions", 3, "--json", "-")
    assert outcome.code == 0, outcome.err
    (found,) = outcome.json()["tasks"]
    assert (found["name"], found["questions"], found["available"]) == ("our_words", 3, 5)
    assert found["protocol"].endswith("0 examples before a question")
    _, surprisal = defined(tmp_path, "alone", rows, WORD, ("perplexity", "perplexity", "false"))
    task.write_text(task.read_text().replace(str(tmp_path / "words.jsonl"), str(tmp_path / "gone.jsonl")))
    for name, says in ((surprisal, "has no figure for each question of which more is better"), (task, "cannot be")):
        outcome = command("evaluate", llama, "--task", f"lm-eval:{name}")
        assert outcome.code == 2, outcome
        assert says in outcome.err.splitlines()[-1], outcome.err


@pytest.mark.usefixtures("lm_eval")
@pytest.mark.filterwarnings("ignore")
def test_tasks_that_generate_are_read_in_every_way_that_they_have(tmp_path, llama_w4) -> None:
    """Two filters of one task are two results; the words are those that the model itself goes on with."""
    rows = [{"text": " ".join(TEXT[i : i + 6])} for i in range(4)]
    _, task = defined(tmp_path, "words", rows, GENERATED, ("exact_match", "mean", "true"))
    task.write_text(task.read_text() + FILTERS)
    model, tokenizer = compress.load(llama_w4, torch.float32), load_tokenizer(find_source(str(llama_w4)))
    ids = [tokenizer(row["text"], return_tensors="pt").input_ids for row in rows]
    said = [
        tokenizer.decode(model.generate(each, max_new_tokens=2, do_sample=False)[0, each.shape[1] :]) for each in ids
    ]
    rows = [{**row, "said": said[i] if i < 3 else "-"} for i, row in enumerate(rows)]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared = prepare_tasks([read_harness(str(task))], tokenizer, [model.config])
    found = answered(prepared, model)
    assert [(each.name, each.metric) for each in found] == [
        ("our_words (plain)", "exact_match"),
        ("our_words (never)", "exact_match"),
    ]
    assert [each.outcomes for each in found] == ["1110", "0000"]


@pytest.mark.usefixtures("lm_eval")
@pytest.mark.filterwarnings("ignore")
def test_a_damaged_model_is_said_to_be(tmp_path, llama) -> None:
    model = make_llama()
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    _, task = defined(tmp_path, "words", [{"text": " ".join(TEXT[:6])}], WORD, ("acc", "mean", "true"))
    prepared = prepare_tasks([read_harness(str(task))], load_tokenizer(find_source(str(llama))), [model.config])
    with pytest.raises(CompressError, match="not finite numbers"):
        ask_tasks(prepared, model, lambda more, name: None)
    assert wrapped(model, prepared.tokenizer, 2).batch_size == 2
    assert model.config.vocab_size == VOCABULARY


@pytest.mark.slow
@pytest.mark.usefixtures("lm_eval")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(not SHARED.is_dir(), reason=f"needs {SHARED}")
def test_published_questions_are_answered_alike_by_a_trained_model(tmp_path) -> None:
    rows = [json.loads(line) for line in (SHARED / "text/piqa/piqa_valid.jsonl").read_text().splitlines()[:40]]
    labels = (SHARED / "text/piqa/piqa_valid_labels.lst").read_text().split()
    lambada = [json.loads(line) for line in (SHARED / "text/lambada/lambada_test.jsonl").read_text().splitlines()[:20]]
    tasks = both(tmp_path, [{**row, "label": int(n)} for row, n in zip(rows, labels, strict=False)], lambada)
    same(
        compress.evaluate(SHARED / "models/ts-llama-3.7m", reference=SHARED / "models/ts-llama-3.7m", tasks=tasks).tasks
    )


def test_without_the_extra_the_command_says_what_to_install(llama, monkeypatch) -> None:
    monkeypatch.setattr(adapter, "find_spec", lambda name: None)
    with pytest.raises(
        InputError,
        match=r"lm-eval:piqa needs the eval extra; in the checkout of compress run: pip install -e '\.\[eval\]'",
    ):
        compress.evaluate(llama, tasks=["lm-eval:piqa"])
