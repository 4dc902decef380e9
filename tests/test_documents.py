"""Every command of the documents runs as it is written, and every snippet: on the built-in model, verified as always.

The documents are parsed (`support/documents.py`, which says what placeholders stand for), so a new command or snippet
is covered when it is written. `NOT_RUN` says which are not run, and why.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from commands import command
from documents import ROOT, Snippet, snippets
from processes import free_port, together
from vision import conv_bn

import compress
from compress.checkpoint.read.source import DEMO
from compress.inference.load.quantizer import transformers_alone

pytestmark = [
    pytest.mark.documents,
    pytest.mark.timeout(600),
    # What libraries are to change in their own code.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

# By what the text begins with, or has in it -> why it does not run.
NOT_RUN = {
    "make ": "is what CI runs, or `compress demo`, which has a test of its own",
    "pip install": "an environment",
    "compress bench llama-3-8b": "needs the memory of an 8 B model",
    "--pairs FILE": "needs an encoder, and the built-in model predicts tokens (evaluation/test_encoders.py)",
    "--labelled FILE": "needs a classifier, and the built-in model predicts tokens (evaluation/test_evaluate.py)",
    "--calibration FOLDER": "needs a model that reads images (data/test_pictures.py)",
    "--calibration rows.jsonl": "needs a model that reads images (data/test_pictures.py)",
    '{"messages": ': "is a row of chats, and the built-in model has no chat template (data/test_chat.py)",
    "--structure experts": "needs a mixture, and the built-in model is none (engine/shrink/test_experts.py)",
    "--depth 8192": "needs a longer context than the built-in model has (evaluation/test_probes.py)",
    "lm-eval:arc_easy": "fetches a data set (evaluation/test_lm_eval.py)",
    "compress.compile_steps(model)": "compiles for a minute (runtime/test_steps.py)",
}
# Added, so that it takes seconds: nothing that is written is changed.
QUICK = {
    ("qat",): ["--steps", "4"],
    ("distill", "--output"): ["--steps", "4"],
    ("bench",): ["--quick", "--rounds", "1"],
    ("--recover",): ["--recover", "5s"],
    ("--calibration", "demo"): ["--samples", "8", "--length", "32"],
    ("evaluate", "--text", "demo"): ["--samples", "8", "--length", "32"],
}
# What a snippet of Python says, and what it means here.
IN_PYTHON = {'"cuda"': '"cpu"', '"MODEL"': '"demo"'}
COMMANDS: dict[tuple[str, ...], Snippet] = {}
for _each in snippets():
    if _each.language == "command" and not any(start in _each.text for start in NOT_RUN):
        COMMANDS.setdefault(tuple(_each.words), _each)
OTHERS = [each for each in snippets() if each.language != "command" and not any(s in each.text for s in NOT_RUN)]


def test_no_reason_is_left_over() -> None:
    for start in NOT_RUN:
        assert any(start in each.text for each in snippets()), start


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of outputs: OUT, rounded to 8 bits and evaluated; STATIC, with calibrated ranges; TRAINED; A and B."""
    folder = tmp_path_factory.mktemp("written")
    ids = tokens()
    compress.quantize("demo", compress.RTN(scheme="w8a16"), output=folder / "OUT")
    assert command("evaluate", folder / "OUT", "--reference", "demo", "--text", text(folder), "--quiet").code == 0
    static = compress.RTN(scheme="w8a8", activations="static", histograms=True)
    compress.quantize("demo", static, calibration=ids, output=folder / "STATIC")
    trained = [compress.RTN(scheme="w4a16"), compress.Train(steps=2)]
    compress.quantize("demo", trained, training=ids, output=folder / "TRAINED")
    for name in "AB":
        shutil.copytree(folder / "OUT", folder / name)
    return folder


def tokens(samples: int = 12, length: int = 32) -> torch.Tensor:
    """The first tokens of the demo's calibration text, [samples, length]."""
    words = (DEMO / "calibration.txt").read_text(encoding="utf-8")[: 16 * samples * length]
    return torch.tensor(tokenizer()(words)["input_ids"][: samples * length]).reshape(samples, length)


def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(DEMO)


