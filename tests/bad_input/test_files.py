"""Files that are none, files that never end, and JSON that says something else than it should: one line, exit code 2.

What waits for ever (a FIFO that nobody writes, a million layers) is ended by the time limit of the test.
"""

import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import chdir, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from commands import PLAIN_GPTQ, Desk, Outcome, StopAfterOne, command
from evaluations import whole
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import compress
from compress.base.errors import CheckpointError, InputError
from compress.checkpoint.files import OWN_WHOLE, checksum
from compress.checkpoint.read.compressed_layers import stored_in
from compress.checkpoint.read.source import find_source
from compress.checkpoint.write.journal import Journal
from compress.checkpoint.write.manifest import read_record
from compress.data.teacher_file import ENTRY, read_cached
from compress.evaluation.cost.size import inspect_checkpoint
from compress.evaluation.report.calibration import calibrated_ranges
from compress.passes.protocol.recipe import load_recipe
from compress.passes.protocol.stages import Learn
from compress.recipes.low_rank import LowRankAndCodes
from compress.train.inputs.samples import rows_of

pytestmark = pytest.mark.timeout(60)
DEEP = "[" * 5000 + "]" * 5000
NESTED = "[" * 300 + "]" * 300  # json reads it, and what works on it afterwards does not

Edit = Callable[[Path], object]


def refused(outcome: Outcome, *says: str) -> None:
    """Exit code 2 and one line that says all of it."""
    assert outcome.code == 2, outcome
    assert not outcome.out
    assert outcome.err.startswith("compress: "), outcome.err
    assert outcome.err.count("\n") == 1, outcome.err
    assert [words for words in says if words not in outcome.err] == [], outcome.err


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def bound(path: Path) -> None:
    """A socket, by a path that is short enough for one."""
    with socket.socket(socket.AF_UNIX) as made, chdir(path.parent):
        made.bind(path.name)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


SPECIAL: dict[str, Edit] = {
    "a FIFO": os.mkfifo,
    "a socket": bound,
    "a device": device,
    "a loop of symbolic links": loop,
}


@pytest.mark.parametrize("kind", SPECIAL)
def test_only_regular_files_are_opened(
    kind: str, llama: Path, token_file: Path, copy_of: Callable[..., Path], tmp_path: Path
) -> None:
    make, output = SPECIAL[kind], tmp_path / "output"
    quantize = ["quantize", "--group-size", 32, "--output", output]
    for i, name in enumerate(("model.safetensors", "config.json", "tokenizer.json", "generation_config.json")):
        model = copy_of(llama, f"model-{i}")
        (model / name).unlink(missing_ok=True)
        make(model / name)
        refused(command(*quantize, model, "--calibration", "demo"), f"{model / name} is {kind}", "regular files")
        refused(command("inspect", model), f"{model / name} is {kind}")
    for name in ("text.txt", "text.jsonl", "text.parquet", "tokens.pt", "tokens.npy"):
        make(tmp_path / name)
        refused(command(*quantize, llama, "--calibration", tmp_path / name), f"{name}' is {kind}", "a regular file")
    make(tmp_path / "recipe.yaml")
    refused(
        command(*quantize[:1], *quantize[3:], llama, "--recipe", tmp_path / "recipe.yaml"), f"recipe.yaml' is {kind}"
    )
    indexed = copy_of(llama, "indexed")
    (indexed / "deeper").mkdir()
    make(indexed / "deeper" / "weights")
    (indexed / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "deeper/weights"}}))
    refused(command("inspect", indexed), f"names weights, which is {kind}")
    if kind == "a loop of symbolic links":
        make(tmp_path / "model")
        refused(command(*quantize, tmp_path / "model"), f"model' is {kind}")
        make(output)
        refused(command(*quantize, llama, "--calibration", "demo"), f"output' is {kind}", "another path")
        assert f"output' is {kind}" in command("inspect", llama, "--json", output).err
    assert not output.exists()


