"""Evaluations made by hand, in which everything that there can be was measured."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

from compress.checkpoint.write.record import LayerRecord
from compress.evaluation.document import (
    Band,
    Component,
    Evaluation,
    Figure,
    Generation,
    Histogram,
    Named,
    RunResult,
    SensitivityResult,
    SizeResult,
    SpeedResult,
    TaskResult,
    TextResult,
    Timing,
    UnitSensitivity,
)
from compress.evaluation.report.runs import ReportedRun

KINDS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
Role = Literal["held-out", "calibration"]
HOSTILE = "<script>alert('x')</script><img src=http://example.com/a.png onerror=alert(1)>\"'|`\u202e\x1b[31m"


def text_result(
    kl: float = 0.045, change: float = 0.0377, role: str = "held-out", name: str = "wiki.txt"
) -> TextResult:
    """Figures of a text with intervals, noise floor, histogram and confidence."""
    perplexity, reference = 21.39 * math.exp(change), 21.39
    figures = {
        "perplexity": Figure(perplexity, 0.41),
        "reference_perplexity": Figure(reference, 0.39),
        "log_perplexity_ratio": Figure(change, 0.0041),
        "kl_mean": Figure(kl, kl / 20),
        "kl_median": Figure(kl / 3),
        "kl_p99": Figure(kl * 9),
        "kl_max": Figure(kl * 60),
        "same_top": Figure(0.885, 0.0032),
    }
    counts = [round(900 * math.exp(-((i - 11) ** 2) / 18)) for i in range(20)]
    bands = [
        Band(i / 8, (i + 1) / 8, 400 + 90 * i, Figure(kl * (1.9 - i / 5), kl / 15) if i else None) for i in range(8)
    ]
    return TextResult(
        *(name, "a" * 64, role, "non-overlapping windows; every token after a window's first is predicted"),
        *(40, 256, 256, 10200, figures),
        noise={"kl_mean": Figure(0.0004, 0.00002), "same_top": Figure(0.994, 0.0007)},
        by_confidence=bands,
        kl_histogram=Histogram([-8 + 0.45 * i for i in range(21)], counts),
    )


def size_result(total: int, bits: float) -> SizeResult:
    """A compressed size whose components add up to it."""
    rest = total - 28_311_552 * 2 - 70_272 - 76_760
    parts = [("codes", rest * 16 // 17), ("scales", rest - rest * 16 // 17), ("embeddings and head", 28_311_552 * 2)]
    parts += [("norms, biases and other", 70_272), ("file headers", 76_760)]
    components = [Component(name, count) for name, count in parts]
    return SizeResult(total, components, 134_515_008, 106_168_320, bits, 8 * total / 134_515_008, math.floor(bits))


def original_size() -> SizeResult:
    """Of the uncompressed model."""
    parts = [("dense weights", 212_336_640), ("embeddings and head", 56_623_104), ("file headers", 76_760)]
    components = [Component(name, count) for name, count in parts]
    return SizeResult(sum(c for _, c in parts), components, 134_515_008, 0, 16.0, 16.0, None, None, 2**29, 2**30)


def layer_records(blocks: int = 30) -> list[LayerRecord]:
    """Every layer with figures of its health."""
    found = []
    for i in range(blocks):
        for j, kind in enumerate(KINDS):
            loss = 0.0004 * (1 + j) * math.exp(i / 14) * (1.6 if kind.endswith("down_proj") and i == 3 else 1)
            figures: dict[str, float | int | str] = {
                "loss": loss,
                "rtn_loss": 3.1 * loss,
                "damp": 0.01 if i % 9 else 0.02,
                "shrinkage": loss / 7,
                "dead_channels": 12 if i == 4 and j == 2 else 0,
                "tokens": 16384,
                "input_clipped": 0.0003 * j,
            }
            name = f"model.layers.{i}.{kind}"
            found.append(LayerRecord(name, "gptq", "w4a16", "signed-scale", 64, (576, 576), figures))
    return found


def run_result() -> RunResult:
    """What a record says."""
    return RunResult(
        command="compress quantize HuggingFaceTB/SmolLM2-135M --method gptq --scheme w4a16 --calibration c4.txt",
        seconds=260.8,
        peak_memory_bytes=1_733_705_728,
        calibration={"source": "c4.txt", "samples": 32, "length": 512, "sha256": "c" * 64},
        verification={"layers": 210, "transformers": "compared", "loader": "default", "logits_max_difference": 0.0},
        layers=layer_records(),
        left_alone={"model.embed_tokens": "embedding", "lm_head": "output head"},
        notes=["groups of 64: 128 does not divide the inputs of all layers"],
    )


def tasks() -> list[TaskResult]:
    """One that differs beyond noise, one that does not."""
    return [
        TaskResult(
            *("lambada", "cloze", "d" * 64, 2000, Figure(0.392, 0.0109), Figure(0.418, 0.011), Figure(-0.026, 0.006)),
            *((-0.038, -0.014), 31, 83, 1.1e-6, 2.2e-6),
        ),
        TaskResult(
            *("piqa", "choice", "e" * 64, 1838, Figure(0.671, 0.011), Figure(0.674, 0.0109), Figure(-0.003, 0.005)),
            *((-0.013, 0.007), 40, 46, 0.59, 0.59),
        ),
    ]


def speed_result() -> SpeedResult:
    """Faster decoding, slower prefill."""
    own = Timing(128, 64, Figure(410.0, 6.0), Figure(31.2, 0.4), Figure(312.0, 5.0))
    reference = Timing(128, 64, Figure(530.0, 8.0), Figure(19.8, 0.3), Figure(241.0, 4.0))
    fallbacks = {"512 tokens: torch's products are faster": 30}
    return SpeedResult("Some Processor 9000", 2, "float32", own, reference, {"cpu rows": 210}, fallbacks)


def sensitivity_result() -> SensitivityResult:
    """Two candidates, one of which does not suit the third block; the fourth loses most."""
    units = []
    for i in range(30):
        for j, kind in enumerate(("self_attn.q_proj+k_proj+v_proj", "mlp.down_proj")):
            kl = {"w3": 0.004 / (1 + abs(i - 3)) / (1 + j), "w4": 0.001 / (1 + i)}
            kl = kl if i != 2 else {"w4": kl["w4"]}
            layers = [f"model.layers.{i}.self_attn.{n}_proj" for n in "qkv"] if not j else [f"model.layers.{i}.{kind}"]
            units.append(UnitSensitivity(f"model.layers.{i}.{kind}", layers, kl))
    held_out = {"source": "wiki.txt", "samples": 16}
    return SensitivityResult({"w3": 3.25, "w4": 4.25}, units, {"w4": 0.05}, {"source": "c4.txt"}, held_out)


def whole(name: str = "smollm2-w4") -> Evaluation:
    """Nothing is missing but what `missing` names."""
    said = "Once upon a time there was a small model that ran on a phone"
    return Evaluation(
        model=Named(name, "LlamaForCausalLM", 134_515_008, "float32", "1" * 64),
        texts=[text_result(), text_result(0.031, 0.021, "calibration", "c4.txt")],
        reference=Named("HuggingFaceTB/SmolLM2-135M", "LlamaForCausalLM", 134_515_008, "float32", "2" * 64),
        recipe={"passes": [{"gptq": {"scheme": "w4a16", "group_size": 64, "damp": 0.01}}]},
        tasks=tasks(),
        size=size_result(113_175_416, 4.25),
        reference_size=original_size(),
        speed=speed_result(),
        sensitivity=sensitivity_result(),
        generations=[
            Generation("The story begins:", f"{said}, and it was glad.", f"{said} and never slept.", len(said)),
            Generation("Two and two", " is four.", " is four.", None),
        ],
        run=run_result(),
        missing={"peak memory": "it was not asked for (`--memory`)"},
        provenance={"command": "compress evaluate", "date": "2026-11-22T11:00:00+00:00", "commit": "0" * 40},
    )


def shifted(name: str, total: int, bits: float, kl: float, change: float, method: str, scheme: str) -> Evaluation:
    """The same with another recipe, size and quality."""
    found = whole(name)
    recipe = {"passes": [{method: {"scheme": scheme, "group_size": 64}}]}
    run = replace(run_result(), layers=layer_records(2))
    return replace(found, texts=[text_result(kl, change)], size=size_result(total, bits), recipe=recipe, run=run)


def sweep() -> list[Evaluation]:
    """Runs of which some are dominated."""
    return [
        whole(),
        shifted("rtn-w4", 113_175_416, 4.25, 0.35, 0.258, "rtn", "w4a16"),
        shifted("awq-w4", 113_175_900, 4.25, 0.148, 0.11, "awq", "w4a16"),
        shifted("gptq-w3", 99_900_000, 3.25, 0.41, 0.31, "gptq", "w3a16"),
        shifted("w8a8", 165_000_000, 8.01, 0.009, 0.004, "smoothquant", "w8a8"),
        shifted("rtn-w8", 166_500_000, 8.25, 0.0011, 0.0004, "rtn", "w8a16"),
        shifted("mixed-3.5", 104_000_000, 3.5, 0.21, 0.16, "gptq", "w3a16"),
    ]


def runs(*found: Evaluation) -> list[ReportedRun]:
    """As if each had been read from a file."""
    return [ReportedRun(each.model.name, Path(f"{each.model.name}.json"), each) for each in found]


def hostile() -> Evaluation:
    """Every name and text is somebody's who means ill."""
    found = whole()
    assert found.run is not None
    assert found.speed is not None
    assert found.reference is not None
    record = LayerRecord(HOSTILE, HOSTILE, HOSTILE, HOSTILE, 64, (4, 4), {"loss": 0.5, "dead_channels": 3})
    run = replace(found.run, command=HOSTILE, layers=[record], left_alone={HOSTILE: HOSTILE}, notes=[HOSTILE])
    return replace(
        found,
        model=replace(found.model, name=HOSTILE, architecture=HOSTILE),
        reference=replace(found.reference, name=HOSTILE),
        texts=[replace(text_result(), name=HOSTILE, protocol=HOSTILE)],
        recipe={"passes": [{HOSTILE: {"scheme": HOSTILE, HOSTILE: HOSTILE}}]},
        tasks=[replace(tasks()[0], name=HOSTILE)],
        speed=replace(found.speed, device=HOSTILE, kernels={HOSTILE: 3}, fallbacks={HOSTILE: 3}),
        generations=[Generation(HOSTILE, HOSTILE, HOSTILE + "x", 3)],
        run=replace(run, verification={"layers": HOSTILE, "transformers": HOSTILE}, calibration={HOSTILE: HOSTILE}),
        missing={HOSTILE: HOSTILE},
        provenance={HOSTILE: {HOSTILE: HOSTILE}},
    )
