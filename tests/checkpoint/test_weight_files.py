"""A checkpoint is opened once: what has been read from its headers is passed on, not read again."""

import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from commands import make_llama, save

import compress
from compress.checkpoint.read import weight_files
from compress.checkpoint.read.source import find_source
from compress.inference.load.quantizer import transformers_alone


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[Path]:
    """How often each weight file is opened by us (transformers, which loads the weights, opens them for itself)."""
    counts: Counter[Path] = Counter()
    safe_open = weight_files.safe_open

    def counted(path: Path, **options: Any) -> Any:
        counts[Path(path)] += 1
        return safe_open(path, **options)

    monkeypatch.setattr(weight_files, "safe_open", counted)
    return counts


def test_load_evaluate_and_verify_open_each_file_once(
    llama: Path, llama_w4: Path, text_file: Path, opened: Counter[Path]
) -> None:
    ours, theirs = llama_w4 / "model.safetensors", llama / "model.safetensors"
    for dequantize in (False, True):
        opened.clear()
        compress.load(llama_w4, dequantize=dequantize)
        assert opened == {ours: 1}
    opened.clear()
    compress.evaluate(llama_w4, reference=llama, text=str(text_file), length=16, samples=2)
    assert opened == {ours: 1, theirs: 1}
    opened.clear()
    with transformers_alone():
        compress.verify(llama_w4)
    assert opened == {ours: 1}


def test_the_weights_that_a_configuration_names_are_those_that_are_read_and_known(llama: Path, tmp_path: Path) -> None:
    """They are hashed, and no output is told to look for a file of that name."""
    other = save(make_llama(seed=9).half(), tmp_path / "other")
    named = Path(shutil.copytree(llama, tmp_path / "named"))
    shutil.copyfile(other / "model.safetensors", named / "others.safetensors")
    (named / "config.json").write_text(
        json.dumps({**json.loads((llama / "config.json").read_text()), "transformers_weights": "others.safetensors"})
    )
    source = find_source(str(named))
    assert {path.name for path in source.weights.paths} == {"others.safetensors"}
    passes = compress.RTN(group_size=32)
    outputs = [tmp_path / "out", tmp_path / "same"]
    for model, out in zip((named, other), outputs, strict=True):
        compress.quantize(model, passes, output=out)
        assert "transformers_weights" not in json.loads((out / "config.json").read_text())
    assert len({(out / "model.safetensors").read_bytes() for out in outputs}) == 1


def test_a_loaded_model_keeps_no_file_open(llama_w4: Path) -> None:
    model = compress.load(llama_w4)
    config: Any = model.config
    assert config.quantization_config.source is None


def test_a_configuration_is_read_once_here_and_once_by_transformers(llama_w4: Path) -> None:
    opened: list[str] = []
    watching = True

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event == "open" and Path(str(arguments[0])).parent == llama_w4:
            opened.append(Path(str(arguments[0])).name)

    sys.addaudithook(note)  # for good: there is no way to take one back
    compress.load(llama_w4)
    watching = False
    assert opened.count("config.json") == 2


def test_nothing_else_opens_weight_files_but_what_reads_unfinished_runs() -> None:
    root = Path(compress.__file__).parent
    sources = [path for folder in (root, root / "evaluation") for path in folder.rglob("*.py")]  # a link, not followed
    opening = {path.relative_to(root).as_posix() for path in sources if "safe_open" in path.read_text(encoding="utf-8")}
    assert opening == {
        "checkpoint/read/weight_files.py",
        "checkpoint/write/writer.py",
        "data/teacher_file.py",
    }  # a teacher's words, no weights