def text(folder: Path) -> Path:
    path = folder / "text.pt"
    torch.save(tokens(), path)
    return path


@pytest.fixture
def desk(written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a reader: the texts, recipes and files that documents speak of."""
    text(tmp_path)
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes", ignore=shutil.ignore_patterns("results"))
    recipe = next(each.text for each in OTHERS if each.language == "yaml")
    (tmp_path / "recipe.yaml").write_text(recipe, encoding="utf-8")
    torch.save([{"input_ids": tokens()}], tmp_path / "batches.pt")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path / "recipes")
    return tmp_path


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: str(COMMANDS[words]))
def test_a_command_runs_as_it_is_written(words: tuple[str, ...], written: Path, desk: Path) -> None:
    if "--output" not in words or words[words.index("--output") + 1] != "OUT":
        given = "TRAINED" if "--training" in words else "STATIC" if "--calibration" in words else "OUT"
        shutil.copytree(written / given, desk / "OUT")
    for name in "AB":
        shutil.copytree(written / name, desk / name)
    if words[0] == "torchrun":
        endpoint = f"localhost:{free_port()}"
        torchrun = [sys.executable, "-m", "torch.distributed.run"]
        machine = [*torchrun, *(endpoint if word == "HOST:29500" else word for word in words[1:])]
        for code, err in together([machine] * (2 if "--nnodes" in words else 1)):
            assert code == 0, err
        return
    more = [option for of, options in QUICK.items() if set(of) <= set(words) for option in options]
    # These take all of their data, as training does; of that of `fit`, some is held out.
    more = [] if words[1] in ("cache-logits", "fit") or "batches.pt" in words else more
    more += ["--no-trellis", "--no-rotate"] if words[1] == "fit" else []  # whose search takes minutes of this model
    outcome = command(*words[1:], *more)
    assert outcome.code == 0, f"{COMMANDS[words]}\n{outcome.err}"
    if words[1] in ("quantize", "prune", "qat", "distill"):
        assert json.loads((desk / "OUT" / "compress.json").read_text(encoding="utf-8"))["verification"] is not None


@pytest.mark.parametrize("snippet", OTHERS, ids=str)
def test_a_snippet_runs_as_it_is_written(snippet: Snippet, written: Path, desk: Path) -> None:
    if snippet.language == "yaml":
        assert compress.load_recipe(desk / "recipe.yaml")
        return
    assert snippet.language == "python", snippet
    shutil.copytree(written / "OUT", desk / "OUT")
    replaced = snippet.text
    for word, meant in IN_PYTHON.items():
        replaced = replaced.replace(word, meant)
    if 'output="OUT"' in replaced:
        shutil.rmtree(desk / "OUT")
    with transformers_alone():
        exec(compile(replaced, str(snippet), "exec"), names(desk, "images" in snippet.text))


def names(desk: Path, of_images: bool) -> dict[str, Any]:
    """The names that snippets of Python take for given: models, token ids, questions, arguments of a Trainer."""
    question = {"goal": "import", "sol1": " sys", "sol2": " of", "label": 0}
    (desk / "piqa.jsonl").write_text(f"{json.dumps(question)}\n", encoding="utf-8")
    given = {
        "compress": compress,
        "peft": peft,
        "torch": torch,
        "transformers": transformers,
        **{name: tokens() for name in ("token_ids", "more_ids", "held_out_ids", "ids")},
    }
    if of_images:
        layers = conv_bn(3, 8)
        return {**given, "model": Images(layers), "images": torch.randn(100, 3, 8, 8)}
    model, original = (transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32) for _ in range(2))
    arguments = transformers.TrainingArguments(
        output_dir="trainer", max_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True, save_strategy="no"
    )
    return {
        **given,
        "model": model,
        "original": original,
        "linear": model.model.layers[0].mlp.up_proj,
        "inputs": {"input_ids": tokens(1, 8), "max_new_tokens": 2},
        "arguments": arguments,
        "data": [{"input_ids": row, "labels": row} for row in tokens(4)],
    }


class Images(torch.nn.Module):
    """A small CNN that is called with x."""

    def __init__(self, layers: list[torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.Linear(8 * 8 * 8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)
