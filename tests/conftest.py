"""Fixtures that many tests share: a tiny random Llama on disk, and the command line run inside this process."""

import io
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

# Read when these libraries are imported: no test asks a server for anything, and none waits for one.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # in the processes that tests start, too

import pytest
import torch

import compress
from compress.cli import main
from compress.source import DEMO

SHARED = Path(__file__).parents[2] / "shared" / "data"
VOCABULARY, CONTEXT, HIDDEN, INTERMEDIATE = 2048, 64, 64, 96
PLAIN_GPTQ = {"drift": 0.0, "clip": False, "refit": 0, "sweeps": 0}  # the paper's, and fast


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


@pytest.fixture(scope="session", autouse=True)
def _quiet_libraries() -> None:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # tiny matrices: threads cost more than they bring


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the tiny Llama, float16 in one file. Not to be changed: copy it (`copy_of`)."""
    return save(make_llama().half(), tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def llama_w4(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama at w4a16 g32 by RTN, all layers but the MLPs' down projections. Not to be changed."""
    output = tmp_path_factory.mktemp("models") / "llama-w4"
    compress.quantize(
        llama, compress.RTN(scheme="w4a16", group_size=32), ignore=["*.down_proj"], output=output, verify=False
    )
    return output


@pytest.fixture
def copy_of(tmp_path: Path) -> Callable[[Path], Path]:
    """Copies a checkpoint into the test's own directory."""

    def copy(source: Path, name: str = "copy") -> Path:
        return Path(shutil.copytree(source, tmp_path / name))

    return copy


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A thousand words of the demo's held-out text."""
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    words = (DEMO / "heldout.txt").read_text(encoding="utf-8").split(" ")
    path.write_text(" ".join(words[:1000]), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token ids [6, 16], int64."""
    path = tmp_path_factory.mktemp("tokens") / "tokens.pt"
    torch.save(torch.randint(VOCABULARY, (6, 16), generator=torch.Generator().manual_seed(1)), path)
    return path


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real models and text; skips the test where it is missing."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the real models and texts of {SHARED}, which are not here")
    return SHARED
