"""What the command line refuses: the one table of bad input. A case: what is done, and what the line must say.

Bad input ends with exit code 2 and one line on standard error that names what was given and what is allowed, before any
work, and leaves nothing on disk.
"""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from commands import Desk, Outcome, command, configured, half, last_line, make_llama, save

from compress.kernels.cpu import build
from compress.passes.protocol.recipe import PASSES

METHODS = ", ".join(sorted(PASSES))
Act = Callable[[Desk], Outcome]
Case = tuple[Act, tuple[str, ...]]


def with_missing_shard(desk: Desk) -> Path:
    directory = save(make_llama().half(), desk.here / "model", max_shard_size="200KB")
    (directory / "model-00002-of-00003.safetensors").unlink()
    return directory


def with_file(desk: Desk, name: str) -> Path:
    """A copy of the model with one more file."""
    model = desk.copy()
    (model / name).write_text("{}")
    return model


def parquet(desk: Desk, **columns: list[object]) -> Path:
    pq.write_table(pa.table(columns), desk.here / "given.parquet", compression="zstd")
    return desk.here / "given.parquet"


def with_normalizer(pattern: str, content: str) -> Callable[[Path], object]:
    """An edit of tokenizer.json: this text becomes that before it is tokenized."""
    change = {"type": "Replace", "pattern": {"String": pattern}, "content": content}
    return configured(normalizer={"type": "Sequence", "normalizers": [change]})


def npy(desk: Desk, value: object) -> Path:
    np.save(desk.here / "given.npy", value)
    return desk.here / "given.npy"


ZORK = ("--prompt", "zork " * 6)
CHAT = '{"messages": [{"role": "%s", "content": "Once upon a time"}]}'
KNOWN = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"


def chat(desk: Desk, rows: str, template: str = KNOWN) -> Outcome:
    model = desk.copy(chat_template__jinja=lambda path: path.write_text(template))
    return desk.gptq(desk.file("t.jsonl", rows), model=model)


def prune(desk: Desk, method: str, *more: object) -> Outcome:
    words = ["prune", desk.model, "--method", method, "--output", desk.output]
    return command(*words, *([] if method == "magnitude" else ["--calibration", desk.tokens]), *more)


def rotation(desk: Desk, setting: str, *more: object) -> Outcome:
    words = ["quantize", desk.model, "--method", "rotate", "--output", desk.output]
    return command(*words, "--set", setting, *more)


def low_rank(desk: Desk, setting: str, *more: object) -> Outcome:
    words = ["quantize", desk.model, "--method", "low-rank", "--calibration", desk.tokens, "--output", desk.output]
    return command(*words, "--set", setting, *more)


def fit(desk: Desk, *more: object) -> Outcome:
    data = ["--calibration", desk.tokens, "--text", desk.tokens]
    return command("fit", desk.model, *data, "--output", desk.output, "--no-trellis", "--no-rotate", *more)


def fit_on(desk: Desk, calibration: object, *more: object) -> Outcome:
    words = ["fit", *(more or (desk.model,)), "--calibration", calibration, "--output", desk.output]
    return command(*words, "--bits", 3.4, "--no-trellis", "--no-rotate")


def fit_beside_notes(desk: Desk) -> Outcome:
    beside = desk.output.with_name(f"{desk.output.name}.fit")
    beside.mkdir()
    (beside / "fit.md").write_text("notes of another hand")
    return fit(desk, "--bits", 3)


def batches(desk: Desk) -> Path:
    torch.save([{"input_ids": torch.ones(2, 8, dtype=torch.int64)}], desk.here / "batches.pt")
    return desk.here / "batches.pt"


def sweep(desk: Desk, recipes: list[object], *more: object) -> Outcome:
    return command("sweep", desk.model, *recipes, "--text", desk.tokens, "--output", desk.output, *more)


BUDGETS: dict[str, Case] = {
    "sweep of two recipes of one name": (
        lambda d: sweep(d, ["w4a16-gptq", "w4a16-gptq"]),
        ("two recipes are called 'w4a16-gptq'", "rename one"),
    ),
    "sweep without calibration data": (
        lambda d: sweep(d, ["w8a16-rtn", "w4a16-gptq"]),
        ("'w4a16-gptq' needs calibration data", "give text or token ids"),
    ),
    "group size of a sweep without groups": (
        lambda d: sweep(d, ["w8a16-rtn", "fp8-rtn"], "--group-size", 32),
        ("no recipe has groups", "group size 32 has no say", "leave it out"),
    ),
    "sweep of a recipe that is not there": (lambda d: sweep(d, ["nosuch"]), ("nosuch", "w4a16-gptq")),
}
FITS: dict[str, Case] = {
    "fit to nothing": (fit, ("0 targets given; give one", "--size 85MB", "--task-loss 1%")),
    "fit to two things": (lambda d: fit(d, "--kl", 0.1, "--bits", 3), ("2 targets given; give one", "--kl 0.05")),
    "fit to a size without a unit": (lambda d: fit(d, "--size", "8.5"), ("'8.5'", "2.1GB")),
    "fit to a size in bits that nothing has": (
        lambda d: fit(d, "--size", "1.5bpw"),
        ("bits 1.5; the smallest recipe has 2.", "give that or more"),
    ),
    "fit by another method": (
        lambda d: fit(d, "--bits", 3, "--method", "awq"),
        ("unknown method 'awq'", "gptq, k-quants"),
    ),
    "fit with another effort": (lambda d: fit(d, "--bits", 3, "--effort", "fast"), ("'fast'", "default, best")),
    "fit of K-quants for an engine": (
        lambda d: fit(d, "--bits", 5, "--method", "k-quants", "--for", "vllm"),
        ("--for vllm has schemes of its own", "--method k-quants"),
    ),
    "fit that leaves a recipe in something else": (
        lambda d: fit(d, "--bits", 3, "--recipe-only"),
        ("a recipe is a file that ends in .yaml",),
    ),
    "fit that runs nothing and trains it": (
        lambda d: fit(d, "--bits", 3, "--recipe-only", "--recover", "5min", "--output", d.here / "mixed.yaml"),
        ("hours and recover are of a recipe that is run",),
    ),
    "fit beside another's notes": (fit_beside_notes, ("fit.md exists and is not what compress writes", "move it")),
    "fit to no bits": (lambda d: fit(d, "--bits", 0), ("bits 0.0; allowed: above 0", "like 3.4")),
    "fit to no KL": (lambda d: fit(d, "--kl", 0), ("kl 0.0; allowed: above 0", "0.02")),
    "fit to words": (lambda d: fit(d, "--task-loss", "little"), ("task loss 'little'; allowed: above 0", "like 1%")),
    "fit to all of the loss": (lambda d: fit(d, "--task-loss", "100%"), ("'100%'; allowed", "below 100%")),
    "fit in no time": (lambda d: fit(d, "--kl", 1, "--hours", 0), ("hours 0.0; allowed: above 0", "like 0.5")),
    "fit that recovers words": (
        lambda d: fit(d, "--kl", 1, "--recover", "30"),
        ("recover '30'; allowed: a length of time", "30min"),
    ),
    "fit in less time than a recipe takes": (
        lambda d: fit(d, "--kl", 1, "--hours", 1e-9),
        ("hours 1e-09; measuring the layers and running one recipe take about", "fewer --samples"),
    ),
    "fit to a size that nothing has": (
        lambda d: fit(d, "--size", "2KB"),
        ("size 2,000 bytes; the smallest recipe takes", "give that or more"),
    ),
    "fit to bits that nothing has": (
        lambda d: fit(d, "--bits", 1.5),
        ("bits 1.5; the smallest recipe has 2.", "give that or more"),
    ),
    "fit for an engine of another form": (
        lambda d: fit(d, "--bits", 4, "--for", "llama.cpp"),
        ("--for llama.cpp opens another form", "allowed: vllm, transformers", "quantize --for llama.cpp"),
    ),
    "fit for no engine": (lambda d: fit(d, "--bits", 4, "--for", "vlm"), ("unknown engine 'vlm'", "'vllm'")),
    "fit on few windows": (
        lambda d: fit_on(d, d.tokens),
        ("calibration has 6 windows, of which a fifth is held out: give 10 or more", "--text TEXT"),
    ),
    "fit on batches": (
        lambda d: fit_on(d, batches(d)),
        ("fit measures next tokens", "give calibration text or token ids"),
    ),
    "fit on windows with padding": (
        lambda d: fit_on(
            d,
            d.file("t.jsonl", "\n".join((CHAT % "user").replace("time", "time " * i) for i in range(1, 90))),
            d.copy(chat_template__jinja=lambda path: path.write_text(KNOWN)),
        ),
        ("makes windows with padding", "--text TEXT"),
    ),
}
MODELS: dict[str, Case] = {
    "unknown hub model": (lambda d: d.rtn("nosuch/model"), ("'nosuch/model'", "directory", "hub id", "'demo'")),
    "unknown bare name": (lambda d: d.rtn("nosuchmodel"), ("'nosuchmodel'", "directory", "hub id", "'demo'")),
    "missing path": (lambda d: d.rtn("./no/such/model"), ("'./no/such/model'", "does not exist", "directory")),
    "empty name": (lambda d: d.rtn(""), ("empty name", "directory", "hub id")),
    "GGUF file": (
        lambda d: d.rtn(d.file("m.gguf", "x")),
        ("m.gguf cannot be read by gguf", "fetch it again"),
    ),
    "ONNX file": (lambda d: d.rtn(d.file("m.onnx", "x")), ("m.onnx' is an ONNX graph", "that it was exported from")),
    "pickled file": (lambda d: d.rtn(d.file("m.pt", "x")), ("m.pt' is a file of PyTorch", "save_pretrained(DIR)")),
    "directory of two GGUF files": (
        lambda d: d.rtn((d.file("m.gguf", "x"), d.file("n.gguf", "x"))[0].parent),
        ("holds 2 GGUF files, like m.gguf", "give one of them"),
    ),
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
    "config that comes with code of its own": (
        lambda d: d.rtn(d.copy(config__json=configured(model_type="zork", auto_map={"AutoConfig": "own.Config"}))),
        ("the configuration of", "(own.Config)", "not run", "--trust-remote-code"),
    ),
    "kernel of the hub": (
        lambda d: d.rtn(d.copy(config__json=configured(_attn_implementation="owner/kernel@v1:f"))),
        ("config.json names 'owner/kernel@v1:f' (_attn_implementation)", "would fetch and run", "take it out"),
    ),
    "kernel of the hub, of a part": (
        lambda d: d.rtn(d.copy(config__json=configured(text_config={"attn_implementation": {"": "paged|me/x"}}))),
        ("config.json names 'paged|me/x' (attn_implementation)", "a kernel of the hub"),
    ),
    "weights elsewhere": (
        lambda d: d.rtn(d.copy(config__json=configured(transformers_weights="../model.safetensors"))),
        ("names the weights '../model.safetensors' (transformers_weights)", "it must be a .safetensors or"),
    ),
    "weights that are missing": (
        lambda d: d.rtn(d.copy(config__json=configured(transformers_weights="other.safetensors"))),
        ("names the weights 'other.safetensors'", "file beside it"),
    ),
    "weights that transformers would read instead": (
        lambda d: d.rtn(with_file(d, "shard-00001-model-00001-of-00001.safetensors")),
        ("is a part of a model of torch.distributed, which transformers would read instead of model.safetensors",),
    ),
    "adapter beside the model": (
        lambda d: d.rtn(with_file(d, "adapter_config.json")),
        ("holds an adapter of peft beside its model", "merge_and_unload()", "or move adapter_config.json away"),
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
        ("model has no tokenizer; copy that of the original model into it", ".pt or .npy"),
    ),
}

