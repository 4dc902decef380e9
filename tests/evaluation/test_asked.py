"""What `evaluate` measures where it is asked to, and what it leaves in the directory of a run."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import command, make_llama

import compress
from compress.base.errors import CompressError, InputError
from compress.checkpoint.write.directory import stranger_in
from compress.checkpoint.write.late_files import put_beside
from compress.evaluation.document import Figure
from compress.evaluation.evaluation_file import read_evaluation
from compress.evaluation.quality.generations import beside, parting
from compress.evaluation.speed.memory import peak_bytes
from compress.evaluation.speed.side_by_side import measure_speed, middle
from compress.inference.load.loading import load


def test_speed_is_of_both_in_turns(llama: Path, llama_w4: Path) -> None:
    ours, theirs = load(str(llama_w4), torch.float32), load(str(llama), torch.float32)
    found = measure_speed(ours, theirs, checkpoint=str(llama_w4), prompt=128, new=32, rounds=3)
    assert found.reference is not None
    for timing in (found.model, found.reference):
        assert (timing.prompt_tokens, timing.decoded_tokens) == (48, 16)  # what fits into a context of 64
        assert min(timing.prefill.value, timing.decode.value, timing.first_token_ms.value) > 0
        assert all(figure.error is not None for figure in (timing.prefill, timing.decode, timing.first_token_ms))
        assert timing.first_token_ms.value == pytest.approx(48e3 / timing.prefill.value, rel=0.5)
    layers = json.loads((llama_w4 / "compress.json").read_text())["layers"]
    assert sum(found.kernels.values()) == len(layers)
    alone = measure_speed(theirs, rounds=3, prompt=8, new=2)
    assert (alone.reference, alone.kernels) == (None, {})


def test_speed_needs_a_decoder_and_rounds() -> None:
    with pytest.raises(InputError, match="rounds 2; allowed: 3 or more"):
        measure_speed(make_llama(), rounds=2)
    with pytest.raises(InputError, match="Linear does not generate text"):
        measure_speed(torch.nn.Linear(2, 2))


def test_a_spread_is_half_the_distance_of_the_quartiles() -> None:
    assert middle([1.0, 2.0, 3.0, 4.0, 100.0]) == Figure(3.0, 1.0)


def test_texts_part_where_they_first_differ() -> None:
    assert (parting("same", "same"), parting("abc", "abd"), parting("ab", "abc"), parting("", "x")) == (None, 2, 2, 0)


def test_own_answers_are_greedy(llama: Path, llama_w4: Path) -> None:
    from compress.checkpoint.read.pretrained import load_tokenizer
    from compress.checkpoint.read.source import find_source

    tokenizer = load_tokenizer(find_source(str(llama)))
    ours, theirs = load(str(llama_w4), torch.float32), load(str(llama), torch.float32)
    prompt = tokenizer("def main():")["input_ids"]
    ids = torch.tensor([prompt])
    for _ in range(6):
        ids = torch.cat([ids, theirs(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
    answer = ids[0, len(prompt) :].tolist()
    (same,), (found,) = (beside(model, tokenizer, [prompt], [answer]) for model in (theirs, ours))
    assert (same.model, same.diverges_at) == (same.reference, None)
    assert same.prompt + same.model == tokenizer.decode(ids[0], skip_special_tokens=True)
    assert found.reference == same.model
    assert found.diverges_at == parting(found.model, found.reference)


@pytest.mark.slow
def test_peak_memory_is_that_of_a_process_of_its_own(llama: Path) -> None:
    held = torch.ones(2**28, dtype=torch.uint8)  # of this process, not of that one
    loading, running = peak_bytes(str(llama), torch.device("cpu"))
    assert 50 * 2**20 < loading <= running < 2**31
    del held
    with pytest.raises(CompressError, match="does not exist"):
        peak_bytes("no/such/model", torch.device("cpu"))


def test_an_evaluation_is_kept_with_its_run(
    llama: Path, llama_w4: Path, token_file: Path, copy_of: Callable[..., Path], tmp_path: Path
) -> None:
    out = copy_of(llama_w4)
    words = ("evaluate", out, "--reference", llama, "--text", token_file)
    assert command(*words, "--no-keep").code == 0
    assert not (out / "evaluation.json").exists()
    assert command(*words, "--speed", "--json", tmp_path / "e.json").code == 0
    assert (out / "evaluation.json").read_bytes() == (tmp_path / "e.json").read_bytes()
    assert (out / "evaluation.html").read_text("utf-8").startswith("<!doctype html>")
    found = read_evaluation(out / "evaluation.json")
    assert found.speed is not None
    assert found.missing["peak memory"] == "it was not asked for (--memory)"
    assert found.size is not None
    assert found.size.components
    assert stranger_in(out) is None  # a run with --overwrite replaces it all
    assert command("verify", out).code == 0
    assert compress.load(out) is not None
    assert command("report", out).out.startswith("# copy: rtn w4a16 g32")
    assert command("evaluate", llama, "--text", token_file).code == 0
    assert not (llama / "evaluation.json").exists()  # not ours


def test_what_somebody_else_has_put_there_stays(llama_w4: Path, token_file: Path, copy_of: Callable[..., Path]) -> None:
    out = copy_of(llama_w4)
    (out / "evaluation.md").write_text("mine", encoding="utf-8")
    done = command("evaluate", out, "--text", token_file)
    assert done.code == 0
    assert "is not kept" in done.err
    assert "evaluation.md exists and is not ours" in done.err
    assert not (out / "evaluation.json").exists()
    assert stranger_in(out) == out / "evaluation.md"
    with pytest.raises(InputError, match="is not what a run wrote"):
        put_beside(out.parent, {"a": "b"})


def test_answers_to_prompts_in_a_file_stand_side_by_side(llama: Path, llama_w4: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def main\n\nimport os\n", encoding="utf-8")
    words = ("--reference", llama, "--no-keep", "--prompts", prompts, "--json", "-")
    found = command("evaluate", llama_w4, *words, "--answers", 2, "--answer-tokens", 4).json()
    assert [each["prompt"] for each in found["generations"]] == ["def main", "import os"]
    assert found["missing"]["speed"] == "it was not asked for (--speed)"
    refused = command("evaluate", llama_w4, *words, "--text", "demo")
    assert refused.code == 2
    assert "say how many are to be answered (answers)" in refused.err
