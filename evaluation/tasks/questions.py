"""Tasks from local JSONL files: questions with their right answers.

A line is a JSON object. The keys of the first line tell the kind of a file; all lines must have them:

    piqa             goal, sol1, sol2, label     label 0 or 1; or a file of labels beside it, as PIQA is published
    hellaswag        ctx, endings, label         label: index from 0; activity_label, ctx_a and ctx_b where there are
    multiple choice  question, choices, answer   answer: index from 0, or the words of a choice
    cloze            text                        the last word is asked for

Every choice follows its context behind one blank. How a question is put in words is that of lm-eval's tasks `piqa`,
`hellaswag` and `lambada_openai`, so that figures compare with published ones; `Kind.protocol` spells it out.

PIQA: Bisk et al. 2020, arXiv 1911.11641. HellaSwag: Zellers et al. 2019, arXiv 1905.07830. LAMBADA: Paperno et al.
2016, arXiv 1606.06031.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from compress.base.errors import InputError
from compress.base.regular_files import json_line, regular
from compress.checkpoint.read.source import path_of

MULTIPLE_CHOICE: Literal["multiple choice"] = "multiple choice"
CLOZE: Literal["cloze"] = "cloze"
SHOWN = 40  # characters of a value in a message
LABEL_FILES = ("-labels.lst", "_labels.lst")
Row = Mapping[str, Any]


class _WrongError(Exception):
    """An error in a line; the reader adds the line's number."""


@dataclass(frozen=True)
class Question:
    """choices: possible continuations of the context, each behind a blank; answer: the index of the right one. where:
    its line."""

    context: str
    choices: tuple[str, ...]
    answer: int
    where: str


@dataclass(frozen=True)
class LineKind:
    """A form of lines. keys: identify it; label: the key of the right answer, which may lie in a file beside it. parse:
    returns the context, the choices and the index of the right one. protocol: its wording and scoring."""

    name: str
    scored: Literal["multiple choice", "cloze"]
    keys: tuple[str, ...]
    label: str | None
    protocol: str
    parse: Callable[[Row], tuple[str, Sequence[str], int]]

    @property
    def needed(self) -> tuple[str, ...]:
        """All keys that a line must have."""
        return self.keys if self.label is None else (*self.keys, self.label)


@dataclass(frozen=True)
class Task:
    """Questions of one file. available: how many the file has."""

    name: str
    kind: LineKind
    questions: tuple[Question, ...]
    available: int

    def fingerprint(self) -> str:
        """sha256 of the questions that are asked, with choices and answers, in their order."""
        asked = [[each.context, each.choices, each.answer] for each in self.questions]
        return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


