"""The command line as a person meets it: what is refused and how, what is printed where, what is left on disk.

Bad input: exit code 2, one line on standard error that names what was given and what is allowed, no output. Work that
fails: exit code 1, one line after the progress, finished blocks kept. Most commands run inside this process
(`commands.command`).
"""

import json
import re
import resource
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from commands import PLAIN_GPTQ, SHARED, Outcome, command, make_llama, save
from safetensors.torch import load_file, save_file

import compress

FAST = [word for key, value in PLAIN_GPTQ.items() for word in ("--set", f"{key}={value}")]
COMMANDS = ("quantize", "evaluate", "inspect", "generate", "verify", "methods", "demo", "bench")


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
        return command(
            *("quantize", model, "--method", "rtn", "--group-size", 32, "--output", self.output, "--no-verify", *more)
        )

    def gptq(self, calibration: object, *more: object, model: object = None) -> Outcome:
        words = ["--group-size", 32, "--calibration", calibration, "--output", self.output, "--no-verify"]
        return command("quantize", model or self.model, *words, *more)

    def recipe(self, text: str, *more: object) -> Outcome:
        path = self.file("recipe.yaml", textwrap.dedent(text))
        return command("quantize", self.model, "--recipe", path, "--output", self.output, "--no-verify", *more)


@pytest.fixture
def desk(llama: Path, token_file: Path, tmp_path: Path) -> Desk:
    return Desk(llama, token_file, tmp_path)


def last_line(outcome: Outcome) -> str:
    """The one line that says why; everything before it is progress."""
    lines = outcome.err.splitlines()
    assert lines, outcome
    assert all(re.match(r"(quantize|evaluate): \d+/\d+|note: ", line) for line in lines[:-1]), outcome.err
    assert lines[-1].startswith("compress: "), outcome.err
    assert "Traceback" not in outcome.err
    assert not outcome.out, outcome.out
    return lines[-1]


# --- what is refused: name -> (what is done, what the line must say) -----------------------------------------------

Case = tuple[Callable[[Desk], Outcome], tuple[str, ...]]


def half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def configured(**changes: object) -> Callable[[Path], object]:
    return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def with_missing_shard(desk: Desk) -> Path:
    directory = save(make_llama().half(), desk.here / "model", max_shard_size="200KB")
    (directory / "model-00002-of-00003.safetensors").unlink()
    return directory


def parquet(desk: Desk, **columns: list[object]) -> Path:
    pq.write_table(pa.table(columns), desk.here / "given.parquet")
    return desk.here / "given.parquet"


def npy(desk: Desk, value: object) -> Path:
    np.save(desk.here / "given.npy", value)
    return desk.here / "given.npy"


MODELS: dict[str, Case] = {
    "unknown hub model": (lambda d: d.rtn("nosuch/model"), ("'nosuch/model'", "directory", "hub id", "'demo'")),
    "unknown bare name": (lambda d: d.rtn("nosuchmodel"), ("'nosuchmodel'", "directory", "hub id", "'demo'")),
    "missing path": (lambda d: d.rtn("./no/such/model"), ("'./no/such/model'", "does not exist", "directory")),
    "empty name": (lambda d: d.rtn(""), ("empty name", "directory", "hub id")),
    "file": (lambda d: d.rtn(d.model / "config.json"), ("config.json' is a file", "give the directory")),
    "directory without config": (lambda d: d.rtn(d.here), ("holds no config.json", "Hugging Face", "hub id")),
    "config that is not JSON": (
        lambda d: d.rtn(d.copy(config__json=lambda p: p.write_text("{nope"))),
        ("config.json cannot be read", "line 1"),
    ),
    "config of an unknown architecture": (
        lambda d: d.rtn(d.copy(config__json=configured(model_type="zork"))),
        ("config.json is not a configuration that transformers knows", "`zork`"),
    ),
    "config of another size": (
        lambda d: d.rtn(d.copy(config__json=configured(intermediate_size=128))),
        ("model.layers.0.mlp.down_proj.weight has shape [64, 96]", "[64, 128]", "6 tensors"),
    ),
    "config with one layer too many": (
        lambda d: d.rtn(d.copy(config__json=configured(num_hidden_layers=3))),
        ("lacks the tensor model.layers.2.", "9 missing"),
    ),
    "no weights": (
        lambda d: d.rtn(d.copy(model__safetensors=lambda p: p.unlink())),
        ("no .safetensors weights", "save_pretrained"),
    ),
    "missing shard": (
        lambda d: d.rtn(with_missing_shard(d)),
        ("index.json names model-00002-of-00003.safetensors", "missing", "fetch"),
    ),
    "truncated weights": (
        lambda d: d.rtn(d.copy(model__safetensors=half)),
        ("model.safetensors is damaged or incomplete", "fetch it again"),
    ),
    "pointer instead of weights": (
        lambda d: d.rtn(
            d.copy(model__safetensors=lambda p: p.write_text("version https://git-lfs.github.com/spec/v1"))
        ),
        ("model.safetensors is damaged or incomplete", "fetch it again"),
    ),
    "no tokenizer for text": (
        lambda d: d.gptq("demo", model=d.copy(tokenizer__json=Path.unlink, tokenizer_config__json=Path.unlink)),
        ("no usable tokenizer", ".pt or .npy"),
    ),
}

