"""`recipes/studies/engines/vllm_check.py`: what it compares, and that nothing vLLM does ends it. vLLM itself runs in
the last test, where COMPRESS_VLLM_PYTHON names a python that has it."""

import json
import os
import sys
from types import SimpleNamespace

import pytest
import torch

import compress
from compress.recipes.studies.engines import vllm_check, vllm_worker
from compress.recipes.studies.engines.agreement import compared, divergence, same_start
from compress.recipes.studies.engines.int8_products import cut_off, emulate, exact


def log_probs(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).mul(2).log_softmax(-1)


def answer(theirs_RTV, rows, top):
    """What the worker returns of these log-probabilities."""
    best, names = theirs_RTV.topk(top)
    return {"own": theirs_RTV.gather(-1, rows[:, 1:, None])[..., 0], "best": best, "names": names}


def test_divergence_is_kl_of_all_tokens_and_a_bound_of_few():
    ours, theirs = log_probs(5, 40), log_probs(5, 40, seed=1)
    kl = (ours.exp() * (ours - theirs)).sum(-1)
    found = [divergence(ours, *theirs.topk(k)) for k in (1, 8, 40)]
    assert torch.allclose(found[-1].float(), kl, atol=1e-5)
    assert (found[0] <= found[1] + 1e-9).all()
    assert (found[1] < found[2]).all()


def test_a_model_against_itself_and_against_another():
    rows = torch.randint(40, (3, 9), generator=torch.Generator().manual_seed(2))
    ours, theirs = log_probs(3, 8, 40), log_probs(3, 8, 40, seed=1)
    same = compared(list(ours), rows, answer(ours, rows, 8))
    assert (same["nats"], same["kl"], same["same_top"]) == (0, pytest.approx(0, abs=1e-6), 1)
    likelihood = ours.gather(-1, rows[:, 1:, None]).double().mean()
    assert same["perplexity"] == pytest.approx(float(likelihood.neg().exp()))
    other = compared(list(ours), rows, answer(theirs, rows, 8))
    assert other["perplexity"] == same["perplexity"]
    assert other["nats"] == pytest.approx(float(likelihood - theirs.gather(-1, rows[:, 1:, None]).double().mean()))
    assert other["kl"] > 0.1
    assert other["same_top"] < 0.5
    assert [same_start(*pair) for pair in (([1, 2, 3], [1, 2, 4]), ([1], [1, 2]), ([], [1]))] == [2, 1, 0]


def test_what_a_worker_reads_from_places():
    entry = {3: (-1.0, 2), 7: (-0.5, 1), 9: (-9.0, 30)}  # the actual token is there whatever its rank
    place = {token: SimpleNamespace(logprob=value, rank=rank) for token, (value, rank) in entry.items()}
    assert vllm_worker.likeliest([place], [9], 2) == ([-9.0], [[-0.5, -1.0]], [[7, 3]])