@pytest.mark.parametrize(
    ("name", "key", "to", "says"),
    [
        ("generation_config.json", "eos_token_id", "end", "eos_token_id is 'end'; it must be a whole number or"),
        (
            "generation_config.json",
            "output_hidden_states",
            0.5,
            "output_hidden_states is 0.5; it must be true or false",
        ),
        ("tokenizer_config.json", "model_max_length", [[]], "model_max_length is [[]]; it must be a number"),
    ],
)
def test_settings_of_generation_and_of_tokenizers_have_their_types(
    name: str, key: str, to: object, says: str, llama: Path, copy_of: Callable[..., Path]
) -> None:
    model = copy_of(llama)
    changed(model / name, key, to=to)
    refused(command("generate", model, "--prompt", "import", "--tokens", 2), says)


def test_a_pattern_that_a_tokenizer_gives_up_on_is_one_line(
    llama: Path, copy_of: Callable[..., Path], tmp_path: Path
) -> None:
    """The library panics, which is no Exception of Python."""
    model, text = copy_of(llama), "a" * 3000 + "! " + "hello world " * 300
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    changed(model / "tokenizer.json", "pre_tokenizer", to=split)
    (tmp_path / "t.txt").write_text(text)
    (tmp_path / "t.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": text}]}))
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    says = ("the tokenizer cannot split", "mend the pattern in its tokenizer.json")
    for name in ("t.txt", "t.jsonl"):
        words = ["--calibration", tmp_path / name, "--group-size", 32, "--output", tmp_path / "out"]
        refused(command("quantize", model, *words), *says, name)
    refused(command("evaluate", model, "--text", tmp_path / "t.txt", "--quiet"), *says, "t.txt")
    refused(command("generate", model, "--prompt", text, "--quiet"), *says, "the prompt")


@pytest.mark.parametrize("option", ["--json", "--output"])
def test_a_name_that_is_too_long_is_one_line(option: str, llama: Path) -> None:
    outcome = command("quantize", llama, "--method", "rtn", option, "x" * 5000)
    assert outcome.code == 2
    assert "too long" in outcome.err
    assert "Traceback" not in outcome.err


def changed(path: Path, *keys: str | int, to: Any) -> None:
    """One value of a JSON file, replaced."""
    whole = json.loads(path.read_text(encoding="utf-8"))
    place = whole
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = to
    path.write_text(json.dumps(whole), encoding="utf-8")


@pytest.mark.parametrize("key", ["num_hidden_layers", "n_layers"])
def test_more_layers_than_the_files_can_fill_are_not_made(llama: Path, copy_of: Callable[..., Path], key: str) -> None:
    """Once of the model itself, once of a part of it."""
    model = copy_of(llama)
    if key == "n_layers":
        changed(model / "config.json", "text_config", to={key: 10**12})
    else:
        changed(model / "config.json", key, to=10**12)
    for words in (
        ["quantize", model, "--method", "rtn", "--group-size", 32, "--output", model / "out"],
        ["evaluate", model, "--text", "demo"],
        ["generate", model, "--prompt", "a"],
    ):
        refused(command(*words), "config.json asks for 1000000000000 layers", key, "21 tensors")