TEXTS: dict[str, Case] = {
    "missing text file": (lambda d: d.gptq(d.here / "no.txt"), ("no.txt' does not exist",)),
    "empty text": (lambda d: d.gptq(d.file("t.txt", "")), ("t.txt is empty",)),
    "blank text": (lambda d: d.gptq(d.file("t.txt", " \n\n ")), ("t.txt is empty",)),
    "short text": (
        lambda d: d.gptq(d.file("t.txt", "hello there")),
        ("t.txt has 4 tokens", "one window of 64", "shorter --length"),
    ),
    "text in Latin-1": (lambda d: d.gptq(d.file("t.txt", b"un caf\xe9 ")), ("t.txt is not UTF-8 (byte 6)", "convert")),
    "unknown ending": (lambda d: d.gptq(d.file("t.docx", "x")), ("'.docx'", ".txt, .jsonl, .parquet, .pt, .npy")),
    "directory": (lambda d: d.gptq(d.here), ("is a directory", ".txt, .jsonl, .parquet")),
    "unreachable dataset": (
        lambda d: d.gptq("nosuch/dataset"),
        ("'nosuch/dataset'", "datasets id", ".txt, .jsonl, .parquet, .pt, .npy", "'demo'"),
    ),
    "bad line of jsonl": (
        lambda d: d.gptq(d.file("t.jsonl", '{"text": "a"}\n\n{"text": \n')),
        ("t.jsonl line 3 is not JSON",),
    ),
    "jsonl without text": (
        lambda d: d.gptq(d.file("t.jsonl", '{"text": "a"}\n{"txt": "b"}\n')),
        ("t.jsonl line 2 has no string field 'text'",),
    ),
    "jsonl of lists": (lambda d: d.gptq(d.file("t.jsonl", "[1]\n")), ("line 1 has no string field 'text'",)),
    "empty jsonl": (lambda d: d.gptq(d.file("t.jsonl", "\n\n")), ("t.jsonl holds no text",)),
    "parquet without column": (
        lambda d: d.gptq(parquet(d, story=["a"])),
        ("given.parquet is not a parquet file with a column 'text'",),
    ),
    "not parquet": (lambda d: d.gptq(d.file("t.parquet", "no")), ("t.parquet is not a parquet file",)),
    "missing token file": (lambda d: d.gptq(d.here / "no.pt"), ("no.pt' does not exist",)),
    "tokens of rank 1": (
        lambda d: d.gptq(d.ids(torch.zeros(9, dtype=torch.int64))),
        ("given.pt holds torch.int64 [9]", "integers of shape [samples, length]"),
    ),
    "tokens that are floats": (
        lambda d: d.gptq(d.ids(torch.zeros(3, 9))),
        ("given.pt holds torch.float32 [3, 9]", "integers of shape [samples, length]"),
    ),
    "tokens that are truth values": (
        lambda d: d.gptq(npy(d, np.zeros((3, 9), dtype=bool))),
        ("given.npy holds torch.bool [3, 9]", "integers of shape [samples, length]"),
    ),
    "tokens above the vocabulary": (
        lambda d: d.gptq(d.ids(torch.tensor([[3, 2048]]))),
        ("from 3 to 2048", "0 to 2047"),
    ),
    "tokens below 0": (lambda d: d.gptq(d.ids(torch.tensor([[-1, 5]]))), ("from -1 to 5", "0 to 2047")),
    "tokens in a dictionary": (lambda d: d.gptq(d.ids({"ids": [1]})), ("given.pt holds dict", "[samples, length]")),
    "no tokens": (lambda d: d.gptq(d.ids(torch.zeros(0, 9, dtype=torch.int64))), ("holds no tokens",)),
    "rows of one token": (lambda d: d.gptq(d.ids(torch.zeros(9, 1, dtype=torch.int64))), ("one token", "2 or more")),
    "rows beyond the context": (
        lambda d: d.gptq(d.ids(torch.zeros(2, 65, dtype=torch.int64))),
        ("windows of 65 tokens", "at most 64"),
    ),
    "damaged token file": (lambda d: d.gptq(d.file("t.pt", "zzz")), ("t.pt is damaged", "torch.save")),
    "damaged array": (lambda d: d.gptq(d.file("t.npy", "zzz")), ("t.npy is damaged", "numpy.save")),
    "array of words": (lambda d: d.gptq(npy(d, np.array([["a", "b"]]))), ("holds no tensor", "numpy.save")),
    "length with a token file": (
        lambda d: d.gptq(d.tokens, "--length", 8),
        ("rows of 16 tokens", "--length 8 does not apply"),
    ),
    "length beyond the context": (
        lambda d: d.gptq("demo", "--length", 65),
        ("windows of 65 tokens", "at most 64"),
    ),
    "length 1": (lambda d: d.gptq("demo", "--length", 1), ("length 1", "2 or more")),
    "samples 0": (lambda d: d.gptq("demo", "--samples", 0), ("samples 0", "1 or more")),
}

