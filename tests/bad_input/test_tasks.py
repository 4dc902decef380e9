"""Tasks that cannot be asked: files that are not what they must be, in one line that names the file and the line."""

import json

import pytest
from commands import Desk, command, last_line

import compress
from compress.base.errors import InputError
from compress.evaluation.tasks.questions import read_task

PIQA = {"goal": "Boil it", "sol1": "hot", "sol2": "cold"}
GOOD = json.dumps({"question": "Hot?", "choices": ["no", "yes"], "answer": "no"}) + "\n"
BAD = {
    "empty": ("\n \n", "holds no question"),
    "not UTF-8": (GOOD.encode() + b'{"text": "\xff"}', "line 2 is not UTF-8 (its byte 10)"),
    "not JSON": (GOOD + "\n{", "line 3 is not JSON"),
    "nested": ('{"text": ' + "[" * 5000 + "]" * 5000 + "}", "line 1 cannot be read: nested deeper"),
    "no object": (GOOD + "[1, 2]", "line 2 is [1, 2]; every line must be a JSON object"),
    "unknown keys": (
        '{"prompt": "a"}',
        "line 1 has the keys prompt; a line of a task has one of: goal, sol1, sol2, label; ",
    ),
    "missing key": (GOOD + '{"question": "a", "choices": ["b", "c"]}', "line 2: no key 'answer'"),
    "no labels": (json.dumps(PIQA), "no key 'label'; add it, or put the labels beside it in task-labels.lst"),
    "label too high": (json.dumps({**PIQA, "label": 2}), "line 1: label is 2; allowed: 0 to 1"),
    "label true": (json.dumps({**PIQA, "label": True}), "line 1: label is true; allowed: 0 to 1"),
    "label below": (json.dumps({**PIQA, "label": "-1"}), 'line 1: label is "-1"; allowed'),
    "no such word": (
        GOOD.replace('"answer": "no"', '"answer": "nope"'),
        'answer is "nope"; allowed: 0 to 1, or the words',
    ),
    "no text": ('{"text": 5}', "line 1: text is 5; it must be text"),
    "one word": ('{"text": "alone "}', "line 1: its text has no blank"),
    "one choice": (
        '{"question": "a", "choices": ["b"], "answer": 0}',
        'choices is ["b"]; it must be a list of 2 texts',
    ),
    "empty choice": ('{"question": "a", "choices": ["b", " "], "answer": 0}', "line 1: a choice is empty"),
    "empty context": ('{"ctx": "[x]", "endings": ["a", "b"], "label": 0}', "line 1: its context is empty"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_in_one_line_that_names_the_line(case: str, desk: Desk) -> None:
    content, says = BAD[case]
    path = desk.file("task.jsonl", content)
    outcome = command("evaluate", desk.model, "--task", path)
    assert outcome.code == 2
    assert last_line(outcome).startswith(f"compress: {path}")
    assert says in last_line(outcome)


def test_a_file_of_labels_that_does_not_fit_is_refused(desk: Desk) -> None:
    path = desk.file("valid.jsonl", (json.dumps(PIQA) + "\n") * 9)
    desk.file("valid-labels.lst", "0\n" * 8)
    with pytest.raises(InputError, match=r"valid-labels.lst has 8 labels, .*valid.jsonl 9 questions"):
        read_task(path)
    desk.file("valid-labels.lst", "0\n" * 8 + "2\n")
    with pytest.raises(InputError, match=r'valid.jsonl line 9: label is "2"; allowed: 0 to 1'):
        read_task(path)


def test_tasks_that_cannot_be_asked_are_refused(desk: Desk) -> None:
    path = desk.file("task.jsonl", '{"text": "The end of it"}\n')
    for options, says in (
        ({"tasks": [path, path]}, "is given twice"),
        ({"tasks": str(path)}, "is one; give a list of them"),
        ({"tasks": [desk.here]}, "is a directory; give a regular file"),
        ({"tasks": [desk.here / "no.jsonl"]}, "is no file; give a .jsonl file of questions, or lm-eval:NAME"),
        ({"tasks": [path], "questions": 0}, "questions 0; allowed: 1 or more"),
        ({"questions": 5}, "questions are for tasks, and there is none"),
        ({"tasks": [path], "length": 8}, "length is for text, and there is none"),
    ):
        with pytest.raises(InputError, match=says):
            compress.evaluate(desk.model, **options)