def test_fewer_than_no_layers_are_refused(llama: Path, copy_of: Callable[..., Path]) -> None:
    model = copy_of(llama)
    changed(model / "config.json", "num_hidden_layers", to=-1)
    refused(command("evaluate", model, "--text", "demo"), "config.json asks for -1 of num_hidden_layers", "0 or more")


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("vocab_size", 2**21, ("describes a LlamaForCausalLM of 268,", "[2048, 64], the model's has [2097152, 64]")),
        ("num_local_experts", 10**9, ("asks for 1000000000 experts (num_local_experts)", " tensors")),
        ("num_labels", 10**9, ("asks for 1000000000 labels (num_labels)", "values")),
    ],
)
def test_a_model_that_the_files_cannot_fill_takes_no_memory(
    key: str,
    value: int,
    says: tuple[str, ...],
    llama: Path,
    llama_w4: Path,
    copy_of: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Refused before transformers loads it: that takes memory for what is missing, and gives it random values."""
    monkeypatch.setattr(transformers.LlamaForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("it is loaded"))
    for name, model in (("dense", llama), ("w4", llama_w4)):
        changed((bomb := copy_of(model, name)) / "config.json", key, to=value)
        with pytest.raises(CheckpointError) as refusal:
            compress.load(bomb)
        assert [words for words in says if words not in str(refusal.value)] == [], refusal.value


def test_an_index_names_files_of_its_own_directory(llama: Path, copy_of: Callable[..., Path]) -> None:
    model = copy_of(llama)
    for outside in ("../copy-2/model.safetensors", str(llama / "model.safetensors"), "deeper/../../model.safetensors"):
        index = {"weight_map": dict.fromkeys(load_file(llama / "model.safetensors"), outside)}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
        refused(command("inspect", model), f"is in {outside}, outside of the model")


def test_cached_logits_that_say_what_no_teacher_can_are_refused(desk: Desk) -> None:
    """Their checksums fit: somebody has written them so."""
    said, ask = desk.here / "said.safetensors", ["--calibration", desk.tokens, "--quiet"]
    assert command("cache-logits", desk.model, "--output", said, "--top-k", 4, *ask).code == 0
    with safe_open(said, "pt") as file:
        about, tensors = json.loads(file.metadata()[ENTRY]), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    indices, log_probs = tensors["indices"], tensors["log_probs"]
    learn = compress.Train().stage(Learn)
    assert learn is not None
    rows = rows_of([{"input_ids": torch.load(desk.tokens)}])
    assert len(read_cached(str(said), rows, learn.options).indices_NTk) == len(rows)
    cases: list[tuple[dict[str, Any], dict[str, torch.Tensor], str]] = [
        ({"temperature": 0}, {}, "temperature is 0; it must be above 0"),
        ({"vocabulary": "a"}, {}, "vocabulary is 'a'; it must be a whole number"),
        ({}, {"indices": indices + 4000}, "the vocabulary is 0 to 2047"),
        ({}, {"indices": indices - 4000}, "the vocabulary is 0 to 2047"),
        ({}, {"log_probs": 1 - log_probs}, "what is no logarithm of a probability"),
        ({}, {"indices": indices[..., :2].contiguous()}, "both must be [samples, tokens, k], or [samples, k]"),
        ({}, {"indices": indices[:2].clone(), "log_probs": log_probs[:2].clone()}, "of 2 samples; 6 are trained on"),
    ]
    cases += [({key: None}, {}, f"{key} is missing") for key in ("teacher", "training", "temperature", "vocabulary")]
    for changes, others, says in cases:
        held = {**tensors, **others}
        noted = {**about, **changes, "values": {key: checksum(tensor) for key, tensor in held.items()}}
        save_file(held, said, {ENTRY: json.dumps({key: value for key, value in noted.items() if value is not None})})
        with pytest.raises(CheckpointError, match=r"said\.safetensors is damaged") as refusal:
            read_cached(str(said), rows, learn.options)
        assert says in str(refusal.value)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("value", 1e308, "perplexity.value is 1e+308"),
        ("value", float("-inf"), "perplexity.value is -inf"),
        ("error", -1.0, "perplexity.error is -1"),
    ],
)
def test_figures_that_nobody_measures_are_refused(key: str, value: float, says: str, tmp_path: Path) -> None:
    path = tmp_path / "e.json"
    path.write_text(json.dumps(asdict(whole())))
    changed(path, "texts", 0, "figures", "perplexity", key, to=value)
    refused(command("report", path), f"e.json: texts.0.figures.{says}, which no evaluation finds")


def test_token_files_hold_plain_tensors(desk: Desk) -> None:
    ids = torch.zeros(2, 9, dtype=torch.int64)
    kinds = {"sparse": ids.to_sparse(), "nested": torch.nested.nested_tensor([*ids], layout=torch.jagged)}
    for kind, tensor in {**kinds, "meta": ids.to("meta")}.items():
        path = desk.ids(tensor)
        refused(command("evaluate", desk.model, "--text", path, "--quiet"), f"{path} holds a {kind} tensor", "integers")


def test_a_record_without_figures_of_a_layer_is_read(llama_w4: Path, copy_of: Callable[..., Path]) -> None:
    model = copy_of(llama_w4)
    record = json.loads((model / "compress.json").read_text())
    del record["layers"][0]["figures"]
    (model / "compress.json").write_text(json.dumps(record))
    assert command("inspect", model, "--quiet").code == 0
    assert "unexpected" not in command("report", model, "--quiet").err


def test_files_without_a_tensor_are_refused(llama: Path, copy_of: Callable[..., Path]) -> None:
    model = copy_of(llama)
    save_file({}, model / "model.safetensors")
    refused(command("inspect", model), "model.safetensors holds no tensor")


# {file: [(keys, what is put there, what the line says of it)]}
GROUP = ("quantization_config", "config_groups", "group_0")
WRONG: dict[str, list[tuple[tuple[str | int, ...], Any, str]]] = {
    "config.json": [
        (("quantization_config",), [], "config.json: quantization_config is a list; it must be a mapping or null"),
        (
            ("quantization_config", "config_groups"),
            "x",
            "config.json: quantization_config.config_groups is 'x'; it must be a mapping or null",
        ),
        (
            (*GROUP, "weights", "num_bits"),
            "four",
            "config_groups.group_0.weights.num_bits is 'four'; it must be a whole number",
        ),
        ((*GROUP, "weights", "num_bits"), 77, "readable: integer, static, 2 to 8 bits"),
        ((*GROUP, "weights", "symmetric"), 1, "symmetric is 1; it must be true or false"),
        ((*GROUP, "targets"), {"a": 1}, "targets is a mapping; it must be a list or null"),
        ((*GROUP, "targets"), ["re:("], "'re:(', which is no pattern"),
        (("architectures",), ["Llama", 5], "architectures[1] is 5; it must be a word"),
    ],
    "model.safetensors.index.json": [
        (("weight_map",), [1], "index.json: weight_map is a list; it must be a mapping"),
        (("weight_map", "lm_head.weight"), 5, "index.json: weight_map.lm_head.weight is 5; it must be a word"),
        (("weight_map", "lm_head.weight"), "", "index.json names copy, which is a directory"),
        (("weight_map", "lm_head.weight"), "a\0b", "missing"),
    ],
    "compress.json": [
        (("layers", 0, "figures"), 3, "compress.json: layers[0].figures is 3; it must be a mapping"),
        (("layers", 0, "figures", "loss"), [], "layers[0].figures.loss is a list; it must be a number"),
        (("layers", 0, "shape"), [1], "layers[0].shape is a list; it must be a list of 2"),
        (("left_alone",), None, "compress.json: left_alone is None; it must be a mapping"),
    ],
}


@pytest.fixture(scope="module")
def in_files(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compressed checkpoint of several weight files and an index."""
    output = tmp_path_factory.mktemp("in-files") / "output"
    compress.quantize(llama, compress.RTN(group_size=32), output=output, verify=False, shard_size=100_000)
    return output


def test_a_wrong_type_is_one_line_with_the_file_and_the_key(in_files: Path, copy_of: Callable[..., Path]) -> None:
    for name, cases in WRONG.items():
        for keys, value, says in cases:
            model = copy_of(in_files)
            changed(model / name, *keys, to=value)
            for words in (["inspect", model], ["verify", model]):
                refused(command(*words), says)
            shutil.rmtree(model)


@pytest.mark.parametrize("text", [DEEP, NESTED, '{"text": "\\ud800"}'], ids=["deep", "nested", "surrogate"])
def test_json_and_yaml_that_nothing_can_hold(
    text: str, llama: Path, in_files: Path, copy_of: Callable[..., Path]
) -> None:
    model = copy_of(in_files)
    for name in ("config.json", "model.safetensors.index.json", "compress.json"):
        kept = (model / name).read_text()
        (model / name).write_text(text)
        refused(command("inspect", model), f"{model / name} cannot be read: ")
        (model / name).write_text(kept)
    (model / "recipe.yaml").write_text(text)
    (model / "text.jsonl").write_text(text)
    words = ["quantize", llama, "--group-size", 32, "--calibration", model / "text.jsonl", "--output", model / "o"]
    why = "a lone surrogate '\\ud800', half of a character" if "ud800" in text else "nested deeper than"
    refused(command(*words), f"text.jsonl line 1 cannot be read: {why}")
    if "ud800" not in text:
        refused(command("quantize", model, "--recipe", model / "recipe.yaml", "--output", model / "o"), "nested deeper")


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x, x, x, x, x, x, x, x, x]\n"
        + "".join(
            f"{b}: &{b} [{', '.join(f'*{a}' for _ in range(9))}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
        ),
        "passes: &a [*a]",
    ],
    ids=["bomb", "itself"],
)
def test_yaml_whose_aliases_never_end(text: str, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    words = ["quantize", llama, "--recipe", tmp_path / "recipe.yaml", "--output", tmp_path / "out"]
    refused(command(*words), "recipe.yaml' cannot be read: ")


# --- any value, anywhere -------------------------------------------------------------------------------------------

VALUES = [
    None,
    True,
    0,
    -1,
    3,
    10**30,
    0.5,
    float("nan"),
    "",
    "x",
    "re:(",
    "\ud800",
    [],
    [1],
    ["x"],
    {},
    {"x": 1},
    [[[]]],
]


def places(value: Any, above: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The keys that lead to every value inside a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield (*above, key)
        yield from places(each, (*above, key))


@pytest.fixture(scope="module")
def written(llama: Path, in_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with everything that its JSON files can say, and an unfinished run beside it."""
    folder = tmp_path_factory.mktemp("written")
    shutil.copytree(in_files, folder / "several")
    ids = torch.arange(32).reshape(2, 16)
    passes = [
        compress.SmoothQuant(scheme="w8a8", activations="static", histograms=True),
        compress.KVCache(granularity="head"),
    ]
    common: dict[str, Any] = {"calibration": ids, "verify": False}
    compress.quantize(llama, passes, output=folder / "out", **common)
    with suppress(KeyboardInterrupt):
        compress.quantize(llama, passes, output=folder / "stopped", reporter=StopAfterOne(), **common)
    compress.quantize(llama, compress.GPTQ(group_size=32, **PLAIN_GPTQ), output=folder / "packed", **common)
    compress.quantize(llama, LowRankAndCodes(group_size=32, rank=2), output=folder / "sums", verify=False)
    options = {"scheme": "w4a16", "group_size": 32}
    recipe = {"passes": [{"rtn": options, "only": ["*.mlp.*"]}, {"gptq": options, "but": ["*.mlp.*"]}]}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return folder


def read_checkpoint(directory: Path) -> None:
    source = find_source(str(directory))
    stored_in(source)
    inspect_checkpoint(str(directory))
    read_record(directory)
    calibrated_ranges(str(directory))


READERS: dict[str, Callable[[Path], object]] = {
    "out/config.json": lambda path: read_checkpoint(path.parent),
    "packed/config.json": lambda path: read_checkpoint(path.parent),
    "sums/config.json": lambda path: read_checkpoint(path.parent),
    "several/model.safetensors.index.json": lambda path: read_checkpoint(path.parent),
    "out/compress.json": lambda path: read_checkpoint(path.parent),
    "packed/compress.json": lambda path: read_checkpoint(path.parent),
    "stopped.partial/progress.json": Journal.read,
    "recipe.yaml": load_recipe,
}


@pytest.mark.full
@pytest.mark.parametrize("name", READERS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
@given(data=st.data())
def test_any_value_anywhere_is_read_or_refused(written: Path, name: str, data: st.DataObject) -> None:
    path = written / name
    text = path.read_text()
    keys = data.draw(st.sampled_from(list(places(json.loads(text)))))
    value = data.draw(st.sampled_from(VALUES))
    try:
        changed(path, *keys, to=value)
        with suppress(InputError):
            READERS[name](path)
    finally:
        path.write_text(text)


def test_a_table_of_outliers_that_is_damaged_is_one_line(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    compress.quantize(llama, compress.RTN(group_size=32, outliers=0.02), output=out, verify=False)
    path = out / OWN_WHOLE
    held = load_file(path)
    name = min(key for key in held if key.endswith("down_proj.term1_column"))
    held[name][3] = 1000
    save_file(held, path)
    says = (f"{name.removesuffix('term1_column')}", "column goes from", "there are 96 inputs")
    torch.save(torch.arange(32).reshape(2, 16), tmp_path / "ids.pt")
    refused(command("evaluate", out, "--text", tmp_path / "ids.pt"), *says)