OPTIONS: dict[str, Case] = {
    "group size that does not divide": (
        lambda d: d.rtn(d.model, "--group-size", 64),
        ("group size 64", "96 inputs of model.layers.0.mlp.down_proj", "2 layers", "16, 32, -1"),
    ),
    "group size -2": (lambda d: d.rtn(d.model, "--group-size", -2), ("group size -2", "-1")),
    "1 bit": (lambda d: d.rtn(d.model, "--scheme", "w1a16"), ("'w1a16'", "w2a16", "w8a16", "bits 2 to 8")),
    "9 bits": (lambda d: d.rtn(d.model, "--scheme", "w9a16"), ("'w9a16'", "w2a16", "w8a16", "bits 2 to 8")),
    "unknown grid": (
        lambda d: d.rtn(d.model, "--grid", "asym"),
        ("grid 'asym'", "signed-scale, symmetric, narrow, asymmetric"),
    ),
    "unknown method": (
        lambda d: d.rtn(d.model, "--method", "gtpq"),
        ("unknown method 'gtpq'", "did you mean 'gptq'?", "allowed: awq, embeddings, gptq, kv-cache, rtn, smoothquant"),
    ),
    "unknown option": (
        lambda d: d.gptq(d.tokens, "--set", "dmap=0.1"),
        (
            "unknown option of gptq 'dmap'",
            "did you mean 'damp'?",
            "act_order, activation_grid, activations, calibrator, clip, damp",
        ),
    ),
    "number that is a word": (lambda d: d.gptq(d.tokens, "--set", "damp=much"), ("damp of gptq is 'much'", "number")),
    "number that is empty": (lambda d: d.gptq(d.tokens, "--set", "damp="), ("damp of gptq is ''", "number", "0.01")),
    "number that is a half list": (lambda d: d.gptq(d.tokens, "--set", "damp=[1"), ("damp of gptq is '[1'", "number")),
    "number that is infinite": (lambda d: d.gptq(d.tokens, "--set", "damp=inf"), ("damp of gptq is 'inf'", "finite")),
    "whole number with a fraction": (
        lambda d: d.gptq(d.tokens, "--set", "sweeps=1.5"),
        ("sweeps of gptq is '1.5'", "whole number"),
    ),
    "truth value that is a number": (
        lambda d: d.gptq(d.tokens, "--set", "clip=2"),
        ("clip of gptq is '2'", "true or false"),
    ),
    "rounds below 0": (lambda d: d.gptq(d.tokens, "--set", "refit=-1"), ("refit -1", "0 or more")),
    "damp 0": (lambda d: d.gptq(d.tokens, "--set", "damp=0"), ("damp 0.0", "above 0")),
    "drift above 1": (lambda d: d.gptq(d.tokens, "--set", "drift=2"), ("drift 2.0", "to 1")),
    "unknown order": (lambda d: d.gptq(d.tokens, "--set", "act_order=up"), ("act_order 'up'", "none, static, group")),
    "setting without a value": (lambda d: d.rtn(d.model, "--set", "damp"), ("--set 'damp'", "NAME=VALUE")),
    "option given twice": (
        lambda d: d.rtn(d.model, "--set", "group-size=16"),
        ("group_size", "twice", "32", "'16'"),
    ),
    "ignore that matches nothing": (
        lambda d: d.rtn(d.model, "--ignore", "*.down"),
        ("'*.down' matches no layer", "'model.layers.0.self_attn.q_proj'"),
    ),
    "ignore of everything": (lambda d: d.rtn(d.model, "--ignore", "*"), ("no layer is left", "ignore less")),
    "calibration without effect": (
        lambda d: d.rtn(d.model, "--calibration", "demo"),
        ("'rtn' uses no calibration data", "drop --calibration"),
    ),
    "samples and length without effect": (
        lambda d: d.rtn(d.model, "--samples", 3, "--length", 9, "--batch-size", 8),
        ("'rtn' uses no calibration data", "drop --samples, --length, --batch-size"),
    ),
    "missing calibration": (
        lambda d: command("quantize", d.model, "--group-size", 32, "--output", d.output),
        ("gptq needs calibration data", "text, token ids or 'demo'"),
    ),
    "batch size 0": (lambda d: d.gptq(d.tokens, "--batch-size", 0), ("batch size 0", "1 or more")),
    "fsdp without torchrun": (lambda d: d.gptq(d.tokens, "--fsdp"), ("--fsdp", "torchrun --nproc-per-node")),
    "unknown device": (lambda d: d.rtn(d.model, "--device", "gpu"), ("device 'gpu'", "usable here: cpu")),
    "device that holds no values": (lambda d: d.rtn(d.model, "--device", "meta"), ("'meta'", "usable here: cpu")),
    "device that is not there": (lambda d: d.rtn(d.model, "--device", "cuda:77"), ("'cuda:77'", "usable here: cpu")),
    "empty output": (lambda d: d.rtn(d.model, "--output", ""), ("output ''", "give a path")),
    "output without a name": (lambda d: d.rtn(d.model, "--output", "/"), ("output '/'", "give a path")),
    "output below a file": (
        lambda d: d.rtn(d.model, "--output", d.model / "config.json" / "out"),
        ("cannot write to", "config.json/out.partial", "Not a directory"),
    ),
}

