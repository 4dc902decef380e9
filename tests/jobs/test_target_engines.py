"""What is picked for an engine, and that the forecast and the file agree about it."""

import ast
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import Outcome, command, make_llama, save
from models import tokens

import compress
from compress.checkpoint.read.source import find_source
from compress.cli.forecasts import rough
from compress.cli.run_results import next_commands
from compress.evaluation.push import push
from compress.jobs.target_engines import ENGINES, commands_to_run, pick_options

# {options of gptq: what is picked of scheme, group size and the embedding's scheme for llama.cpp}
PICKED: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "nothing": ({}, ("q4_k_m", None, "w8a16")),
    "an option of the sweep": ({"damp": 0.02}, ("q4_k_m", None, "w8a16")),
    "bits": ({"scheme": "w4a16"}, ("w4a16", 32, None)),
    "a group size": ({"group_size": 64}, ("w4a16", 64, None)),
    "an option of grids": ({"clip": False}, ("w4a16", 32, None)),
    "a type": ({"scheme": "q5_k_m"}, ("q5_k_m", None, None)),
}


@pytest.mark.parametrize("asked", PICKED)
def test_llama_cpp_gets_its_mix_where_nothing_else_is_asked_for(asked: str) -> None:
    options, expected = PICKED[asked]
    found = pick_options("llama.cpp", "gptq", options, ["scheme", "group_size"])
    assert (found.options["scheme"], found.options.get("group_size"), found.embeddings) == expected


def test_what_another_method_decides_gets_groups() -> None:
    found = pick_options("llama.cpp", "lqs", {}, ["scheme", "group_size"])
    assert found.options == {"scheme": "w4a16", "group_size": 32}
    assert not any("Q4_K_M" in line for line in found.lines)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A folder for llama.cpp, without a text: rounded to nearest. The MLP's inputs fill no super-block."""
    pytest.importorskip("gguf")
    here = tmp_path_factory.mktemp("llama")
    model = save(make_llama(hidden_size=256, intermediate_size=288).half(), here / "model")
    return here, command("quantize", model, "--for", "llama.cpp", "--output", here / "out")


def test_the_forecast_is_of_what_is_written(written: tuple[Path, Outcome]) -> None:
    import gguf

    here, ran = written
    assert ran.code == 0, ran
    assert "no --calibration: rounded to nearest; with a text (or self), gptq is closer" in ran.err
    assert "compressed-tensors" not in ran.err
    assert "s left" not in ran.err.partition("export: ")[2].partition("verify: ")[0]
    told = command("plan", here / "model", "--for", "llama.cpp", "--json", "-").json()
    schemes = {
        each["name"]: each["scheme"] for each in command("inspect", here / "out", "--json", "-").json()["layers"]
    }
    assert {each["name"]: each["scheme"] for each in told["layers"]}.items() <= schemes.items()
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(here / "out" / "model.gguf").tensors}
    files = [here / "out" / "model.gguf", *(here / "out.checkpoint").glob("*.safetensors")]
    assert told["disk"]["needed"] >= sum(file.stat().st_size for file in files)
    assert f"{rough(told['disk']['needed'])} of disk" in ran.err
    assert "size of the checkpoint" in command("plan", here / "model", "--for", "llama.cpp").out
    assert types["token_embd.weight"] == types["blk.1.ffn_down.weight"] == "Q8_0"
    assert (types["blk.1.attn_v.weight"], types["blk.0.attn_q.weight"], types["blk.0.ffn_down.weight"]) == (
        *("Q6_K", "Q4_K", "Q5_0"),
    )