def read_task(source: str | Path, questions: int | None = None) -> Task:
    """The first `questions` of a file (None: all). Every line is checked, asked for or not.

    Raises InputError, naming the file and the line.
    """
    path = regular(path_of(str(source), "task"), "task")
    if not path.is_file():
        raise InputError(f"task {str(source)!r} is no file; give a .jsonl file of questions, or lm-eval:NAME")
    rows = list(_rows(path))
    if not rows:
        raise InputError(f"{path} holds no question; every line must be a JSON object")
    kind = _kind_of(rows[0][1], f"{path} line {rows[0][0]}")
    labels = None
    if kind.label is not None and kind.label not in rows[0][1]:
        labels = _labels(path, kind.label, len(rows))
    parsed = []
    for i, (number, row) in enumerate(rows):
        line = row if labels is None else {**row, str(kind.label): labels[i]}
        try:
            parsed.append(_question(kind, line, f"{path} line {number}"))
        except _WrongError as wrong:
            raise InputError(f"{path} line {number}: {wrong}") from None
    return Task(path.stem, kind, tuple(parsed[:questions]), len(parsed))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, text) of the lines of a file that are not empty."""
    try:
        content = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    for number, line in enumerate(content.split(b"\n"), 1):
        try:
            text = line.decode().strip()
        except UnicodeDecodeError as error:
            raise InputError(f"{path} line {number} is not UTF-8 (its byte {error.start}); convert it first") from None
        if text:
            yield number, text


def _rows(path: Path) -> Iterator[tuple[int, Row]]:
    for number, line in _lines(path):
        row = json_line(line, f"{path} line {number}", "; every line must be a JSON object")
        if not isinstance(row, dict):
            raise InputError(f"{path} line {number} is {quote(row)}; every line must be a JSON object")
        yield number, row


def _kind_of(row: Row, where: str) -> LineKind:
    for kind in KINDS:
        if set(kind.keys) <= row.keys():
            return kind
    allowed = "; ".join(", ".join(kind.needed) for kind in KINDS)
    raise InputError(f"{where} has the keys {', '.join(row) or '(none)'}; a line of a task has one of: {allowed}")


def _labels(path: Path, label: str, rows: int) -> list[str]:
    """The lines of the file of labels beside a file of questions."""
    beside = [path.with_name(path.stem + ending) for ending in LABEL_FILES]
    file = next((each for each in beside if each.is_file()), None)
    if file is None:
        names = " or ".join(each.name for each in beside)
        raise InputError(f"{path} line 1 has no key {label!r}; add it, or put the labels beside it in {names}")
    labels = [text for _, text in _lines(file)]
    if len(labels) != rows:
        raise InputError(f"{file} has {len(labels)} labels, {path} {rows} questions; there must be one for each")
    return labels


def _question(kind: LineKind, row: Row, where: str) -> Question:
    for key in kind.needed:
        if key not in row:
            raise _WrongError(f"no key {key!r}; its first line makes this a file of {kind.name}, which needs it")
    context, choices, answer = kind.parse(row)
    if not context.strip():
        raise _WrongError("its context is empty; there must be something for an answer to follow")
    for choice in choices:
        if not choice.strip():
            raise _WrongError("a choice is empty; there must be something to follow the context")
    return Question(context, tuple(choices), answer, where)


def _index(row: Row, key: str, choices: Sequence[str], otherwise: str = "") -> int:
    """The right choice: a number, or the digits of one."""
    label = row[key]
    number = int(label) if isinstance(label, str) and re.fullmatch(r"[0-9]{1,9}", label) else label
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(choices):
        raise _WrongError(f"{key} is {quote(label)}; allowed: 0 to {len(choices) - 1}{otherwise}")
    return number


def _text(row: Row, key: str) -> str:
    if not isinstance(row[key], str):
        raise _WrongError(f"{key} is {quote(row[key])}; it must be text")
    return str(row[key])


def _texts(row: Row, key: str) -> list[str]:
    value = row[key]
    if not isinstance(value, list) or len(value) < 2 or not all(isinstance(each, str) for each in value):
        raise _WrongError(f"{key} is {quote(value)}; it must be a list of 2 texts or more")
    return value


def quote(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def _piqa(row: Row) -> tuple[str, Sequence[str], int]:
    choices = [_text(row, "sol1"), _text(row, "sol2")]
    return f"Question: {_text(row, 'goal')}\nAnswer:", choices, _index(row, "label", choices)


def _hellaswag(row: Row) -> tuple[str, Sequence[str], int]:
    context, endings = _text(row, "ctx"), _texts(row, "endings")
    if {"ctx_a", "ctx_b"} <= row.keys():
        context = f"{_text(row, 'ctx_a')} {_text(row, 'ctx_b').capitalize()}"
    if "activity_label" in row:
        context = f"{_text(row, 'activity_label')}: {context}"
    return _plain(context), [_plain(each) for each in endings], _index(row, "label", endings)


def _plain(text: str) -> str:
    """HellaSwag's text without the bracketed markup of its source, WikiHow."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _choices(row: Row) -> tuple[str, Sequence[str], int]:
    choices, answer = _texts(row, "choices"), row["answer"]
    worded = isinstance(answer, str) and answer in choices
    index = choices.index(answer) if worded else _index(row, "answer", choices, ", or the words of a choice")
    return f"Question: {_text(row, 'question')}\nAnswer:", choices, index


def _cloze(row: Row) -> tuple[str, Sequence[str], int]:
    context, _, word = _text(row, "text").rstrip().rpartition(" ")
    if not context:
        raise _WrongError("its text has no blank; it must have 2 words or more, the last of which is asked for")
    return context, [word], 0


_CHOSEN = "chosen: the highest log-probability (accuracy), or the highest per character (accuracy_norm)"
_WORD = "the last word behind the text before it; right where each of its tokens is the most probable one"
KINDS = (
    LineKind(
        "piqa", MULTIPLE_CHOICE, ("goal", "sol1", "sol2"), "label", f"'Question: GOAL\\nAnswer:'; {_CHOSEN}", _piqa
    ),
    LineKind("hellaswag", MULTIPLE_CHOICE, ("ctx", "endings"), "label", f"'ACTIVITY: CTX'; {_CHOSEN}", _hellaswag),
    LineKind(
        MULTIPLE_CHOICE,
        MULTIPLE_CHOICE,
        ("question", "choices"),
        "answer",
        f"'Question: QUESTION\\nAnswer:'; {_CHOSEN}",
        _choices,
    ),
    LineKind(CLOZE, CLOZE, ("text",), None, _WORD, _cloze),
)