RECIPES: dict[str, Case] = {
    "missing recipe": (
        lambda d: command("quantize", d.model, "--recipe", d.here / "no.yaml", "--output", d.output),
        ("no.yaml' cannot be read", "No such file"),
    ),
    "not YAML": (lambda d: d.recipe("passes: ["), ("recipe.yaml' is not YAML", "line 1")),
    "wrong top": (lambda d: d.recipe("steps: []"), ("recipe.yaml", "one key, `passes`, with a list")),
    "more at the top": (lambda d: d.recipe("passes: [rtn: {}]\nseed: 1"), ("one key, `passes`, with a list",)),
    "no passes": (lambda d: d.recipe("passes: []"), ("no pass given", "at least one")),
    "pass without options": (lambda d: d.recipe("passes: [rtn]"), ("step 1 must be a pass", "gptq: {scheme: w4a16}")),
    "two passes in a step": (
        lambda d: d.recipe("passes:\n- {rtn: {}, gptq: {}}"),
        ("step 1 must name one pass; it has rtn, gptq",),
    ),
    "no pass in a step": (lambda d: d.recipe("passes: [only: [x]]"), ("step 1 must name one pass; it has none",)),
    "unknown pass": (
        lambda d: d.recipe("passes: [awk: {}]"),
        ("unknown method 'awk'", "allowed: awq, embeddings, gptq, kv-cache, rtn, smoothquant"),
    ),
    "unknown key": (
        lambda d: d.recipe("passes: [rtn: {schema: w4a16}]"),
        ("option of rtn 'schema'", "did you mean 'scheme'?", "clip, grid, group_size"),
    ),
    "value of the wrong type": (
        lambda d: d.recipe("passes: [rtn: {group_size: 32.5}]"),
        ("group_size of rtn is 32.5", "whole number"),
    ),
    "options that are a list": (lambda d: d.recipe("passes: [rtn: [1]]"), ("options of rtn must be a mapping",)),
    "only that is a word": (
        lambda d: d.recipe("passes: [{rtn: {group_size: 32}, only: '*'}]"),
        ("step 1", "`only` must be a list of layer patterns"),
    ),
    "only that matches nothing": (
        lambda d: d.recipe("passes: [{rtn: {group_size: 32}, only: [nope]}]"),
        ("pass 'rtn' (only nope) matches no layer", "'model.layers.0.self_attn.q_proj'"),
    ),
    "two quantizing passes on one layer": (
        lambda d: d.recipe("passes: [rtn: {group_size: 32}, gptq: {group_size: 32}]", "--calibration", d.tokens),
        ("'gptq' needs the dense weight of model.layers.0", "'rtn' has quantized", "different layers"),
    ),
    "method beside a recipe": (
        lambda d: d.recipe("passes: [rtn: {group_size: 32}]", "--method", "rtn", "--scheme", "w3a16"),
        ("--recipe says everything", "drop method, scheme"),
    ),
    "calibration without effect": (
        lambda d: d.recipe("passes: [rtn: {group_size: 32}]", "--calibration", d.tokens),
        ("recipe.yaml' uses no calibration data", "drop --calibration"),
    ),
    "module that does not exist": (
        lambda d: d.recipe("passes: ['no_such.module:Pass': {}]"),
        ("'no_such.module:Pass' cannot be imported", "No module named 'no_such'", "module:Class"),
    ),
    "module without a name": (lambda d: d.recipe("passes: [':Pass': {}]"), ("':Pass' cannot be imported",)),
    "class that is no pass": (lambda d: d.recipe("passes: ['pathlib:Path': {}]"), ("'pathlib:Path' is no subclass",)),
    "abstract pass": (lambda d: d.recipe("passes: ['compress:Pass': {}]"), ("'compress:Pass' is no pass that runs",)),
}

OTHERS: dict[str, Case] = {
    "evaluate: unknown device": (
        lambda d: command("evaluate", d.model, "--text", d.tokens, "--device", "gpu"),
        ("device 'gpu'", "usable here: cpu"),
    ),
    "generate: unknown device": (
        lambda d: command("generate", d.model, "--prompt", "a", "--device", "gpu"),
        ("device 'gpu'", "usable here: cpu"),
    ),
    "evaluate: missing text": (
        lambda d: command("evaluate", d.model, "--text", d.here / "no.txt"),
        ("no.txt' does not exist",),
    ),
    "evaluate: unknown reference": (
        lambda d: command("evaluate", d.model, "--reference", "no/such", "--text", d.tokens),
        ("'no/such'", "hub id"),
    ),
    "generate: empty prompt": (
        lambda d: command("generate", d.model, "--prompt", ""),
        ("prompt is empty", "at least one token"),
    ),
    "verify: not of this tool": (lambda d: command("verify", d.model), ("no compress.json", "of this tool")),
    "methods: unknown": (
        lambda d: command("methods", "gtpq"),
        ("'gtpq'", "did you mean 'gptq'?", "gptq, kv-cache, rtn"),
    ),
    "demo: overwrite of nothing": (lambda d: command("demo", "--overwrite"), ("--overwrite needs --output",)),
    "demo: wrong group size": (lambda d: command("demo", "--group-size", 100), ("group size 100", "256")),
}

REFUSED = {
    f"{kind}: {name}": case
    for kind, cases in (
        ("model", MODELS),
        ("text", TEXTS),
        ("option", OPTIONS),
        ("recipe", RECIPES),
        ("command", OTHERS),
    )
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_line_with_exit_code_2_and_leaves_nothing(desk: Desk, name: str) -> None:
    act, says = REFUSED[name]
    outcome = act(desk)
    assert outcome.code == 2, outcome
    line = last_line(outcome)
    assert outcome.err == line + "\n"  # before any work: no progress
    missing = [words for words in says if words not in line]
    assert not missing, line
    assert not desk.output.exists()
    assert not desk.output.with_name("output.partial").exists()


def test_a_model_that_is_quantized_already_is_refused(desk: Desk, llama_w4: Path) -> None:
    outcome = desk.rtn(llama_w4)
    assert outcome.code == 2
    assert "quantized already (compressed-tensors); give the original model" in last_line(outcome)
    assert not desk.output.exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["quantize", "demo", "--ouptut", "x"], "Did you mean '--output'?"),
        (["quantize", "demo"], "Missing option '--output'"),
        (["quantize"], "Missing argument 'MODEL'"),
        (["quantize", "demo", "--output", "x", "--batch-size", "many"], "'many' is not a valid integer"),
        (["evaluate", "demo"], "Missing option '--text'"),
        (["evaluate", "demo", "--text", "demo", "--json", "no/such/file"], "'no/such/file' cannot be written"),
        (["inspect", "demo", "--json", "/"], "'/' is a directory"),
        (["generate", "demo", "--prompt", "a", "--tokens", "0"], "0 is not in the range"),
        (["quantise", "demo"], "Did you mean 'quantize'?"),
    ],
)
def test_wrong_usage_is_explained_with_exit_code_2(arguments: list[str], says: str) -> None:
    outcome = command(*arguments)
    assert outcome.code == 2
    assert says in outcome.err
    assert "Traceback" not in outcome.err
    assert not outcome.out


