"""The command line run inside this process, a tiny random Llama with the demo's tokenizer, and a desk to use both."""

import io
import json
import re
import shutil
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import compress
from compress.base.progress import Silent
from compress.checkpoint.read.source import DEMO
from compress.cli.main import main
from compress.passes.protocol.base import Pass

VOCABULARY, CONTEXT, HIDDEN, INTERMEDIATE = 2048, 64, 64, 96
PLAIN_GPTQ = {"drift": 0.0, "clip": False, "refit": 0, "sweeps": 0, "shrink": False}  # the paper's, and fast
DRIFT_GPTQ = {**PLAIN_GPTQ, "drift": 1.0}  # fast, and beside the stream of the original model


def fast_gptq(**options: object) -> compress.GPTQ:
    """GPTQ where it is not the point: of what it adds to the paper, the second stream alone."""
    return compress.GPTQ(**{**DRIFT_GPTQ, **options})


class StopAfterOne(Silent):
    """Interrupts a run when its first block is finished, as Ctrl-C would."""

    def step(self, done: int, total: int, what: str) -> None:
        if done == 1:
            raise KeyboardInterrupt


class Largest(TorchDispatchMode):
    """The most elements of any floating-point tensor that an operation makes outside of the meta device; those of one
    byte are codes and count where `codes`."""

    elements = 0

    def __init__(self, codes=True):
        super().__init__()
        self.least = 1 if codes else 2

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        counts = isinstance(out, torch.Tensor) and out.is_floating_point() and out.device.type != "meta"
        if counts and out.element_size() >= self.least:
            self.elements = max(self.elements, out.untyped_storage().nbytes() // out.element_size())
        return out


@dataclass(frozen=True)
class Outcome:
    """What a command left behind: exit code and the two streams."""

    code: int
    out: str
    err: str

    def json(self) -> dict:
        assert self.out, self.err
        return json.loads(self.out)


def command(*arguments: object) -> Outcome:
    """Run `compress ARGUMENTS` in this process, through the entry point that the installed command has."""
    return program(main, "compress", *arguments)


def program(entry: Callable[[], object], name: str, *arguments: object) -> Outcome:
    """Run a program in this process by its entry point, as one of this name."""
    out, err = io.StringIO(), io.StringIO()
    argv, code = sys.argv, 0
    sys.argv = [name, *map(str, arguments)]
    try:
        with warnings.catch_warnings(), redirect_stdout(out), redirect_stderr(err):
            entry()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    finally:
        sys.argv = argv
    return Outcome(code, out.getvalue(), err.getvalue())


def in_this_process(words: Sequence[str], **_: object) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of `python -P -m compress ...`, for tests of what is asked for and answered: it takes seconds to
    import all again."""
    assert list(words[1:4]) == ["-P", "-m", "compress"], words
    outcome = command(*words[4:])
    return subprocess.CompletedProcess(words, outcome.code, outcome.out, outcome.err)


def make_llama(seed: int = 0, **changes: object) -> torch.nn.Module:
    """A random Llama: 2 layers of hidden 64 and MLP 96 (divides by 32, not by 64), the demo's vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.1,  # logits of a spread at which rounding shows
        "bos_token_id": 0,
        "eos_token_id": 0,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).eval()


def save(model: torch.nn.Module, directory: Path, **options: object) -> Path:
    """Write a model with the demo's tokenizer beside it."""
    model.save_pretrained(directory, **options)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / name, directory / name)
    return directory


@dataclass(frozen=True)
class Desk:
    """What a case works with: a good model and good tokens, a directory of its own, and the output it asks for."""

    model: Path
    tokens: Path
    here: Path

    @property
    def output(self) -> Path:
        return self.here / "output"

    def copy(self, **edits: Callable[[Path], object]) -> Path:
        """A copy of the model, changed by `edits`: {name of the file, with __ for a point: function of its path}."""
        directory = Path(shutil.copytree(self.model, self.here / "model"))
        for name, edit in edits.items():
            edit(directory / name.replace("__", "."))
        return directory

    def file(self, name: str, content: str | bytes) -> Path:
        path = self.here / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def ids(self, value: object) -> Path:
        path = self.here / "given.pt"
        torch.save(value, path)
        return path

    def rtn(self, model: object, *more: object) -> Outcome:
        return command(*("quantize", model, "--method", "rtn", "--group-size", 32, "--output", self.output, *more))

    def gptq(self, calibration: object, *more: object, model: object = None) -> Outcome:
        words = ["--group-size", 32, "--calibration", calibration, "--output", self.output]
        return command("quantize", model or self.model, *words, *more)

    def spqr(self, *more: object) -> Outcome:
        return self.by("spqr", *more)

    def trellis(self, *more: object) -> Outcome:
        return self.by("trellis", *more)

    def by(self, method: str, *more: object) -> Outcome:
        """`compress quantize --method METHOD` with tokens; later options win."""
        words = ["--method", method, "--calibration", self.tokens, "--output", self.output]
        return command("quantize", self.model, *words, *more)

    def recipe(self, text: str, *more: object) -> Outcome:
        path = self.file("recipe.yaml", textwrap.dedent(text))
        return command("quantize", self.model, "--recipe", path, "--output", self.output, *more)


def last_line(outcome: Outcome) -> str:
    """The one line that says why; everything before it is progress."""
    lines = outcome.err.splitlines()
    assert lines, outcome
    assert all(
        re.match(r"(quantize|evaluate): \d+/\d+|(verify|export): |note: |plan: ", line) for line in lines[:-1]
    ), outcome.err
    assert lines[-1].startswith("compress: "), outcome.err
    assert "Traceback" not in outcome.err
    assert not outcome.out, outcome.out
    return lines[-1]


def refusal_of_export(model: Path, method: Pass | Sequence[Pass], to: str, folder: Path) -> str:
    """The line that refuses to export what passes make of a model; nothing is left of the export."""
    compress.quantize(model, method, output=folder / "out", verify=False)
    outcome = command("export", folder / "out", "--to", to, "--output", folder / "there")
    assert outcome.code == 2
    assert not (folder / "there").exists()
    return last_line(outcome)


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def configured(**changes: object) -> Callable[[Path], object]:
    return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
