"""What a person meets first: a line at once, words of all commands, colours and completion as a shell asks for them."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from commands import Outcome, command
from rich.text import Text

from compress.base.terminal import PlainConsole
from compress.cli import start_line
from compress.cli.main import cli
from compress.passes.protocol.recipe import BUILT_IN, PASSES

EVERY = sorted(cli.commands)


@pytest.mark.parametrize("name", EVERY)
def test_every_command_can_be_quiet_and_answer_in_json(name: str) -> None:
    options = {word for parameter in cli.commands[name].params for word in parameter.opts}
    assert {"--quiet", "--json"} <= options


SLOW_LIBRARY = """
import contextlib, sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            time.sleep(1)
            raise ImportError
sys.meta_path.insert(0, Slow())
import click
from compress.cli import start_line
start_line.PATIENCE_S = 0.2
sys.stderr.isatty = lambda: TERMINAL
with click.Context(click.Command("c")), start_line.announce(), contextlib.suppress(ImportError):
    import torch
"""


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_is_told_of_libraries_that_take_long_to_load(terminal: bool) -> None:
    program = SLOW_LIBRARY.replace("TERMINAL", str(terminal))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", f"{start_line.LINE}\n" if terminal else "")


def test_methods_and_recipes_answer_in_json(tmp_path: Path) -> None:
    assert list(command("methods", "--json", "-").json()["methods"]) == list(PASSES)
    assert list(command("recipes", "--json", "-").json()["recipes"]) == list(BUILT_IN)
    card = command("methods", "gptq", "--json", "-").json()
    assert "damp" in [option["name"] for option in card["options"]]
    name = min(BUILT_IN)
    assert command("recipes", name, "--json", "-").json()["yaml"] == BUILT_IN[name].read_text(encoding="utf-8")
    file = tmp_path / "methods.json"
    assert command("methods", "--json", file, "--quiet") == Outcome(0, "", "")
    assert json.loads(file.read_text(encoding="utf-8"))["methods"]["rtn"]
    assert command("methods", "--json", file).code == 2  # somebody's file, unless --overwrite


def test_generate_answers_in_json(llama_w4: Path) -> None:
    found = command("generate", llama_w4, "--prompt", "import ", "--tokens", 3, "--json", "-").json()
    assert found["text"].startswith("import ")
    assert (found["new_tokens"], found["prompt"]) == (3, "import ")
    assert command("generate", llama_w4, "--prompt", "import ", "--tokens", 3, "--quiet") == Outcome(0, "", "")


@pytest.mark.parametrize("asked", [True, False])
def test_no_color_is_heeded(asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As no-color.org says: any value that is not empty."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    if asked:
        monkeypatch.setenv("NO_COLOR", "1")
    out = io.StringIO()
    PlainConsole(file=out, force_terminal=True, color_system="standard").print(Text("said", style="red"))
    assert ("\x1b[31m" in out.getvalue()) is not asked


def completed(words: str) -> set[tuple[str, str]]:
    """(Kind, word) of what a shell may offer after these words."""
    *before, last = words.split(" ")
    items = ShellComplete(cli, {}, "compress", "_COMPRESS_COMPLETE").get_completions(before, last)
    return {(item.type, item.value) for item in items}


def test_a_shell_completes_commands_names_and_files() -> None:
    assert completed("quan") == {("plain", "quantize")}
    assert completed("quantize demo --method spa") == {("plain", "sparsegpt")}
    assert completed("methods wan") == {("plain", "wanda")}
    assert completed("quantize de") == {("plain", "demo"), ("file", "de")}
    assert completed("quantize demo --output o") == {("dir", "o")}
    assert completed("inspect x --json f") == {("file", "f")}
    assert {name for _, name in completed("quantize demo --recipe w4a16-")} >= {"w4a16-gptq"}


def test_completion_answers_through_the_installed_command_without_slow_libraries() -> None:
    asked = {"_COMPRESS_COMPLETE": "bash_complete", "COMP_WORDS": "compress recipes w3a16-g", "COMP_CWORD": "2"}
    program = "import sys; sys.argv = ['compress']; from compress.__main__ import main; main()"
    words = [sys.executable, "-X", "importtime", "-c", program]
    done = subprocess.run(words, env={**os.environ, **asked}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["plain,w3a16-gptq"])
    assert "| torch\n" not in done.stderr