@pytest.mark.parametrize("inputs", [96, 97])
def test_pairs_in_sixteen_bits_are_cut_off(inputs):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-127, 128, (5, inputs), generator=generator)
    codes = torch.randint(-127, 128, (7, inputs), generator=generator, dtype=torch.int8)
    wide = torch.nn.functional.pad
    raised, even = wide(x + 128, (0, inputs % 2)), wide(codes.long(), (0, inputs % 2))
    products = (raised[:, None] * even[None]).unflatten(-1, (-1, 2)).sum(-1)
    cut = products.clamp(-(2**15), 2**15 - 1).sum(-1) - 128 * codes.long().sum(1)
    assert torch.equal(exact(x, codes) + cut_off(x, codes), cut.double())
    assert not torch.equal(exact(x, codes), cut.double())
    assert not cut_off(x, codes // 2).any()  # 2 * 64 * 255 fits


@pytest.mark.parametrize("activations", ["dynamic", "static"])
def test_emulated_layers_compute_what_the_stored_ones_do(llama, token_file, tmp_path, activations):
    passes = compress.RTN(scheme="w8a8", activations=activations)
    calibration = token_file if activations == "static" else None
    compress.quantize(
        llama, passes, calibration=calibration and str(calibration), output=tmp_path / "out", verify=False
    )
    ids = torch.load(token_file, weights_only=True)
    model = compress.load(tmp_path / "out", torch.float32)
    stored = model(input_ids=ids).logits
    assert emulate(model, dynamic=activations == "dynamic", pairs=False) == 14
    near, spread = model(input_ids=ids).logits, stored.std()
    # Fixed scales are the same numbers; absmax / 127 or / 127.5 are other codes in the same layer.
    assert (near - stored).std() < {"dynamic": 0.05, "static": 1e-5}[activations] * spread
    pairs = compress.load(tmp_path / "out", torch.float32)
    emulate(pairs, dynamic=activations == "dynamic", pairs=True)
    assert not torch.equal(pairs(input_ids=ids).logits, near)


def test_every_row_has_the_columns_of_the_table():
    ours = dict.fromkeys(("perplexity", "nats", "nats_error", "kl", "same_top"), 1.0)
    base = {"title": "w8a8 dynamic", "cpu": "avx2"}
    runs = {**base, "vllm": "runs", "perplexity": 2.0, "same_start": 3, "tokens": 4}
    rows = [
        {**runs, "ours": {vllm_check.STORED: ours}},
        {**runs, "ours": {vllm_check.STORED: ours, vllm_check.PAIRS: ours}},
        {**base, "vllm": "refuses", "reason": "ValueError: no kernel | of\n  many"},
        {**base, "vllm": "not written", "reason": "x" * 1000},
    ]
    lines = [vllm_check.line_of(row) for row in rows]
    columns = vllm_check.TABLE.splitlines()[0].count("|")
    assert [line.count("|") for line in lines] == [columns] * 4
    assert not any("\n" in line for line in lines)
    assert "refuses: ValueError: no kernel / of many" in lines[2]
    assert len(lines[3]) < 500


def test_a_worker_that_dies_or_hangs_is_a_reason(tmp_path):
    cases = {
        "echo starting; echo no such library >&2; exit 3": ("dies", "exit code 3; its last line: no such library"),
        "kill -SEGV $$": ("dies", "SIGSEGV; its last line: it printed nothing"),
        "sleep 60 & sleep 60": ("out of time", "no result within 1 s"),
    }
    python = tmp_path / "python"
    for script, (what, reason) in cases.items():
        python.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        python.chmod(0o755)
        found = vllm_check.ask(str(python), {}, vllm_check.CPUS["avx2"], tmp_path, 1)
        assert found == {"vllm": what, "error": reason}


def test_a_scheme_that_fails_leaves_the_others(tmp_path, capsys):
    """A python that never answers: every row says so, in the table and in the file; so does what cannot be written."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -c ] && exit 0\necho broken; exit 1\n', encoding="utf-8")
    python.chmod(0o755)
    target = tmp_path / "out.json"
    words = ["demo", "--vllm-python", str(python), "--length", "32", "--json", str(target)]
    vllm_check.main([*words, "--only", "original", "--cpu", "native", "avx2"])
    vllm_check.main([*words, "--only", "w4a8 per group", "--group-size", "77"])
    vllm_check.main(["--random", "olmoe", *words[1:], "--only", "original"])
    rows = json.loads(target.read_text(encoding="utf-8"))["rows"]
    assert [(row["title"], row["cpu"], row["vllm"]) for row in rows] == [
        ("original", "native", "dies"),
        ("original", "avx2", "dies"),
        ("w4a8 per group", "native", "not written"),
        ("original", "native", "dies"),
    ]
    assert [row["model"] for row in rows] == ["demo", "demo", "demo", "random olmoe"]
    assert rows[0]["reason"] == "exit code 1; its last line: broken"
    assert "77" in rows[2]["reason"]
    assert str(tmp_path) not in rows[0]["command"]
    assert len(capsys.readouterr().out.splitlines()) == 3 * (2 + len(vllm_check.TABLE.splitlines())) + 4


def test_bad_arguments_are_one_line(monkeypatch, capsys):
    monkeypatch.delenv(vllm_check.PYTHON, raising=False)
    python = ["--vllm-python", sys.executable]
    cases = {
        (): "no python with vLLM; give --vllm-python or set COMPRESS_VLLM_PYTHON",
        (*python, "--samples", "0"): "--samples 0; allowed: 1 or more",
        (*python, "--cpu", "avx3"): "unknown CPU 'avx3'",
        (*python, "--random", "llama"): "give MODEL or --random, one of them",
        (*python, "--only", "w9a9"): "no scheme has w9a9 in its name; there are original, w8a8 dynamic",
        tuple(python): "has no vLLM; give the python of an environment that has",
        ("--vllm-python", "/nowhere/python"): "/nowhere/python cannot be run: No such file or directory",
    }
    for words, message in cases.items():
        with pytest.raises(SystemExit) as left:
            vllm_check.parse(["demo", *words])
        assert left.value.code == 2
        assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_vllm_computes_what_we_do(tmp_path):
    if not os.environ.get(vllm_check.PYTHON):
        pytest.skip(f"needs a python with vLLM, named by {vllm_check.PYTHON}")
    target = tmp_path / "out.json"
    words = ["demo", "--length", "64", "--json", str(target)]
    vllm_check.main([*words, "--only", "original", "w8a8 dynamic"])
    vllm_check.main([*words, "--only", "nvfp4a16", "--cpu", "emulated"])
    for row in json.loads(target.read_text(encoding="utf-8"))["rows"]:
        assert row["vllm"] == "runs", row["reason"]
        closest = min(found["kl"] for found in row["ours"].values())
        # bfloat16 there, float32 here; codes of inputs that flip for it change all that follows.
        assert closest < {"original": 0.01, "nvfp4a16": 0.01, "w8a8 dynamic": 0.1}[row["title"]], row
