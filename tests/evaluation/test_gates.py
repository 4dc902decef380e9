"""Gates: what they let through, what they fail, and in which words."""

import math
from dataclasses import replace

import pytest
from commands import Desk, command

from compress.base.errors import InputError
from compress.evaluation.document import Evaluation, Figure, Named, SizeResult, TaskResult, TextResult
from compress.evaluation.quality.gates import Gate, parse_gate
from compress.evaluation.quality.gates import broken_gates as lines_of


def broken_gates(evaluation: Evaluation, gates: list[Gate]) -> list[str]:
    return lines_of([gate.check(evaluation) for gate in gates])


MODEL = Named("model", "Llama", 10, "float32")


def text(name: str, role: str = "held-out", **figures: float) -> TextResult:
    return TextResult(name, "", role, "", 1, 2, 2, 1, {key: Figure(value) for key, value in figures.items()})


FOUND = Evaluation(
    MODEL,
    [text("a", kl_mean=0.01, kl_max=1.0), text("b", kl_mean=0.05), text("c", "calibration", kl_mean=9.0)],
    size=SizeResult(1000, [], 10, 5, 4.25, 8.0),
    gap={"kl_mean": Figure(-8.99)},
)


@pytest.mark.parametrize(
    ("gate", "says"),
    [
        ("kl_mean > 0.05", None),  # the calibration text is nobody's measure
        ("kl_mean >= 0.05", "gate 'kl_mean >= 0.05' failed: kl_mean is 0.05 on b"),
        (" kl_mean<0.02 ", "gate 'kl_mean<0.02' failed: kl_mean is 0.01 on a"),
        ("kl_mean <= 1e-3", None),
        ("kl_max > 0.5", "gate 'kl_max > 0.5' failed: kl_max is 1 on a"),
        ("bytes > 999", "gate 'bytes > 999' failed: bytes is 1,000"),
        ("bits_per_weight > 4.25", None),
        ("gap.kl_mean < 0", "gate 'gap.kl_mean < 0' failed: gap.kl_mean is -8.99"),
        ("same_top < 0.9", "gate 'same_top < 0.9' failed: same_top was not measured: it is not defined on this text"),
    ],
)
def test_a_gate_fails_what_meets_its_condition(gate: str, says: str | None) -> None:
    assert broken_gates(FOUND, [parse_gate(gate)]) == ([] if says is None else [says])


def test_what_was_not_measured_fails_with_the_reason() -> None:
    found = Evaluation(
        MODEL, [text("a", perplexity=2.0)], missing={"reference": "no reference was given", "size": "no"}
    )
    gates = [parse_gate(gate) for gate in ("kl_mean > 9", "bytes > 9", "gap.kl_mean > 9", "perplexity > 9")]
    assert broken_gates(found, gates) == [
        "gate 'kl_mean > 9' failed: kl_mean was not measured: no reference was given",
        "gate 'bytes > 9' failed: bytes was not measured: no",
        "gate 'gap.kl_mean > 9' failed: gap.kl_mean was not measured: no calibration text was given",
    ]
    lost = Evaluation(MODEL, [text("a", perplexity=math.nan)])
    assert broken_gates(lost, [parse_gate("perplexity > 9")]) == [
        "gate 'perplexity > 9' failed: perplexity is not a number on a"
    ]


def task(name: str, **more: object) -> TaskResult:
    return TaskResult(name, "cloze", "", 100, Figure(0.5), **more)


TASKS = replace(
    FOUND,
    tasks=[
        task("piqa", difference=Figure(-0.03), interval=(-0.05, -0.01), p_adjusted=0.02),
        task("arc.easy", difference=Figure(0.01), interval=(-0.02, 0.04), p_adjusted=0.7),
    ],
)