# --- what exists is not lost ---------------------------------------------------------------------------------------


def tree(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def weights(directory: Path) -> dict[str, bytes]:
    """The files of a result that hold no time and no command line."""
    return {name: data for name, data in tree(directory).items() if name != "compress.json"}


def test_an_output_that_exists_is_kept_without_overwrite_and_replaced_with_it(desk: Desk) -> None:
    assert desk.rtn(desk.model).code == 0
    before = tree(desk.output)
    outcome = desk.rtn(desk.model, "--scheme", "w3a16")
    assert outcome.code == 2
    assert "output exists" in last_line(outcome)
    assert "--overwrite" in last_line(outcome)
    assert tree(desk.output) == before
    assert desk.rtn(desk.model, "--scheme", "w3a16", "--overwrite").code == 0
    assert command("inspect", desk.output, "--json", "-").json()["layers"][1]["scheme"].startswith("w3a16")
    assert sorted(p.name for p in desk.here.iterdir()) == ["output"]


@pytest.mark.parametrize("kind", ["directory", "file", "model"])
def test_an_output_of_somebody_else_is_never_overwritten(desk: Desk, kind: str) -> None:
    if kind == "file":
        desk.output.write_text("mine")
    elif kind == "directory":
        desk.output.mkdir()
        (desk.output / "thesis.tex").write_text("mine")
    else:
        shutil.copytree(desk.model, desk.output)
    before = desk.output.read_bytes() if kind == "file" else tree(desk.output)
    outcome = desk.rtn(desk.model, "--overwrite")
    assert outcome.code == 2
    assert "not a checkpoint of this tool" in last_line(outcome)
    assert (desk.output.read_bytes() if kind == "file" else tree(desk.output)) == before


@pytest.mark.parametrize("name", ["output.partial", "output.replaced"])
def test_a_directory_in_the_way_of_a_working_directory_is_kept(desk: Desk, name: str) -> None:
    assert desk.rtn(desk.model).code == 0
    before = tree(desk.output)
    other = desk.here / name
    other.mkdir()
    (other / "thesis.tex").write_text("mine")
    outcome = desk.rtn(desk.model, "--scheme", "w3a16", "--overwrite")
    assert outcome.code == 2
    assert f"{name} is in the way" in last_line(outcome)
    assert tree(other) == {"thesis.tex": b"mine"}
    assert tree(desk.output) == before


# --- work that fails -----------------------------------------------------------------------------------------------


def damaged(desk: Desk, tensor: str, value: float) -> Path:
    def edit(path: Path) -> None:
        tensors = load_file(path)
        tensors[tensor][0] = value
        save_file(tensors, path, metadata={"format": "pt"})

    return desk.copy(model__safetensors=edit)


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_a_weight_that_is_not_a_number_stops_the_run_at_its_layer(desk: Desk, method: str) -> None:
    model = damaged(desk, "model.layers.1.mlp.up_proj.weight", float("nan"))
    outcome = desk.rtn(model) if method == "rtn" else desk.gptq(desk.tokens, *FAST, model=model)
    assert outcome.code == 1
    assert "model.layers.1.mlp.up_proj has non-finite weights" in last_line(outcome)
    assert not desk.output.exists()


def test_activations_that_are_not_numbers_stop_the_run_at_their_layer(desk: Desk) -> None:
    model = damaged(desk, "model.embed_tokens.weight", float("inf"))
    outcome = desk.gptq(desk.ids(torch.zeros(2, 9, dtype=torch.int64)), *FAST, model=model)
    assert outcome.code == 1
    assert "the input of model.layers.0.self_attn.q_proj has non-finite values" in last_line(outcome)
    assert not desk.output.exists()
    # Nothing was finished: nothing is in the way of the next try.
    assert desk.gptq(desk.tokens, *FAST).code == 0


@pytest.mark.parametrize("role", ["model", "reference"])
def test_logits_that_are_not_numbers_are_no_figures(desk: Desk, role: str) -> None:
    other = damaged(desk, "model.norm.weight", float("nan"))
    model, reference = (other, desk.model) if role == "model" else (desk.model, other)
    outcome = command("evaluate", model, "--reference", reference, "--text", desk.tokens)
    assert outcome.code == 1
    assert f"the {role} gives logits that are not finite" in last_line(outcome)


def test_a_defect_is_one_line_and_its_traceback_is_there_on_request(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("the roof\nis on fire")

    monkeypatch.setattr(compress, "quantize", broken)
    outcome = desk.rtn(desk.model)
    assert outcome.code == 1
    assert "unexpected RuntimeError: the roof is on fire (set COMPRESS_TRACEBACK=1" in last_line(outcome)
    monkeypatch.setenv("COMPRESS_TRACEBACK", "1")
    with pytest.raises(RuntimeError, match="the roof"):
        desk.rtn(desk.model)


def test_an_interrupt_is_one_line_that_says_how_to_go_on(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compress, "quantize", stopped)
    outcome = desk.rtn(desk.model)
    assert outcome.code == 130
    assert "--resume" in last_line(outcome)


@contextmanager
def files_of_at_most(size: int) -> Iterable[None]:
    """A full disk, as far as one file can tell: writing beyond `size` bytes fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# The first block takes 2 bits a weight, the second 8: a limit between the two stops the run in the second.
TWO_SIZES = """
passes:
- gptq: {scheme: w2a16, group_size: 32, drift: 0.0, clip: false, refit: 0, sweeps: 0}
  only: ["model.layers.0.*"]
- gptq: {scheme: w8a16, group_size: 32, drift: 0.0, clip: false, refit: 0, sweeps: 0}
  only: ["model.layers.1.*"]
"""
BETWEEN = 24_000


def test_a_full_disk_keeps_the_finished_blocks_and_resume_ends_in_the_same_files(desk: Desk) -> None:
    recipe = desk.file("recipe.yaml", TWO_SIZES)
    words = ["quantize", desk.model, "--recipe", recipe, "--calibration", desk.tokens, "--no-verify"]
    words = [*map(str, words), "--output", str(desk.output)]
    with files_of_at_most(BETWEEN):
        done = command(*words)
    assert done.code == 1, done.err
    line = last_line(done)
    assert "cannot write" in line
    assert "model-block-00001.safetensors" in line
    assert "--resume" in line
    assert not desk.output.exists()
    partial = desk.here / "output.partial"
    assert list(json.loads((partial / "progress.json").read_text())["blocks"]) == ["model.layers.0"]
    first = (partial / "model-block-00000.safetensors").read_bytes()

    resumed = command(*words, "--resume")
    assert resumed.code == 0, resumed
    assert (desk.output / "model-block-00000.safetensors").read_bytes() == first
    words[-1] = str(desk.here / "uninterrupted")
    assert command(*words).code == 0
    assert weights(desk.output) == weights(desk.here / "uninterrupted")
    assert not partial.exists()


def test_a_full_disk_at_the_end_keeps_the_blocks(desk: Desk) -> None:
    with files_of_at_most(100_000):  # blocks are small; embedding and head together are not
        outcome = desk.rtn(desk.model)
    assert outcome.code == 1
    assert "model-rest.safetensors" in last_line(outcome)
    assert not desk.output.exists()
    resumed = desk.rtn(desk.model, "--resume")
    assert resumed.code == 0
    assert desk.rtn(desk.model, "--output", desk.here / "again").code == 0
    assert weights(desk.output) == weights(desk.here / "again")


@pytest.fixture
def stopped(desk: Desk) -> Desk:
    """A run that has finished both blocks and nothing else."""
    with files_of_at_most(100_000):
        assert desk.rtn(desk.model).code == 1
    return desk


def test_an_unfinished_run_is_neither_dropped_nor_mixed_with_another(stopped: Desk) -> None:
    partial = stopped.here / "output.partial"
    before = tree(partial)
    outcome = stopped.rtn(stopped.model)
    assert outcome.code == 2
    assert "unfinished run; go on with --resume or drop it with --overwrite" in last_line(outcome)
    outcome = stopped.rtn(stopped.model, "--resume", "--scheme", "w3a16")
    assert outcome.code == 2
    assert "of another run (model, recipe, calibration data or version differ)" in last_line(outcome)
    assert tree(partial) == before
    assert stopped.rtn(stopped.model, "--scheme", "w3a16", "--overwrite").code == 0
    assert not partial.exists()


def test_a_damaged_block_of_an_unfinished_run_is_refused(stopped: Desk) -> None:
    half(stopped.here / "output.partial" / "model-block-00000.safetensors")
    outcome = stopped.rtn(stopped.model, "--resume")
    assert outcome.code == 2
    assert "model-block-00000.safetensors of the unfinished run cannot be read" in last_line(outcome)
    assert "--overwrite" in last_line(outcome)


def test_resume_with_nothing_to_go_on_with_says_so(desk: Desk) -> None:
    outcome = desk.rtn(desk.model, "--resume")
    assert outcome.code == 0
    assert "note: " in outcome.err
    assert "held no finished block: started from the beginning" in outcome.err
    assert any("no finished block" in note for note in json.loads((desk.output / "compress.json").read_text())["notes"])


# --- what is printed where -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_help_mentions_every_option(name: str) -> None:
    from compress.cli import cli

    outcome = command(name, "--help")
    assert outcome.code == 0
    assert outcome.err == ""
    assert cli.commands[name].help.splitlines()[0][:40] in " ".join(outcome.out.split())
    for parameter in cli.commands[name].params:
        for word in parameter.opts if parameter.param_type_name == "option" else [parameter.make_metavar(None)]:
            assert word in outcome.out


def test_help_of_the_whole_names_every_command_with_its_sentence() -> None:
    outcome = command("--help")
    assert outcome.code == 0
    for name in COMMANDS:
        line = next(li for li in outcome.out.splitlines() if re.match(rf"  {name}\s", li))
        assert not line.endswith("..."), line


def test_version_is_that_of_the_package() -> None:
    assert command("--version").out == f"compress, version {compress.__version__}\n"


def test_methods_lists_every_method_in_a_line() -> None:
    from compress.recipe import PASSES

    lines = command("methods").out.splitlines()
    assert [line.split()[0] for line in lines] == list(PASSES)


def test_methods_gptq_shows_source_and_every_option_with_its_default() -> None:
    from dataclasses import fields

    out = command("methods", "gptq").out
    assert "arXiv 2210.17323" in out
    defaults = out.split("Defaults: ")[1]
    for option in fields(compress.GPTQ):
        assert f"{option.name}={option.default}" in defaults
        assert re.search(rf"\b{option.name}\b", out.split("Defaults: ")[0])


def test_json_on_standard_output_is_all_there_is(desk: Desk, llama_w4: Path) -> None:
    for arguments in (
        ["evaluate", llama_w4, "--reference", desk.model, "--text", desk.tokens],
        ["inspect", llama_w4],
        ["quantize", desk.model, "--method", "rtn", "--group-size", 32, "--output", desk.output, "--no-verify"],
    ):
        outcome = command(*arguments, "--json", "-")
        assert outcome.code == 0
        assert isinstance(json.loads(outcome.out), dict)  # fails for a word before or after


def test_json_in_a_file_leaves_the_table_on_standard_output(desk: Desk) -> None:
    target = desk.here / "figures.json"
    outcome = command("evaluate", desk.model, "--text", desk.tokens, "--json", target)
    assert outcome.code == 0
    assert "perplexity" in outcome.out
    assert json.loads(target.read_text())["tokens"] == 6 * 15


def test_evaluate_names_its_figures(desk: Desk, llama_w4: Path) -> None:
    figures = command("evaluate", llama_w4, "--reference", desk.model, "--text", desk.tokens, "--json", "-").json()
    names = (
        "perplexity reference_perplexity kl_mean kl_median kl_p99 same_top tokens bytes reference_bytes "
        "bits_per_weight length bits_per_parameter dtype text"
    )
    assert set(figures) == set(names.split())
    assert all(value is not None for value in figures.values())
    assert figures["bytes"] < figures["reference_bytes"]


def test_quiet_prints_nothing_on_success(desk: Desk, llama_w4: Path) -> None:
    for arguments in (
        ["quantize", desk.model, "--method", "rtn", "--group-size", 32, "--output", desk.output, "--no-verify"],
        ["evaluate", llama_w4, "--text", desk.tokens],
        ["inspect", llama_w4],
    ):
        assert command(*arguments, "--quiet") == Outcome(0, "", "")


def test_progress_is_plain_lines_on_standard_error(desk: Desk) -> None:
    outcome = desk.gptq(desk.tokens, *FAST)
    lines = outcome.err.splitlines()
    assert lines[0] == "quantize: 0/2"
    assert re.fullmatch(r"quantize: 1/2 model\.layers\.0, \d+ s left", lines[1])
    assert lines[2:] == ["quantize: 2/2 model.layers.1"]
    assert "\x1b" not in outcome.err + outcome.out
    assert "quantize: " not in outcome.out


def test_quantize_says_what_it_did(desk: Desk) -> None:
    outcome = desk.gptq(desk.tokens, *FAST, "--ignore", "*.down_proj")
    assert "12 layers compressed" in outcome.out
    assert "1 embedding, 2 ignored by '*.down_proj', 1 output head" in outcome.out
    assert "against" in outcome.out  # the loss of plain rounding
    assert "not verified: run `compress verify`" in outcome.out


def test_fewer_samples_than_asked_for_are_said_before_the_work(desk: Desk) -> None:
    outcome = desk.gptq(desk.tokens, *FAST, "--samples", 9)
    assert outcome.code == 0
    assert "6 samples of 16 tokens, fewer than the 9 asked for" in outcome.err.splitlines()[0]
    record = json.loads((desk.output / "compress.json").read_text())
    assert any("fewer than the 9 asked for" in note for note in record["notes"])
    assert record["calibration"]["samples"] == 6


def test_weights_that_the_model_does_not_use_are_said(desk: Desk) -> None:
    outcome = desk.rtn(desk.copy(config__json=configured(num_hidden_layers=1)))
    assert outcome.code == 0
    assert "note: 9 tensors of " in outcome.err
    assert "like model.layers.1.input_layernorm.weight" in outcome.err


def test_settings_are_read_as_people_write_them(desk: Desk) -> None:
    words = ["--set", "damp=1e-2", "--set", "act-order=static", "--set", "clip=False", "--set", "drift=0"]
    assert desk.gptq(desk.tokens, *words, "--set", "refit=0", "--set", "sweeps=0").code == 0
    step = json.loads((desk.output / "compress.json").read_text())["identity"]["recipe"]["passes"][0]["gptq"]
    assert (step["damp"], step["act_order"], step["clip"], step["drift"]) == (0.01, "static", False, 0.0)


# --- the other commands --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["llama", "llama_w4"])
def test_generate_prints_text_that_starts_with_the_prompt(request: pytest.FixtureRequest, which: str) -> None:
    model = request.getfixturevalue(which)
    outcome = command("generate", model, "--prompt", "Once upon a time", "--tokens", 5)
    assert outcome.code == 0
    assert outcome.out.startswith("Once upon a time")
    assert len(outcome.out.strip()) > len("Once upon a time")
    assert outcome.err == ""
    again = command("generate", model, "--prompt", "Once upon a time", "--tokens", 5)
    assert again == outcome


def test_generate_says_the_same_compressed_and_dequantized(tmp_path: Path) -> None:
    compress.quantize("demo", compress.RTN(scheme="w4a16"), output=tmp_path / "out", verify=False)
    words = ["--prompt", "def read(path):", "--tokens", 24]
    compressed = command("generate", tmp_path / "out", *words)
    dense = command("generate", tmp_path / "out", *words, "--dequantize")
    assert compressed.code == 0, compressed.err
    assert compressed.out == dense.out
    rounded = command("generate", tmp_path / "out", *words, "--int8-activations")
    assert rounded.code == 0
    assert rounded.out.startswith("def read(path):")
    both = command("generate", tmp_path / "out", *words, "--dequantize", "--int8-activations")
    assert both.code == 2
    assert "do not apply" in both.err


def test_inspect_says_which_kernel_each_layer_gets(
    llama_w4: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = command("inspect", llama_w4, "--kernels", "--json", "-", "--device", "cpu")
    assert outcome.code == 0, outcome.err
    found = outcome.json()
    assert found["device"] == "cpu"
    assert len(found["layers"]) == 12
    for layer in found["layers"]:
        assert set(layer["kernels"]) == {"1", "16", "512"}
        assert all(kernel.startswith(("cpu", "torch")) for kernel in layer["kernels"].values())
    monkeypatch.setattr("compress.kernels.cpu.why_not", lambda: ("no C++ compiler",))
    without = command("inspect", llama_w4, "--kernels", "--device", "cpu")
    assert "torch" in without.out
    assert "no C++" in without.out
    dense = command("inspect", llama, "--kernels")
    assert dense.code == 2
    assert "is not compressed" in dense.err
    alone = command("inspect", llama, "--device", "cpu")
    assert alone.code == 2
    assert "--kernels" in alone.err


def test_generate_samples_by_its_seed(llama: Path) -> None:
    def sample(seed: int) -> str:
        words = ["--prompt", "Once", "--tokens", 12, "--temperature", 1, "--seed", seed]
        return command("generate", llama, *words).out

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_inspect_of_a_dense_checkpoint_lists_every_tensor(llama: Path) -> None:
    found = command("inspect", llama, "--json", "-").json()
    rows = {row["name"]: row for row in found["layers"]}
    assert set(rows) == set(load_file(llama / "model.safetensors"))
    assert rows["model.layers.0.mlp.down_proj.weight"] == {
        "name": "model.layers.0.mlp.down_proj.weight",
        "shape": [64, 96],
        "scheme": "f16",
        "bits": 16.0,
        "bytes": 64 * 96 * 2,
        "remark": "",
    }
    assert found["size"]["compressed_weights"] == 0
    assert "not compressed" in command("inspect", llama).out


def test_inspect_of_a_compressed_checkpoint_says_why_layers_were_left_alone(llama_w4: Path) -> None:
    found = command("inspect", llama_w4, "--json", "-").json()
    rows = {row["name"]: row for row in found["layers"]}
    packed = rows["model.layers.0.self_attn.q_proj"]
    assert packed["scheme"] == "w4a16 g32 symmetric"
    assert packed["bytes"] == 64 * 64 // 2 + 64 * 2 * 2 + 16  # codes, scales, shape
    assert packed["remark"].startswith("rtn")
    assert rows["model.layers.1.mlp.down_proj.weight"]["remark"] == "ignored by '*.down_proj'"
    assert rows["lm_head.weight"]["remark"] == "output head"
    assert rows["model.embed_tokens.weight"]["remark"] == "embedding"
    table = command("inspect", llama_w4).out
    assert "ignored by '*.down_proj'" in table
    assert "…" not in table  # nothing is cut where nobody can widen the window


# --- through a real process ----------------------------------------------------------------------------------------


def process(*arguments: object) -> Outcome:
    words = [sys.executable, "-m", "compress", *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return Outcome(done.returncode, done.stdout, done.stderr)


def test_the_installed_command_verifies_what_it_wrote_in_a_fresh_process(desk: Desk) -> None:
    pytest.importorskip("compressed_tensors", reason="transformers reads packed weights with it")
    words = ["--method", "rtn", "--group-size", 32, "--output", desk.output, "--json", "-"]
    outcome = process("quantize", desk.model, *words)
    assert outcome.code == 0, outcome
    record = json.loads(outcome.out)
    assert record["verification"]["layers"] == 14
    assert record["verification"]["transformers"] == "compared"
    assert record["verification"]["logits_max_difference"] == 0.0
    assert all(line.startswith(("quantize: ", "note: verifying")) for line in outcome.err.splitlines()), outcome.err


def test_several_processes_without_fsdp_are_refused(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    outcome = desk.rtn(desk.model)
    assert outcome.code == 2
    assert "several processes were started; add --fsdp" in last_line(outcome)
    assert not desk.output.exists()


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the trained models beside the project")
def test_a_trained_model_loses_less_by_gptq_than_by_rounding(tmp_path: Path) -> None:
    model, tokens = SHARED / "models" / "babyllama-105", SHARED / "tokens"
    kl = {}
    for method in ("rtn", "gptq"):
        words = ["--calibration", tokens / "babyllama-105.calib.pt", "--samples", 16, *FAST] if method == "gptq" else []
        output = tmp_path / method
        words += ["--method", method, "--scheme", "w3a16", "--group-size", 32, "--output", output, "--no-verify"]
        assert command("quantize", model, *words).code == 0
        words = ["--reference", model, "--text", tokens / "babyllama-105.eval.pt", "--samples", 8, "--json", "-"]
        kl[method] = command("evaluate", output, *words).json()["kl_mean"]
    assert kl["gptq"] < 0.7 * kl["rtn"]


@pytest.mark.slow
def test_the_demo_compares_rounding_with_gptq(tmp_path: Path) -> None:
    outcome = command("demo", "--output", tmp_path)
    assert outcome.code == 0
    assert "RTN w3a16 g128" in outcome.out
    assert "GPTQ w3a16 g128" in outcome.out
    assert sorted(p.name for p in tmp_path.iterdir()) == ["demo-w3a16-gptq", "demo-w3a16-rtn"]
    assert "exists" in last_line(command("demo", "--output", tmp_path))
    assert command("demo", "--output", tmp_path, "--overwrite", "--quiet").out == ""
