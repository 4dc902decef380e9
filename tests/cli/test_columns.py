"""The commands on a terminal of 80 columns: no line is longer, and no word is split."""

import re
from pathlib import Path

import pytest
from commands import command

from compress.cli.main import cli

WIDTH, WIDE = 80, 2000
ESCAPES = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]")
RULES = re.compile(r"[\u2500-\u257f]+")
COMMANDS = {
    "plan": ("plan", "{model}", "--method", "rtn", "--scheme", "w4a16", "--group-size", "32"),
    "quantize": ("quantize", "{model}", "--method", "rtn", "--group-size", "32", "--output", "{name}"),
    "evaluate": ("evaluate", "{packed}", "--reference", "{model}", "--text", "{tokens}", "--no-keep"),
    "details": (
        *("evaluate", "{packed}", "--reference", "{model}", "--text", "{tokens}", "--no-keep", "--details"),
        *("--answers", "2", "--answer-tokens", "8"),
    ),
    "inspect": ("inspect", "{packed}"),
    "kernels": ("inspect", "{packed}", "--kernels"),
    "layouts": ("export", "{packed}", "--list"),
    "methods": ("methods",),
    "card": ("methods", "gptq"),
    "recipes": ("recipes",),
}


def words(text: str) -> set[str]:
    """The words of an output, without what tables and lists put around them."""
    return {word.strip(";,:.()") for word in RULES.sub(" ", ESCAPES.sub("", text)).split()}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_line_is_longer_than_the_terminal_and_no_word_is_split(
    name: str, llama: Path, llama_w4: Path, token_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = {"model": llama, "packed": llama_w4, "tokens": token_file, "name": "o" * 30}
    monkeypatch.chdir(tmp_path)
    asked = [word.format(**places) for word in COMMANDS[name]]
    said = []
    for width in (WIDE, WIDTH):
        for variable, value in (("COLUMNS", str(width)), ("FORCE_COLOR", "1"), ("NO_COLOR", "1")):
            monkeypatch.setenv(variable, value)
        outcome = command(*asked, *(("--overwrite",) if name == "quantize" else ()))
        assert outcome.code == 0, outcome
        said.append(outcome.out.partition("next:")[0])  # commands stay whole, to be copied
    wide, narrow = said
    lines = [ESCAPES.sub("", line) for line in narrow.splitlines()]
    assert max(map(len, lines)) <= WIDTH
    parts = {word for word in words(narrow) if not re.search(r"\d", word)}  # figures of two runs may differ
    assert parts <= words(wide)  # a word that is split leaves parts that are no words


@pytest.mark.parametrize("name", ["", *cli.commands])
def test_help_fits_80_columns(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    lines = command(*filter(None, (name,)), "--help").out.splitlines()
    assert [line for line in lines if len(line) > WIDTH] == []