@pytest.mark.parametrize(
    ("gate", "says"),
    [
        ("tasks.piqa.difference < -0.02", "tasks.piqa.difference is -0.03"),
        ("tasks.arc.easy.difference<-0.02", None),
        ("tasks.*.interval_high < 0", "tasks.*.interval_high is -0.01 on piqa"),
        ("tasks.*.p_adjusted < 0.01", None),
        ("tasks.*.accuracy < 0.5", None),
        ("tasks.lambada.accuracy < 0.1", "tasks.lambada.accuracy was not measured: no task is called 'lambada'; there"),
        ("tasks.piqa.accuracy_norm < 0", "tasks.piqa.accuracy_norm was not measured: the task has no accuracy_norm"),
        ("tasks.*.perplexity > 0", "tasks.*.perplexity was not measured on piqa: the task has no perplexity"),
    ],
)
def test_gates_on_tasks(gate: str, says: str | None) -> None:
    broken = broken_gates(TASKS, [parse_gate(gate)])
    assert len(broken) == (says is not None)
    assert says is None or f"gate {gate!r} failed: {says}" in broken[0]
    (unasked,) = broken_gates(replace(TASKS, tasks=[]), [parse_gate(gate)])
    assert unasked.endswith("was not measured: no task was given")


def test_gates_in_noise_floors() -> None:
    near = replace(FOUND.texts[0], noise={"kl_mean": Figure(0.002)})
    found = replace(FOUND, texts=[near, *FOUND.texts[2:]])
    gates = [parse_gate(gate) for gate in ("kl_mean > 5 * noise", "kl_mean > 4.9*noise", "kl_mean <= noise")]
    assert broken_gates(found, gates) == [
        "gate 'kl_mean > 4.9*noise' failed: kl_mean is 0.01 on a, the noise floor 0.002"
    ]
    assert broken_gates(FOUND, gates[:1]) == [
        "gate 'kl_mean > 5 * noise' failed: the noise floor of kl_mean was not measured on a: it was not asked for "
        "(--noise-floor)"
    ]
    why = replace(FOUND, missing={"noise": "it is float32"})
    assert broken_gates(why, gates[:1])[0].endswith("was not measured on a: it is float32")
    with pytest.raises(InputError, match="the noise floor has the figures of a text, bytes is none of them"):
        parse_gate("bytes > 3 * noise")


@pytest.mark.parametrize("given", ["tasks.piqa.acuracy > 1", "tasks.piqa > 1", "tasks..accuracy > 1"])
def test_gates_on_what_a_task_has_not_are_refused(given: str) -> None:
    with pytest.raises(InputError, match="unknown figure"):
        parse_gate(given)


@pytest.mark.parametrize(
    "given",
    [
        "kl_mean",
        "kl_mean > ",
        "> 3",
        "kl_mean > x * noise",
        "kl_mean > 3 noise",
        "kl_mean = 3",
        "kl_mean > x",
        "kl_mean > nan",
        "",
    ],
)
def test_what_is_no_gate_is_refused(given: str) -> None:
    with pytest.raises(
        InputError, match=r"^gate .*; write a figure, one of >, >=, <, <= and a number, like 'kl_mean >"
    ):
        parse_gate(given)


def test_the_command_ends_with_3_and_a_line_that_names_the_gate(desk: Desk, llama_w4) -> None:
    words = [
        "evaluate",
        llama_w4,
        "--no-keep",
        "--reference",
        desk.model,
        "--text",
        desk.tokens,
        "--json",
        desk.here / "found.json",
    ]
    passed = command(*words, "--fail-if", "kl_mean > 9", "--fail-if", "same_top < 0.1")
    assert passed.code == 0
    failed = command(
        *words, "--quiet", "--fail-if", "kl_mean > 9", "--fail-if", "same_top > 0.1", "--fail-if", "bytes>1"
    )
    assert failed.code == 3
    (line,) = failed.err.splitlines()
    assert line.startswith("compress: gate 'same_top > 0.1' failed: same_top is 0.")
    assert "; gate 'bytes>1' failed: bytes is " in line
    assert (desk.here / "found.json").exists()  # what failed it can be looked at
    unknown = command("evaluate", "no-such-model", "--text", "demo", "--fail-if", "kl_men > 1")
    assert unknown.code == 2
    assert "unknown figure 'kl_men'; did you mean 'kl_mean'?" in unknown.err  # before the model is looked for
