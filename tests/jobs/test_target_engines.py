"""What is picked for an engine, and that the forecast and the file agree about it."""

from typing import Any

import pytest
from commands import command, make_llama, save

from compress.jobs.target_engines import pick_options

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


def test_what_is_trained_or_of_another_method_gets_groups() -> None:
    known = ["scheme", "group_size"]
    for found in (
        pick_options("llama.cpp", "gptq", {}, known, trained=True),
        pick_options("llama.cpp", "lqs", {}, known),
    ):
        assert found.options == {"scheme": "w4a16", "group_size": 32}


def test_the_forecast_is_of_what_is_written(tmp_path) -> None:
    """Without a text, too: rounded to nearest, which is said. The MLP's inputs fill no super-block."""
    gguf = pytest.importorskip("gguf")
    model = save(make_llama(hidden_size=256, intermediate_size=288).half(), tmp_path / "model")
    told = command("plan", model, "--for", "llama.cpp", "--json", "-").json()
    ran = command("quantize", model, "--for", "llama.cpp", "--output", tmp_path / "out")
    assert ran.code == 0, ran
    assert "no --calibration: rounded to nearest; with a text, gptq is closer" in ran.err
    written = command("inspect", tmp_path / "out.checkpoint", "--json", "-").json()["layers"]
    schemes = {each["name"]: each["scheme"] for each in written}
    assert {each["name"]: each["scheme"] for each in told["layers"]}.items() <= schemes.items()
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors}
    assert types["token_embd.weight"] == types["blk.1.ffn_down.weight"] == "Q8_0"
    assert (types["blk.1.attn_v.weight"], types["blk.0.attn_q.weight"], types["blk.0.ffn_down.weight"]) == (
        *("Q6_K", "Q4_K", "Q5_0"),
    )