TEXTS: dict[str, Case] = {
    "missing text file": (lambda d: d.gptq(d.here / "no.txt"), ("no.txt' does not exist",)),
    "empty text": (lambda d: d.gptq(d.file("t.txt", "")), ("t.txt holds no text",)),
    "blank text": (lambda d: d.gptq(d.file("t.txt", " \n\n ")), ("t.txt holds no text",)),
    "short text": (
        lambda d: d.gptq(d.file("t.txt", "hello there")),
        ("t.txt has 4 tokens", "one window of 64", "shorter --length"),
    ),
    "text in Latin-1": (lambda d: d.gptq(d.file("t.txt", b"un caf\xe9 ")), ("t.txt is not UTF-8 (byte 6)", "convert")),
    "place of BOS that is none": (
        lambda d: d.gptq("demo", "--bos", "rows"),
        ("unknown bos 'rows'", "row, window, none"),
    ),
    "BOS of a tokenizer without one": (
        lambda d: d.gptq("demo", "--bos", "window", model=d.copy(tokenizer_config__json=configured(bos_token=None))),
        ("bos 'window' for demo: its tokenizer has no BOS", "give none"),
    ),
    "BOS of tokens": (lambda d: d.gptq(d.tokens, "--bos", "none"), ("has its tokens already", "bos 'none'")),
    "BOS that nobody reads": (lambda d: d.rtn(d.model, "--bos", "row"), ("uses no calibration data; drop --bos",)),
    "BOS of overlapping windows": (
        lambda d: command("evaluate", d.model, "--text", "demo", "--stride", 8, "--bos", "window"),
        ("bos 'window' and stride 8", "leave one of them out"),
    ),
    "unknown ending": (
        lambda d: d.gptq(d.file("t.docx", "x")),
        ("'.docx'", "text (.txt, .raw, .md or no ending), .jsonl, .json, .parquet, .pt, .npy"),
    ),
    "directory": (lambda d: d.gptq(d.here), ("is a directory", ".txt, .jsonl, .json, .parquet")),
    "unreachable dataset": (
        lambda d: d.gptq("nosuch/dataset"),
        ("'nosuch/dataset' is no file here, and the hub ", "datasets id", ".jsonl, .json, .parquet, .pt", "'demo'"),
    ),
    "text in a folder that is there": (
        lambda d: d.gptq(d.file("t.jsonl", "").parent / "nosuch"),
        ("text file ", "nosuch' does not exist"),
    ),
    "bad line of jsonl": (
        lambda d: d.gptq(d.file("t.jsonl", '{"text": "a"}\n\n{"text": \n')),
        ("t.jsonl line 3 is not JSON",),
    ),
    "jsonl without text": (
        lambda d: d.gptq(d.file("t.jsonl", '{"text": "a"}\n{"txt": "b"}\n')),
        ("t.jsonl line 2 has no string field 'text'",),
    ),
    "jsonl of lists": (
        lambda d: d.gptq(d.file("t.jsonl", "[1]\n")),
        ("t.jsonl line 1 has no string field 'text'", "prompt + completion", "instruction + input + output"),
    ),
    "json of one object": (
        lambda d: d.gptq(d.file("t.json", '{\n"data": []}')),
        ("t.json line 1 is not JSON; give an array of rows",),
    ),
    "prompt without a completion": (
        lambda d: d.gptq(d.file("t.json", '[{"prompt": "a"}]')),
        ("t.json row 1 has no string field 'text'", "prompt + completion"),
    ),
    "rows that are all empty": (
        lambda d: d.gptq(d.file("t.jsonl", '{"text": null}\n{"prompt": "", "completion": null}\n')),
        ("t.jsonl holds no text",),
    ),
    "chat without a template": (
        lambda d: d.gptq(d.file("t.jsonl", CHAT % "user")),
        ("t.jsonl holds chat messages", "no chat template", "chat_template.jinja"),
    ),
    "chat that is no list of messages": (
        lambda d: chat(d, '{"messages": [{"content": "a"}]}'),
        ("t.jsonl line 1: message 1 is no message", "a role and a content"),
    ),
    "chat line that is not JSON": (lambda d: chat(d, CHAT % "user" + "\n{\n"), ("t.jsonl line 2 is not JSON",)),
    "role that the template refuses": (
        lambda d: chat(d, CHAT % "zork", "{{ raise_exception('only user and assistant') }}"),
        ("t.jsonl line 1", "chat template cannot write it (roles zork)", "only user and assistant"),
    ),
    "role that the template passes over": (
        lambda d: chat(d, CHAT % "user" + "\n" + CHAT % "zork"),
        ("t.jsonl line 2", "writes nothing for the role 'zork'"),
    ),
    "image for a model of text": (
        lambda d: chat(d, '{"messages": [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}]}'),
        ("t.jsonl line 1: a message holds 'image'", "text alone"),
    ),
    "tools that are no list": (
        lambda d: chat(d, '{"messages": [{"role": "user", "content": "a"}], "tools": "nothing"}'),
        ("t.jsonl line 1: 'tools' is neither a list nor the JSON text of one",),
    ),
    "chats without messages": (lambda d: chat(d, '{"messages": []}'), ("t.jsonl holds no row of 2 tokens or more",)),
    "conversations to evaluate on": (
        lambda d: command("evaluate", d.model, "--text", d.file("t.jsonl", CHAT % "user")),
        ("t.jsonl line 1 has no string field 'text'", "calibration and training alone"),
    ),
    "empty jsonl": (lambda d: d.gptq(d.file("t.jsonl", "\n\n")), ("t.jsonl holds no text",)),
    "parquet without column": (
        lambda d: d.gptq(parquet(d, story=["a"])),
        ("given.parquet is not a parquet file with a column 'text'",),
    ),
    "parquet of one long text": (
        lambda d: d.gptq(parquet(d, text=["x" * 5_000_000])),
        ("given.parquet stands for more than 4 MB of text, 100 times its size", "as .jsonl"),
    ),
    "parquet of one text many times": (
        lambda d: d.gptq(parquet(d, text=["x" * 90_000] * 100)),
        ("given.parquet stands for more than",),
    ),
    "parquet of nothing many times": (
        lambda d: d.gptq(parquet(d, text=[""] * 100_000)),
        ("given.parquet stands for more than",),
    ),
    "template that asks for memory": (
        lambda d: chat(d, CHAT % "user", "{{ 'x' * 3000000000 }}"),
        ("t.jsonl line 1: the tokenizer's chat template cannot write it", "more than 1024 MiB of memory"),
    ),
    "template that writes and writes": (
        lambda d: chat(d, CHAT % "user", "{{ 'x' * 3000000 }}"),
        ("t.jsonl line 1", "it makes 3,000,000 characters of"),
    ),
    "tokenizer of many tokens for a letter": (
        lambda d: d.gptq("demo", model=d.copy(tokenizer__json=with_normalizer("a", "a" * 100_000))),
        ("has no usable tokenizer (it makes 100,000 tokens of 1 characters)",),
    ),
    "tokenizer of many tokens for a word": (
        lambda d: d.gptq(
            d.file("t.txt", "zork " * 300), model=d.copy(tokenizer__json=with_normalizer("zork", "a" * 10_000_000))
        ),
        ("the tokenizer cannot split", "t.txt (it takes more than 1024 MiB of memory)"),
    ),
    "prompt of many tokens for a word": (
        lambda d: command("generate", d.copy(tokenizer__json=with_normalizer("zork", "a" * 100_000)), *ZORK),
        ("the tokenizer cannot split the prompt (it makes 600,001 tokens of 30 characters)",),
    ),
    "question of many tokens for a word": (
        lambda d: command(
            "evaluate",
            d.copy(tokenizer__json=with_normalizer("zork", "a" * 100_000)),
            *("--task", d.file("q.jsonl", json.dumps({"question": ZORK[1], "choices": ["a", "b"], "answer": 0}))),
        ),
        ("the tokenizer cannot split q", "tokens of"),
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
    "tokens that repeat one": (
        lambda d: d.gptq(d.ids(torch.zeros(1, dtype=torch.int64).expand(1000, 1000))),
        ("given.pt holds tensors of 8 MB", "that share values", "contiguous()"),
    ),
    "batches that share their tokens": (
        lambda d: d.gptq(d.ids([{"input_ids": shared} for shared in [torch.zeros(9, 9999).long()] * 999])),
        ("given.pt holds tensors of", "that share values"),
    ),
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
        ("group size 64", "96 inputs of model.layers.0.mlp.down_proj", "2 layers", ": 16, 32, -1"),
    ),
    "large tensors in the output": (
        lambda d: d.gptq(d.tokens, "--spill", d.output),
        ("--output and --spill both name", "a place of its own"),
    ),
    "large tensors below the output": (
        lambda d: d.gptq(d.tokens, "--spill", d.output / "large"),
        ("spill", "large' is the output", "or lies in it; give another"),
    ),
    "figures in the place of the output": (
        lambda d: d.rtn(d.model, "--json", d.output),
        ("--output and --json both name", "a place of its own"),
    ),
    "large tensors in the output that is not complete": (
        lambda d: d.gptq(d.tokens, "--spill", d.output.with_name("output.partial")),
        ("spill", "output.partial' is the output"),
    ),
    "group size -2": (lambda d: d.rtn(d.model, "--group-size", -2), ("group size -2", "-1")),
    "1 bit": (lambda d: d.rtn(d.model, "--scheme", "w1a16"), ("'w1a16'; allowed: w2a16", "w8a16")),
    "9 bits": (lambda d: d.rtn(d.model, "--scheme", "w9a16"), ("'w9a16'; allowed: w2a16", "w8a16")),
    **{
        f"scheme in the words of others: {word}": (
            lambda d, word=word: d.rtn(d.model, "--scheme", word),
            (f"unknown scheme '{word}'; did you mean '{scheme}'? allowed: w2a16",),
        )
        for word, scheme in {
            "W4A16": "w4a16",
            "w4": "w4a16",
            "int4": "w4a16",
            "3bit": "w3a16",
            "W8A8_INT8": "w8a8",
            "FP8": "fp8",
            "NVFP4": "nvfp4",
            "MXFP4A16": "mxfp4a16",
            "NF4": "nf4a16",
            "IQ4-NL": "iq4_nl",
        }.items()
    },
    "grid in capitals": (
        lambda d: d.rtn(d.model, "--grid", "Narrow"),
        ("unknown grid 'Narrow'; did you mean 'narrow'?",),
    ),
    "method in capitals": (
        lambda d: d.rtn(d.model, "--method", "GPTQ"),
        ("unknown method 'GPTQ'; did you mean 'gptq'?", METHODS),
    ),
    "method of another name": (lambda d: d.rtn(d.model, "--method", "svd"), ("'svd'; did you mean 'low-rank'?",)),
    "scheme for a method": (lambda d: d.rtn(d.model, "--method", "int8"), ("'int8'; did you mean scheme 'w8a16'?",)),
    "unknown grid": (
        lambda d: d.rtn(d.model, "--grid", "asym"),
        ("grid 'asym'", "signed-scale, symmetric, narrow, asymmetric"),
    ),
    "unknown method": (
        lambda d: d.rtn(d.model, "--method", "gtpq"),
        ("unknown method 'gtpq'", "did you mean 'gptq'?", f"allowed: {METHODS}"),
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
    "unknown objective": (
        lambda d: d.gptq(d.tokens, "--set", "objective=kl"),
        ("objective 'kl'", "layer, loss"),
    ),
    "unknown order": (lambda d: d.gptq(d.tokens, "--set", "act_order=up"), ("act_order 'up'", "none, static, group")),
    "more exact weights than pay": (
        lambda d: d.rtn(d.model, "--set", "outliers=0.5"),
        ("outliers 0.5", "0 (none) to 0.25"),
    ),
    "exact weights beside one scale": (
        lambda d: d.rtn(d.model, "--group-size", -1, "--set", "outliers=0.01", "--set", "per_tensor=true"),
        ("outliers go beside codes in groups or channels", "drop per_tensor"),
    ),
    "exact weights beside rounded inputs": (
        lambda d: d.rtn(d.model, "--group-size", -1, "--set", "outliers=0.01", "--scheme", "w8a8"),
        ("outliers go beside codes in groups or channels", "drop scheme w8a8"),
    ),
    "bits and scheme": (
        lambda d: d.rtn(d.model, "--bits", 3, "--scheme", "w4a16"),
        ("--bits is short for --scheme w3a16", "drop it, or --scheme w4a16"),
    ),
    "effort of no kind": (lambda d: d.gptq(d.tokens, "--effort", "most"), ("effort 'most'", "fast, default, best")),
    "rotation of a recipe": (
        lambda d: d.recipe("passes: [rtn: {scheme: w8a16}]", "--rotate"),
        ("--recipe sets all options", "drop rotate"),
    ),
    "rotation twice": (
        lambda d: command("quantize", d.model, "--method", "rotate", "--rotate", "--output", d.output),
        ("--method rotate rotates already; drop --rotate",),
    ),
    "rotation of nothing": (
        lambda d: rotation(d, "hidden=false", "--set", "heads=false"),
        ("rotate with nothing to rotate; give hidden, heads or online",),
    ),
    "rotation in blocks of one": (lambda d: rotation(d, "block=1"), ("block 1", "allowed: 2 or more")),
    "rotation in blocks that do not fit": (
        lambda d: rotation(d, "block=48"),
        ("blocks of 48 for 64 channels", "blocks that fit: 2, 4, 8, 16, 32, 64"),
    ),
    "rotation with a negative seed": (lambda d: rotation(d, "seed=-1"), ("seed -1", "allowed: 0 to")),
    "rotation behind another pass": (
        lambda d: d.recipe("passes: [rtn: {scheme: w8a16}, rotate: {}]"),
        ("rotate changes the weights that other passes decide about; put it first",),
    ),
    "effort of another method": (
        lambda d: d.rtn(d.model, "--effort", "best"),
        ("--effort is of gptq, k-quants, spqr and trellis; rtn",),
    ),
    "bits of no scheme": (lambda d: d.rtn(d.model, "--bits", 1), ("'w1a16'", "w2a16")),
    "spqr with rounded inputs": (
        lambda d: d.spqr("--scheme", "w4a8"),
        ("scheme of spqr, which leaves inputs as they are, 'w4a8'; allowed: w2a16, w3a16",),
    ),
    "iq4_nl of pruned layers": (
        lambda d: d.recipe("passes:\n- magnitude: {sparsity: 0.5}\n- rtn: {scheme: iq4_nl}\n"),
        ("'rtn' does not keep the zeros of", "which 'magnitude' has pruned before it"),
    ),
    "mxfp4 in other groups": (
        lambda d: d.rtn(d.model, "--scheme", "mxfp4a16", "--group-size", 64),
        ("mxfp4a16 has groups of 32", "leave group_size out"),
    ),
    "mxfp4 with a zero point": (
        lambda d: d.rtn(d.model, "--scheme", "mxfp4a16", "--grid", "asymmetric"),
        ("mxfp4a16 has levels and scales of its own", "leave grid, scales and per_tensor out"),
    ),
    "mxfp4 with fixed inputs": (
        lambda d: d.rtn(d.model, "--scheme", "mxfp4", "--set", "activations=static", "--calibration", "demo"),
        ("mxfp4 fits inputs to every group of a token", "leave activations out"),
    ),
    "an embedding in nf4": (
        lambda d: d.rtn(d.model, "--embeddings", "nf4a16"),
        ("scheme nf4a16: no layer looks rows of such codes up", "give w8a16 or w4a16"),
    ),
    "spqr in fixed order": (
        lambda d: d.spqr("--set", "act_order=static"),
        ("act_order static fixes scales beforehand", "give group or none"),
    ),
    "spqr by two budgets": (
        lambda d: d.spqr("--set", "threshold=0.2", "--set", "bits_per_weight=4"),
        ("threshold and bits_per_weight both say how many outliers", "give one"),
    ),
    "spqr by too small a budget": (
        lambda d: d.spqr("--set", "bits_per_weight=3.5"),
        ("bits_per_weight 3.5", "takes 3.625 without a single outlier"),
    ),
    "spqr with 9-bit scales": (lambda d: d.spqr("--set", "scale_bits=9"), ("scale_bits 9", "1 to 8")),
    "spqr in tiles of no row": (lambda d: d.spqr("--set", "tile_rows=0"), ("tile_rows 0", "1 or more")),
    "spqr by a threshold below 0": (lambda d: d.spqr("--set", "threshold=-1"), ("threshold -1.0", "above 0")),
    "spqr by a threshold in groups of one": (
        lambda d: d.spqr("--set", "threshold=0.2", "--group-size", 1),
        ("threshold compares a weight with the others of its group", "2 or more"),
    ),
    "spqr in groups that do not divide": (
        lambda d: d.spqr("--group-size", 24),
        ("group size 24 does not divide the 64 inputs of model.layers.0", "sizes that work"),
    ),
    "a trellis of one bit": (
        lambda d: d.trellis("--bits", 1),
        ("scheme of trellis, which leaves inputs as they are, 'w1a16'; allowed: w2a16, w3a16, w4a16",),
    ),
    "a trellis of odd states": (lambda d: d.trellis("--set", "state_bits=13"), ("state_bits 13", "10, 12, 14, 16")),
    "a trellis of short runs": (lambda d: d.trellis("--set", "run=10"), ("run 10", "64 or more")),
    "a trellis whose runs are cut": (lambda d: d.trellis("--set", "run=100"), ("run 100", "steps of 32")),
    "a K-quant that is none": (
        lambda d: command("quantize", d.model, "--method", "rtn", "--scheme", "q7_k", "--output", d.output),
        ("K-quant 'q7_k'", "allowed: q2_k, q3_k, q4_k, q5_k, q6_k"),
    ),
    "a K-quant in groups": (
        lambda d: d.rtn(d.model, "--scheme", "q4_k"),
        ("option of k-quants 'group_size'", "allowed:"),
    ),
    "a K-quant to nearest with damping": (
        lambda d: command(
            *("quantize", d.model, "--method", "rtn", "--scheme", "q4_k", "--set", "damp=0.1", "--output", d.output)
        ),
        ("damp is of rounding=gptq", "leave it out"),
    ),
    "a K-quant of another method": (
        lambda d: d.spqr("--scheme", "q4_k"),
        ("scheme of spqr", "'q4_k'", "written by the pass k-quants", "allowed here: w2a16"),
    ),
    "a K-quant of inputs that no type has": (
        lambda d: command(
            *("quantize", save(make_llama(intermediate_size=72), d.here / "odd"), "--method", "rtn"),
            *("--scheme", "q4_k", "--output", d.output),
        ),
        ("q4_k needs inputs in multiples of 32", "down_proj has 72", "2 layers in all"),
    ),
    "rank above what a layer has": (
        lambda d: low_rank(d, "rank=65"),
        ("rank 65 of model.layers.0.self_attn.q_proj", "64 x 64", "up to 64", "`but`"),
    ),
    "rank below 0": (
        lambda d: low_rank(d, "rank=-1"),
        ("rank -1", "1 or more"),
    ),
    "rank 0 for what is left out": (lambda d: low_rank(d, "rank=0"), ("rank 0; allowed: 1 or more",)),
    "share that leaves no rank": (
        lambda d: low_rank(d, "share=0.01"),
        ("share 0.01 leaves no rank for model.layers.0", "64 x 64", "from 0.0312 up"),
    ),
    "share above 1": (
        lambda d: low_rank(d, "share=50"),
        ("share 50.0", "above 0, at most 1"),
    ),
    "factors of 4 bits": (
        lambda d: low_rank(d, "factor_bits=4"),
        ("factor_bits 4", "16 (the model's dtype), 8 (codes)"),
    ),
    "unknown allocation": (
        lambda d: low_rank(d, "allocate=best"),
        ("allocate 'best'", "uniform, layer-loss"),
    ),
    "ranks that are a word": (
        lambda d: low_rank(d, "ranks=8"),
        ("ranks '8'", "[layer, rank] pairs"),
    ),
    "low rank with a scheme": (
        lambda d: low_rank(d, "share=0.5", "--scheme", "w4a16"),
        ("unknown option of low-rank 'scheme'", "allocate, drift"),
    ),
    "low rank without calibration": (
        lambda d: command("quantize", d.model, "--method", "low-rank", "--output", d.output),
        ("low-rank needs calibration data", "text, token ids or 'demo'"),
    ),
    "nothing beside the codes": (
        lambda d: d.gptq(d.tokens, "--method", "lqs", "--set", "rank=0"),
        ("rank 0 leaves nothing beside what gptq finds", "use gptq"),
    ),
    "rounds of codes and low rank below 0": (
        lambda d: d.gptq(d.tokens, "--method", "lqs", "--set", "iterations=-1"),
        ("iterations -1", "0 or more rounds"),
    ),
    "scheme of a method that has none": (
        lambda d: d.gptq(d.tokens, "--method", "ternary", "--scheme", "w4a16"),
        ("unknown option of ternary 'scheme'", "act_order, damp, drift, group_size, group_up_to, outliers, packing"),
    ),
    "unknown packing": (
        lambda d: d.gptq(d.tokens, "--method", "ternary", "--set", "packing=1.6"),
        ("packing '1.6'", "bytes, words"),
    ),
    "best effort for small floats": (
        lambda d: command("quantize", d.model, "--effort", "best", "--scheme", "fp8", "--output", d.output),
        ("--effort best", "fp8 has float8 weights", "leave it out"),
    ),
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
    "samples and length of no text": (
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
    "device of another build": (
        lambda d: d.rtn(d.model, "--device", "mps"),
        ("device 'mps' cannot be used (this build of torch has no such device); usable here: cpu",),
    ),
    "device that holds no values": (lambda d: d.rtn(d.model, "--device", "meta"), ("'meta'", "usable here: cpu")),
    "device that is not there": (lambda d: d.rtn(d.model, "--device", "cuda:77"), ("'cuda:77'", "usable here: cpu")),
    "empty output": (lambda d: d.rtn(d.model, "--output", ""), ("output ''", "give a path")),
    "output without a name": (lambda d: d.rtn(d.model, "--output", "/"), ("output '/'", "give a path")),
    "output below a file": (
        lambda d: d.rtn(d.model, "--output", d.model / "config.json" / "out"),
        ("cannot write", "no folder can be made in", "config.json (Not a directory)"),
    ),
}

MASKS: dict[str, Case] = {
    "pattern that is none": (
        lambda d: prune(d, "magnitude", "--pattern", "half"),
        ("pattern 'half'", "N:M with 0 < N < M", "2:4"),
    ),
    "pattern that keeps everything": (lambda d: prune(d, "wanda", "--pattern", "4:4"), ("pattern '4:4'", "0 < N < M")),
    "pattern that does not divide": (
        lambda d: prune(d, "sparsegpt", "--pattern", "3:5"),
        ("pattern 3:5 needs inputs in multiples of 5", "model.layers.0", "has 64", "ignore it", "sparsity"),
    ),
    "pattern and another share": (
        lambda d: prune(d, "wanda", "--pattern", "2:4", "--sparsity", 0.7),
        ("pattern 2:4 makes 0.5 of weights zero, not sparsity 0.7", "give one"),
    ),
    "pattern by layer": (
        lambda d: prune(d, "magnitude", "--pattern", "2:4", "--per", "layer"),
        ("per layer has no say in pattern 2:4",),
    ),
    "everything pruned": (
        lambda d: prune(d, "magnitude", "--sparsity", 1),
        ("sparsity 1.0", "above 0, below 1"),
    ),
    "little allowed of what saves nothing": (
        lambda d: prune(d, "magnitude", "--allow-little"),
        ("method 'magnitude' stores no weights smaller", "drop --allow-little"),
    ),
    "little allowed of a dense export": (
        lambda d: command("export", d.model, "--to", "dense", "--allow-little", "--output", d.output),
        ("--to dense promises no smaller checkpoint", "drop --allow-little"),
    ),
    "heads that no configuration counts": (
        lambda d: command("prune", "demo", "--structure", "heads", "--calibration", d.tokens, "--output", d.output),
        ("heads 0.25: LlamaConfig takes no", "shares of heads that work: 0.5, 0.75", "leave heads out"),
    ),
    "nothing pruned": (lambda d: prune(d, "magnitude", "--sparsity", 0), ("sparsity 0.0", "above 0, below 1")),
    "less than nothing pruned": (
        lambda d: prune(d, "magnitude", "--sparsity", -0.5),
        ("sparsity -0.5", "above 0, below 1"),
    ),
    "nothing pruned by a recipe": (
        lambda d: d.recipe("passes: [wanda: {sparsity: 0}]", "--calibration", d.tokens),
        ("step 1: sparsity 0.0", "above 0, below 1"),
    ),
    "sparsity that is no number": (
        lambda d: d.recipe("passes: [magnitude: {sparsity: half}]"),
        ("option sparsity of magnitude is 'half'; it must be a finite number, or none",),
    ),
    "structure of what there is not": (
        lambda d: command("prune", d.model, "--structure", "head:0.5", "--output", d.output),
        ("structure 'head:0.5'", "heads, channels, hidden, layers, experts", "layers:1,experts:0.25"),
    ),
    "structure given twice": (
        lambda d: command("prune", d.model, "--structure", "heads,heads:0.5", "--output", d.output),
        ("says heads twice",),
    ),
    "experts beside other parts": (
        lambda d: command("prune", d.model, "--structure", "experts:0.25,channels", "--output", d.output),
        ("experts go in a step of their own", "give structure twice, experts first"),
    ),
    "experts of a model without any": (
        lambda d: command(
            *("prune", d.model, "--structure", "experts", "--calibration", d.tokens, "--output", d.output)
        ),
        ("experts: ", "has none as layers of their own", "leave it out"),
    ),
    "all of a structure": (
        lambda d: command("prune", d.model, "--structure", "channels:1", "--output", d.output),
        ("channels 1.0", "below 1"),
    ),
    "structure and a mask": (
        lambda d: command("prune", d.model, "--structure", "heads", "--sparsity", 0.5, "--output", d.output),
        ("--structure removes, --sparsity makes zero", "recipe"),
    ),
    "structure stored without its zeros": (
        lambda d: command(
            *("prune", d.model, "--structure", "channels", "--set", "importance=magnitude", "--set", "compensate=no"),
            *("--store", "2:4", "--output", d.output),
        ),
        ("store 2:4 is of layers that a pass prunes", "leave it out"),
    ),
    **{
        f"no 2:4 form: {words}": (
            lambda d, words=words: d.rtn(d.model, *words.split(), "--store", "2:4"),
            ("q_proj cannot be stored as 2:4: ", says, "leave out store"),
        )
        for words, says in {
            "--scheme fp8 --group-size -1": "rtn: 2:4 codes are signed integers",
            "--group-size 16 --set outliers=0.01": "rtn keeps outliers beside its codes",
            "--group-size 16": "no step prunes it",
            "--group-size 2": "rtn has groups of 2 inputs, which are not whole groups of 4",
        }.items()
    },
    "a share stored as 2:4": (
        lambda d: prune(d, "magnitude", "--sparsity", 0.5, "--store", "2:4"),
        ("cannot be stored as 2:4: magnitude prunes a share of its weights",),
    ),
    "groups that do not divide what structure leaves": (
        lambda d: d.recipe(
            "passes: [structure: {channels: 0.25, importance: magnitude, compensate: false}, rtn: {group_size: 32}]"
        ),
        ("group size 32", "mlp.down_proj", "72"),
    ),
    "structure without calibration data": (
        lambda d: command("prune", d.model, "--structure", "channels", "--output", d.output),
        ("structure needs calibration data",),
    ),
    "structure behind what rounds": (
        lambda d: d.recipe("passes: [rtn: {group_size: 32}, structure: {channels: 0.5}]"),
        ("structure changes the shapes", "put it first"),
    ),
    "structure of some layers": (
        lambda d: d.recipe("passes: [{structure: {channels: 0.5}, only: ['*.0.*']}]"),
        ("as much from every block", "leave `only` and `but` out"),
    ),
    "structure that is nothing": (
        lambda d: d.recipe("passes: [structure: {}]"),
        ("structure with nothing to remove", "give heads, channels", "layers"),
    ),
    "heads that no configuration has": (
        lambda d: command(*("prune", d.model, "--structure", "heads", "--calibration", d.tokens, "--output", d.output)),
        ("heads 0.25 of 2 heads", "is none; give 0.5 or more"),
    ),
    "per what": (lambda d: prune(d, "wanda", "--per", "block"), ("per 'block'; allowed: row, layer",)),
    "shares for nobody": (
        lambda d: d.recipe("passes: [magnitude: {sparsities: [[nope, 0.3]]}]"),
        ("sparsities of 'nope', which is no layer of this pass", "a layer is called 'model.layers.0"),
    ),
    "share twice": (
        lambda d: d.recipe("passes: [magnitude: {sparsities: [[a, 0.3], [a, 0.4]]}]"),
        ("sparsities name a layer twice",),
    ),
    "share that is none": (
        lambda d: d.recipe("passes: [magnitude: {sparsities: [[a, 1.5]]}]"),
        ("sparsities ['a', 1.5]; allowed: [layer, share] pairs",),
    ),
    "shares beside a pattern": (
        lambda d: d.recipe("passes: [magnitude: {pattern: '2:4', sparsities: [[a, 0.5]]}]"),
        ("sparsities have no say in pattern 2:4",),
    ),
    "shares that are found and given": (
        lambda d: d.recipe(
            "passes: [wanda: {allocate: layer-loss, sparsities: [[a, 0.5]]}]", "--calibration", d.tokens
        ),
        ("sparsities and allocate=layer-loss both say how many zeros a layer has",),
    ),
    "allocated how": (
        lambda d: prune(d, "wanda", "--allocate", "best"),
        ("allocate 'best'; allowed: uniform, layer-loss",),
    ),
    "allocated by what has no layers' losses": (
        lambda d: prune(d, "magnitude", "--allocate", "layer-loss"),
        ("unknown option of magnitude 'allocate'",),
    ),
    "pattern and other shares": (
        lambda d: prune(d, "sparsegpt", "--pattern", "2:4", "--allocate", "layer-loss"),
        ("allocate=layer-loss gives layers other shares, and pattern 2:4 all the same",),
    ),
    "permuted without a pattern": (
        lambda d: prune(d, "wanda", "--set", "permute=9"),
        ("permute moves inputs between the groups of a pattern, and there is none; give N:M",),
    ),
    "permuted less than never": (
        lambda d: prune(d, "wanda", "--pattern", "2:4", "--set", "permute=-1"),
        ("permute -1; allowed: 0 or more rounds",),
    ),
    "permuted without data": (
        lambda d: prune(d, "magnitude", "--pattern", "2:4", "--set", "permute=9"),
        ("magnitude needs calibration data",),
    ),
    "permuted under its gradients": (
        lambda d: prune(d, "taylor", "--pattern", "2:4", "--set", "permute=9"),
        ("permute moves weights whose gradients taylor has seen in their places; leave it out",),
    ),
    "permuted before its gradients": (
        lambda d: d.recipe(
            "passes: [{wanda: {pattern: '2:4', permute: 9}, only: ['*.down_proj']}, "
            "{taylor: {pattern: '2:4'}, but: ['*.down_proj']}]",
            "--calibration",
            d.tokens,
        ),
        ("'wanda' permutes weights whose gradients 'taylor' sees in their places before; put 'taylor' first",),
    ),
    "order that tears a pattern apart": (
        lambda d: prune(d, "sparsegpt", "--pattern", "2:4", "--set", "act_order=static"),
        ("act_order static visits inputs apart that 2:4 prunes together", "none, group"),
    ),
    "descent below 0": (lambda d: prune(d, "sparsegpt", "--set", "steps=-1"), ("steps -1", "0 or more")),
    "pruned by what rounds": (
        lambda d: prune(d, "gptq"),
        ("method 'gptq' makes no mask", "magnitude, wanda, sparsegpt, taylor", "compress quantize"),
    ),
    "pruned by what nobody knows": (lambda d: prune(d, "wonda"), ("unknown method 'wonda'", "did you mean 'wanda'")),
    "pattern given twice": (
        lambda d: prune(d, "magnitude", "--pattern", "2:4", "--set", "pattern=1:4"),
        ("option pattern is given twice ('2:4' and '1:4')",),
    ),
    "option of a mask that another method has": (
        lambda d: prune(d, "wanda", "--set", "damp=0.1"),
        ("unknown option of wanda 'damp'", "allocate, pattern, per, permute, sparsities, sparsity"),
    ),
    "mask without calibration data": (
        lambda d: command("prune", d.model, "--output", d.output),
        ("sparsegpt needs calibration data", "text, token ids or 'demo'"),
    ),
    "windows for a mask that reads none": (
        lambda d: prune(d, "magnitude", "--samples", 3),
        ("method 'magnitude' uses no calibration data; drop --samples",),
    ),
    "mask behind codes": (
        lambda d: d.recipe("passes: [rtn: {group_size: 32}, magnitude: {}]"),
        ("'magnitude' needs the dense weight of model.layers.0", "'rtn' has quantized", "put 'magnitude' first"),
    ),
    "codes without zero behind a mask": (
        lambda d: d.recipe("passes: [magnitude: {}, binary: {group_size: 32}]", "--calibration", d.tokens),
        ("'binary' does not keep the zeros of model.layers.0", "'magnitude' has pruned"),
    ),
}

RECIPES: dict[str, Case] = {
    "missing recipe": (
        lambda d: command("quantize", d.model, "--recipe", d.here / "no.yaml", "--output", d.output),
        ("no.yaml' cannot be read", "No such file"),
    ),
    "merge keys": (
        lambda d: d.recipe("a: &a {x: 1}\npasses:\n - rtn: {<<: [*a, *a]}\n"),
        ("recipe.yaml' cannot be read: line 3 has a merge key (<<); write out what it copies",),
    ),
    "not YAML": (lambda d: d.recipe("passes: ["), ("recipe.yaml' is not YAML", "line 1")),
    "number of 6000 digits": (
        lambda d: d.recipe("passes: [rtn: {group_size: 0x" + "f" * 5000 + "}]"),
        ("recipe.yaml' cannot be read", "a number of about 6000 digits"),
    ),
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
        ("unknown method 'awk'", f"allowed: {METHODS}"),
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
        ("pattern 'nope' of `only` (pass 'rtn') matches no layer", "'model.layers.0.self_attn.q_proj'"),
    ),
    "but that matches nothing": (
        lambda d: d.recipe("passes: [{rtn: {group_size: 32}, but: [down_proj]}]"),
        ("pattern 'down_proj' of `but` (pass 'rtn') matches no layer", "whole names ('*.down_proj')"),
    ),
    "regular expression that is none": (
        lambda d: d.rtn(d.model, "--ignore", "re:("),
        ("pattern 're:(' is no regular expression", "'re:.*down_proj'"),
    ),
    "two quantizing passes on one layer": (
        lambda d: d.recipe("passes: [rtn: {group_size: 32}, gptq: {group_size: 32}]", "--calibration", d.tokens),
        ("'gptq' needs the dense weight of model.layers.0", "'rtn' has quantized", "different layers"),
    ),
    "ranks of a layer that is not there": (
        lambda d: d.recipe("passes: [low-rank: {ranks: [[nope, 3]]}]", "--calibration", d.tokens),
        ("ranks of 'nope', which is no layer of this pass", "a layer is called 'model.layers.0."),
    ),
    "ranks of a layer given twice": (
        lambda d: d.recipe("passes: [low-rank: {ranks: [[a, 3], [a, 4]]}]", "--calibration", d.tokens),
        ("ranks name a layer twice",),
    ),
    "rank 0 in place of a weight": (
        lambda d: d.recipe("passes: [low-rank: {ranks: [[model.layers.0.mlp.up_proj, 0]]}]", "--calibration", d.tokens),
        ("rank 0 of model.layers.0.mlp.up_proj leaves nothing of it", "1 to 64"),
    ),
    "ranks that are no pairs": (
        lambda d: d.recipe("passes: [low-rank: {ranks: [[a, b]]}]", "--calibration", d.tokens),
        ("ranks ['a', 'b']", "[layer, rank] pairs"),
    ),
    "ranks that are given and asked for": (
        lambda d: d.recipe("passes: [low-rank: {ranks: [[a, 3]], allocate: layer-loss}]", "--calibration", d.tokens),
        ("ranks are given, and allocate=layer-loss would find others",),
    ),
    "codes after a low rank": (
        lambda d: d.recipe("passes: [low-rank: {rank: 3}, gptq: {group_size: 32}]", "--calibration", d.tokens),
        ("'gptq' needs the dense weight of model.layers.0", "'low-rank' has", "different layers"),
    ),
    "method beside a recipe": (
        lambda d: d.recipe("passes: [rtn: {group_size: 32}]", "--method", "rtn", "--scheme", "w3a16"),
        ("--recipe sets all options", "drop method, scheme", "only --group-size"),
    ),
    "samples of no text": (
        lambda d: d.recipe("passes: [rtn: {group_size: 32}]", "--samples", 3),
        ("recipe.yaml' uses no calibration data", "drop --samples"),
    ),
    "unknown built-in recipe": (
        lambda d: command("quantize", d.model, "--recipe", "w4a16-gtpq", "--output", d.output),
        ("unknown recipe 'w4a16-gtpq'", "did you mean 'w4a16-gptq'?", "fp8-kv"),
    ),
    "module that does not exist": (
        lambda d: d.recipe("passes: ['no_such.module:Pass': {}]"),
        ("'no_such.module:Pass' is code of a module, which a recipe does not import", "--plugin no_such.module"),
    ),
    "module without a name": (lambda d: d.recipe("passes: [':Pass': {}]"), ("':Pass' is code of a module",)),
    "plugin that does not exist": (
        lambda d: d.recipe("passes: ['no_such:Pass': {}]", "--plugin", "no_such"),
        ("plugin 'no_such' cannot be imported", "No module named 'no_such'"),
    ),
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
    "evaluate: no gate": (
        lambda d: command("evaluate", d.model, "--text", d.tokens, "--fail-if", "kl_mean"),
        ("gate 'kl_mean'", "one of >, >=, <, <= and a number"),
    ),
    "evaluate: a gate of nothing known": (
        lambda d: command("evaluate", d.model, "--text", d.tokens, "--fail-if", "kl_men > 1"),
        ("unknown figure 'kl_men'", "did you mean 'kl_mean'"),
    ),
    "evaluate: a stride for tokens": (
        lambda d: command("evaluate", d.model, "--text", d.tokens, "--stride", 4),
        ("has its windows already", "stride 4 does not apply", "give text"),
    ),
    "evaluate: a stride beyond the window": (
        lambda d: command("evaluate", d.model, "--text", "demo", "--length", 8, "--stride", 9),
        ("stride 9", "1 to 8"),
    ),
    "evaluate: a floor of nothing": (
        lambda d: command("evaluate", d.model, "--text", d.tokens, "--noise-floor"),
        ("noise floor is the reference's", "give a reference"),
    ),
    "dtype of what is no language model": (
        lambda d: command("evaluate", d.model, "--pairs", d.tokens, "--dtype", "stored"),
        ("--pairs is for encoders; --dtype is for models that generate text", "drop one"),
    ),
    "evaluate: pairs and text": (
        lambda d: command("evaluate", d.model, "--pairs", d.tokens, "--stride", 4),
        ("--pairs is for encoders", "--stride is for text"),
    ),
    "evaluate: missing pairs": (
        lambda d: command("evaluate", d.model, "--pairs", d.here / "no.jsonl"),
        ("no.jsonl' does not exist", "sentence1, sentence2, score"),
    ),
    "evaluate: answers without an original": (
        lambda d: command("evaluate", d.model, "--text", d.tokens, "--answers", 2),
        ("answers are those of the original", "give it (reference)"),
    ),
    "evaluate: no window of facts": (
        lambda d: command("evaluate", d.model, "--text", d.tokens, "--recall", 0),
        ("recall 0", "1 or more"),
    ),
    "evaluate: prompts that are none": (
        lambda d: command("evaluate", d.model, "--text", d.tokens, "--prompts", d.here / "no.txt"),
        ("no.txt cannot be read", "a prompt on each line"),
    ),
    "report: no form": (
        lambda d: command("report", "a", "--output", d.here / "x.pdf"),
        ("the end of the name says what is written", ".html", ".svg"),
    ),
    "report: difference of one": (lambda d: command("report", "a", "--diff"), ("--diff is of two runs; 1 given",)),
    "report: card of two": (lambda d: command("report", "a", "b", "--card"), ("--card is about one run", "2 given")),
    "report: nothing to overwrite": (
        lambda d: command("report", "a", "--overwrite"),
        ("--overwrite is for files, and none",),
    ),
    "report: a picture of one": (
        lambda d: command("report", "a", "--output", d.here / "x.svg"),
        ("quality against bytes over several runs", "give more"),
    ),
    "push: no repository": (lambda d: command("push", d.model, "mine"), ("repository 'mine'", "owner/name")),
    "push: no base model": (
        lambda d: command("push", d.model, "me/a", "--base-model", "../x"),
        ("base model '../x'", "owner/name"),
    ),
    "push: not ours": (lambda d: command("push", d.model, "me/a"), ("is not what compress wrote", "give such a")),
    "report: twice": (lambda d: command("report", d.model, d.model), ("are the same run", "give each once")),
    "report: no run": (lambda d: command("report", d.model), ("holds no compress.json", "that compress wrote")),
    "report: not there": (lambda d: command("report", "no/such"), ("'no/such' does not exist", "evaluate --json")),
    "generate: empty prompt": (
        lambda d: command("generate", d.model, "--prompt", ""),
        ("prompt is empty", "at least one token"),
    ),
    "verify: not of this tool": (lambda d: command("verify", d.model), ("no compress.json", "of this tool")),
    "inspect: code that is not run": (
        lambda d: command("inspect", d.model, "--trust-remote-code"),
        ("--trust-remote-code is for --kernels",),
    ),
    "plan: no such model": (lambda d: command("plan", "no/such/folder"), "no/such/folder"),
    "plan: a text": (lambda d: command("plan", "demo", "--calibration", "demo"), "needs no text; drop --calibration"),
    "plan: nearly a known name": (lambda d: command("plan", "llama3.1-8b"), "did you mean 'llama-3.1-8b'"),
    "quantize: a name of plan alone": (
        lambda d: command("quantize", "Llama-3.1-8B", "--method", "rtn", "--output", d.here / "out"),
        "is a name of `compress plan` alone; give the hub id meta-llama/Llama-3.1-8B or a directory",
    ),
    "plan: one rank": (lambda d: command("plan", "demo", "--ranks", 1), "ranks 1; allowed: 2 or more"),
    "plan: a memory in words": (
        lambda d: command("plan", "demo", "--device-memory", "twelve"),
        ("device memory", "'twelve'", "12GB"),
    ),
    "plan: a configuration of no language model": (
        lambda d: command("plan", d.file("config.json", '{"model_type": "resnet"}')),
        ("config.json", "no language model"),
    ),
    "plan: a compressed one": (lambda d: command("plan", d.output), "compress"),
    "inspect: two reports": (
        lambda d: command("inspect", d.model, "--kernels", "--training"),
        ("--kernels and --training are two reports",),
    ),
    "inspect: not trained": (
        lambda d: command("inspect", d.model, "--training"),
        ("holds no training.jsonl", "compress qat"),
    ),
    "export: nothing said": (
        lambda d: command("export", d.model, "--output", d.output),
        ("say what to export: --to dense or", "`compress export OUT --list`"),
    ),
    "export: to what is not known": (
        lambda d: command("export", d.model, "--to", "sparse", "--output", d.output),
        ("unknown export 'sparse'", "did you mean 'sparse24'"),
    ),
    "export: no output": (
        lambda d: command("export", d.model, "--to", "dense"),
        ("--output DIR is missing",),
    ),
    "export: a list that is to be written": (
        lambda d: command("export", d.model, "--list", "--output", d.output),
        ("--list writes no checkpoint", "drop --output"),
    ),
    "export: what is not read back": (
        lambda d: command("export", d.model, "--to", "dense", "--no-verify", "--output", d.output),
        ("--to dense is not read back", "drop --no-verify"),
    ),
    "export: shards of a single file": (
        lambda d: command("export", d.model, "--to", "gguf", "--shard-size", "1GB", "--output", d.output),
        ("shard size 1GB", "gguf writes a single weight file", "drop --shard-size"),
    ),
    "shards of no size": (lambda d: d.rtn(d.model, "--shard-size", "big"), ("shard size 'big'", "allowed: 12GB")),
    "export: a template of what takes none": (
        lambda d: command("export", d.model, "--to", "dense", "--template", "t.gguf", "--output", d.output),
        ("--to dense takes no template", "drop --template"),
    ),
    "export: a template that is not there": (
        lambda d: command("export", d.model, "--to", "gguf", "--template", d.here / "no.gguf", "--output", d.output),
        ("no.gguf' is no file", "convert_hf_to_gguf.py DENSE"),
    ),
    "export: a template that is no GGUF file": (
        lambda d: command("export", d.model, "--to", "gguf", "--template", d.file("t", "x"), "--output", d.output),
        ("t cannot be read by gguf", "convert_hf_to_gguf.py DENSE"),
    ),
    "export: no record": (
        lambda d: command("export", d.model, "--to", "sparse24", "--output", d.output),
        ("holds no compress.json", "prune it first"),
    ),
    "export: of what is not compressed": (
        lambda d: command("export", d.model, "--to", "dense", "--output", d.output),
        ("is not compressed", "dense as they are"),
    ),
    "export: a graph of what is not compressed": (
        lambda d: command("export", d.model, "--to", "onnx", "--output", d.output),
        ("it holds no codes; quantize it first",),
    ),
    "export: another word for ONNX": (
        lambda d: command("export", d.model, "--to", "onnx-qd", "--output", d.output),
        ("unknown export 'onnx-qd'", "did you mean 'onnx-qdq'"),
    ),
    "export: missing model": (
        lambda d: command("export", "./no/such", "--to", "dense", "--output", d.output),
        ("'./no/such'", "does not exist"),
    ),
    "bench: no model": (
        lambda d: command("bench", "--trust-remote-code"),
        ("give a MODEL", "python -m compress.recipes.studies.kernels.bench"),
    ),
    "recipes: unknown": (lambda d: command("recipes", "fp8"), ("unknown recipe 'fp8'", "fp8-rtn")),
    "methods: no module": (
        lambda d: command("methods", "no_such_module:Mine"),
        ("pass 'no_such_module:Mine' cannot be imported", "write module:Class, with the module on PYTHONPATH"),
    ),
    "methods: unknown": (
        lambda d: command("methods", "gtpq"),
        ("'gtpq'", "did you mean 'gptq'?", METHODS),
    ),
    "demo: overwrite of nothing": (lambda d: command("demo", "--overwrite"), ("--overwrite needs --output",)),
    "demo: wrong group size": (lambda d: command("demo", "--group-size", 100), ("group size 100", "256")),
}


def said(desk: Desk, *more: object, name: str = "said.safetensors") -> Outcome:
    return command("cache-logits", desk.model, "--output", desk.here / name, "--calibration", desk.tokens, *more)


def distill(desk: Desk, *settings: str, data: object = None) -> Outcome:
    """Half of the model, trained as the settings say, on what `said` has been asked about."""
    words = ["--structure", "layers:1", "--calibration", data or desk.tokens, "--output", desk.output]
    return command("distill", desk.model, *words, *(f"--train={setting}" for setting in settings))


def of_file(*settings: str, spoil: Callable[[Path], object] = lambda path: None, **more: object) -> Act:
    """Training on what a teacher has said, or on what has become of it."""

    def act(desk: Desk) -> Outcome:
        path = desk.here / "said.safetensors"
        assert said(desk, "--quiet").code == 0
        spoil(path)
        return distill(desk, f"teacher={path}", *settings, **{key: make(desk) for key, make in more.items()})

    return act


def flipped(path: Path) -> None:
    """The last byte of a file is another one."""
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def narrower(desk: Desk, *words: object) -> Outcome:
    return command("distill", desk.model, *words, "--training", desk.tokens, "--output", desk.output)


TAUGHT: dict[str, Case] = {
    "no student": (lambda d: narrower(d), ("no student: give one of --student MODEL, --student-layers N",)),
    "two students": (
        lambda d: narrower(d, "--student-hidden", 32, "--structure", "layers"),
        ("--student-hidden and --structure: give one of",),
    ),
    "wider student": (
        lambda d: narrower(d, "--student-hidden", 64),
        ("--student-hidden 64", "has 64 channels: allowed are 1 to 63"),
    ),
    "student of no width that the configuration takes": (
        lambda d: narrower(d, "--student-hidden", 33),
        ("LlamaConfig takes no hidden_size 33", "not a multiple of the number of attention heads (4)"),
    ),
    "nothing learned": (lambda d: distill(d, "logits=0"), ("nothing is learned", "features", "teacher=none")),
    "no teacher": (lambda d: distill(d, "teacher=none", "features=1"), ("give task=1 and logits=0, features=0",)),
    "negative weight": (lambda d: distill(d, "relations=-1"), ("relations -1.0; allowed: 0 or more",)),
    "cold contrast": (lambda d: distill(d, "contrast=0"), ("contrast 0.0; allowed: above 0",)),
    "unknown choice": (lambda d: distill(d, "related=keys"), ("unknown related 'keys'", "values, all")),
    "maps and relations": (lambda d: distill(d, "attention=1", "relations=1"), ("eager", "fused", "one of the two")),
    "nobody to be told from": (lambda d: distill(d, "contrastive=1", "rows=1"), ("contrastive", "rows=2 or more")),
    "steps and minutes": (lambda d: distill(d, "steps=2", "minutes=1"), ("two ways to say how long", "one of them")),
    "relations of compiled blocks": (lambda d: distill(d, "relations=1", "compile=true"), ("compiled blocks hide",)),
    "file that is missing": (
        lambda d: distill(d, "teacher=no.safetensors"),
        ("'no.safetensors' does not exist", "cache-logits"),
    ),
    "file of something else": (
        lambda d: distill(d, f"teacher={d.model / 'model.safetensors'}"),
        ("holds no cached logits", "cache-logits"),
    ),
    "file and hidden states": (
        lambda d: distill(d, "teacher=no.safetensors", "features=1", "relations=1"),
        ("says nothing about features and relations", "the teacher itself"),
    ),
    "half a file": (of_file(spoil=half), ("said.safetensors cannot be read", "write it anew")),
    "damaged file": (of_file(spoil=flipped), ("said.safetensors is damaged (its checksum differs)", "write it anew")),
    "other data": (
        of_file(data=lambda d: d.ids(torch.ones(8, 16, dtype=torch.long))),
        ("said of other data than is trained on", "--training", "--length"),
    ),
    "other temperature": (of_file("temperature=2"), ("made at temperature 1, and temperature 2", "tail=conditional")),
    "cache: other ending": (lambda d: said(d, name="said.pt"), ("said.pt'", "ends in .safetensors")),
    "cache: no such folder": (lambda d: said(d, name="no/said.safetensors"), ("cannot be written",)),
    "cache: too many": (
        lambda d: said(d, "--top-k", 4096, "--quiet"),
        ("top 4096 of a vocabulary of 2048", "1 to 2048"),
    ),
}

REFUSED = {
    f"{kind}: {name}": case
    for kind, cases in (
        ("model", MODELS),
        ("text", TEXTS),
        ("option", OPTIONS),
        ("mask", MASKS),
        ("recipe", RECIPES),
        ("budget", BUDGETS),
        ("fit", FITS),
        ("command", OTHERS),
        ("distill", TAUGHT),
    )
    for name, case in cases.items()
}


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Compiles the libraries that `fit` asks before it tells its time: that is announced, beside a refusal."""
    build.build_all(["columns", "gemm"])


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


def test_a_model_whose_codes_cannot_be_read_is_refused(desk: Desk, llama_w4: Path, copy_of) -> None:
    model = copy_of(llama_w4, "coded")
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "quark"
    (model / "config.json").write_text(json.dumps(config))
    outcome = desk.rtn(model)
    assert outcome.code == 2
    assert "is quantized as quark; readable: compressed-tensors, mxfp4" in last_line(outcome)
    assert not desk.output.exists()


def test_a_pattern_that_stands_still_is_refused(
    desk: Desk, llama_w4: Path, copy_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a recipe, and of a checkpoint: each letter of a name doubles the time."""
    monkeypatch.setattr("compress.base.sandbox.SECONDS", 1)
    still = "re:(([a-z]|[a-z_.0-9])+)+!"
    model = copy_of(llama_w4, "still")
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = [still]
    (model / "config.json").write_text(json.dumps(config))
    of_recipe = desk.recipe(f"passes: [{{rtn: {{group_size: 32}}, only: ['{still}']}}]")
    for outcome, what in ((of_recipe, "pattern"), (command("inspect", model), "targets of the quantization_config")):
        assert outcome.code == 2
        line = last_line(outcome)
        assert all(words in line for words in (what, still, "cannot be matched", "(it takes more than 1 seconds)"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["quantize", "demo", "--ouptut", "x"], "'--ouptut'; did you mean '--output'"),
        (["quantize", "demo"], "missing option '--output'; see `compress quantize --help`"),
        (["quantize"], "missing argument 'MODEL'; see `compress quantize --help`"),
        (
            ["quantize", "demo", "--output", "x", "--batch-size", "many"],
            "'--batch-size': 'many' is not a valid integer",
        ),
        (["evaluate", "demo", "--dtype", "int3"], "'--dtype': 'int3' is not one of 'stored', 'float32', "),
        (["evaluate", "demo"], "nothing to measure on; give --text TEXT, --task FILE, --tools, or several"),
        (
            ["evaluate", "demo", "--json", "no/such/file"],
            "'no/such/file' cannot be written: there is no folder no/such",
        ),
        (["inspect", "demo", "--json", "/"], "'/' is a directory"),
        (["generate", "demo", "--prompt", "a", "--tokens", "0"], "'--tokens': 0 is not in the range"),
        (["quantise", "demo"], "unknown command 'quantise'; did you mean 'quantize'? allowed: quantize, plan, "),
        (["--ouptut"], "no such option"),
    ],
)
def test_wrong_usage_is_explained_with_exit_code_2(arguments: list[str], says: str) -> None:
    outcome = command(*arguments)
    assert outcome.code == 2
    assert says in outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.err.startswith("compress: ")
    assert outcome.err.count("\n") == 1
    assert not outcome.out
