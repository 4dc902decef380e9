"""The command line run inside this process, and a tiny random Llama with the demo's tokenizer."""

import io
import json
import shutil
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from compress.cli import main
from compress.progress import Silent
from compress.source import DEMO

SHARED = Path(__file__).parents[2] / "shared" / "data"
VOCABULARY, CONTEXT, HIDDEN, INTERMEDIATE = 2048, 64, 64, 96
PLAIN_GPTQ = {"drift": 0.0, "clip": False, "refit": 0, "sweeps": 0, "shrink": False}  # the paper's, and fast


class StopAfterOne(Silent):
    """Interrupts a run when its first block is finished, as Ctrl-C would."""

    def step(self, done: int, total: int, what: str) -> None:
        if done == 1:
            raise KeyboardInterrupt


class Largest(TorchDispatchMode):
    """The most elements of any floating-point tensor that an operation makes outside of the meta device."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.is_floating_point() and out.device.type != "meta":
            self.elements = max(self.elements, out.untyped_storage().nbytes() // out.element_size())
        return out


@dataclass(frozen=True)
class Outcome:
    """What a command left behind: exit code and the two streams."""

    code: int
    out: str
    err: str

    def json(self) -> dict:
        return json.loads(self.out)


def command(*arguments: object) -> Outcome:
    """Run `compress ARGUMENTS` in this process, through the entry point that the installed command has."""
    out, err = io.StringIO(), io.StringIO()
    argv, code = sys.argv, 0
    sys.argv = ["compress", *map(str, arguments)]
    try:
        with warnings.catch_warnings(), redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    finally:
        sys.argv = argv
    return Outcome(code, out.getvalue(), err.getvalue())


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