def test_the_next_commands_are_told_and_the_folder_is_ready_for_ollama(written: tuple[Path, Outcome]) -> None:
    here, ran = written
    out = here / "out"
    assert ran.out.splitlines()[-4:] == [
        "next:",
        f"llama-cli -m {out}/model.gguf",
        f"ollama create out -f {out}/Modelfile && ollama run out",
        f"compress evaluate {out} --reference {here / 'model'} --text TEXT",
    ]
    assert (out / "Modelfile").read_text().splitlines()[-1] == "FROM ./model.gguf"
    card = (out / "README.md").read_text()
    assert "ollama create out -f out/Modelfile" in card
    assert "in q4_k" in card
    (out / "Modelfile").write_text("FROM ./model.gguf\nSYSTEM short\n")  # a person's own from here on
    assert compress.verify(out)["layers"] == 16
    pushed = push(out, "me/model", dry_run=True)
    assert pushed.card == card


@pytest.mark.parametrize("engine", ENGINES)
def test_commands_take_a_folder_of_any_name(engine: str) -> None:
    folder = 'models/it\'s "my" é.V1'
    for line in commands_to_run(engine, f"{folder}/", "LlamaForCausalLM"):
        words = shlex.split(line)
        if words[:2] == ["python", "-c"]:
            words = [str(node.value) for node in ast.walk(ast.parse(words[2])) if isinstance(node, ast.Constant)]
        assert any(word.startswith(folder) for word in words), line
        assert words[0] != "ollama" or words[2] == words[-1] == "it-s-my-.v1"


def test_the_page_of_a_report_lies_beside_the_folder(llama_w4: Path) -> None:
    report = next_commands(find_source(str(llama_w4)), "demo", "a b/", None)[-1]
    assert report == "compress report 'a b' --output 'a b.html'"


def test_the_card_of_an_export_gets_the_verdict_unless_a_person_edited_it(
    written: tuple[Path, Outcome], tmp_path: Path
) -> None:
    here, _ = written
    for name in ("out", "out.checkpoint"):
        shutil.copytree(here / name, tmp_path / name)
    np.save(tmp_path / "ids.npy", tokens(2))
    words = ("evaluate", tmp_path / "out", "--reference", here / "model", "--text", tmp_path / "ids.npy")
    done = command(*words)
    assert done.code == 0, done
    assert f"measured on {tmp_path / 'out.checkpoint'}, of which {tmp_path / 'out'} is an export" in done.err
    card = (tmp_path / "out" / "README.md").read_text()
    assert "KL to the original" in card
    assert "not measured" not in card
    assert push(tmp_path / "out", "me/model", dry_run=True).card == card
    (tmp_path / "out" / "README.md").write_text("Made of mine\nand mine\n")
    assert command(*words).code == 0
    assert (tmp_path / "out" / "README.md").read_text() == "Made of mine\nand mine\n"


def test_an_export_is_followed_to_its_checkpoint_while_that_is_the_same(written: tuple[Path, Outcome]) -> None:
    here, _ = written
    shown = command("inspect", here / "out")
    assert f"{here / 'out'} is an export of {here / 'out.checkpoint'}, whose layers these are" in shown.out
    assert "model.layers.*.self_attn.q_proj" in shown.out
    assert "model.layers.1.self_attn.q_proj" in command("inspect", here / "out", "--all").out
    assert compress.load(here / "out").config.hidden_size == 256
    shutil.copytree(here / "out", here / "else" / "out")
    other = ("quantize", here / "model", "--method", "rtn", "--output", here / "else" / "out.checkpoint", "--no-verify")
    assert command(*other).code == 0
    assert "is an export of" not in command("inspect", here / "else" / "out").out  # the file itself is the model


@pytest.mark.parametrize("engine", ["vllm", "ort"])
def test_an_embedding_that_is_much_of_a_result_is_said(engine: str, tmp_path: Path) -> None:
    """By the forecast, with the option that shrinks it, where the engine reads what it writes."""
    model = save(make_llama(vocab_size=2048).half(), tmp_path / "model")
    (line,) = [
        each
        for each in command("plan", model, "--for", engine, "--bits", 4).out.splitlines()
        if each.startswith("note: embedding as it was")
    ]
    assert ("--embeddings w8a16 rounds it" in line) == ENGINES[engine].tables
    small = command("plan", model, "--method", "rtn", "--embeddings", "w8a16")
    assert "embedding as it was" not in small.out
