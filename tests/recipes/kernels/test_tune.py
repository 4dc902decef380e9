"""Tuning without a GPU: what is tried, what is chosen, what is written, by a timer that is made up."""

from dataclasses import replace

import pytest
import torch

from compress.base.errors import CompressError
from compress.kernels import workspace
from compress.kernels.cpu import build as cpu
from compress.kernels.tuning import choose as shapes
from compress.kernels.tuning import table
from compress.kernels.tuning.choose import Device
from compress.kernels.tuning.table import DEQUANTIZE, Shape
from compress.recipes.studies.kernels import tune
from compress.recipes.studies.kernels.tune import HOPPER_SHARED, TunedProduct

H200 = Device(("NVIDIA H200", "9.0"), 132, 90)
DECODE = TunedProduct("weight_only", 1, 4096, 4096)


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """A cache directory of the test's own, in which no library has to be built first."""
    cpu.why_not()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    table.forget()
    yield tmp_path
    table.forget()


class Fake:
    """Operands whose calls are the configurations themselves; some raise, some are wrong."""

    def __init__(self, broken=(), wrong=()):
        self.broken, self.wrong = broken, wrong

    def calls(self, choice):
        def call():
            if choice in self.broken:
                raise RuntimeError("out of resource: shared memory\nand more")
            return choice

        return [call]

    def error(self, choice):
        return float("nan") if choice in self.wrong else 0.5


def timer_of(times, default=2.0):
    """Milliseconds by configuration; records what was timed."""

    def timer(calls):
        assert all(copies[0]() == choice for choice, copies in calls.items())
        timer.seen.append(list(calls))
        return {choice: times.get(choice, default) for choice in calls}

    timer.seen = []
    return timer


@pytest.mark.parametrize(
    "problem",
    [
        DECODE,
        replace(DECODE, M=4096),
        TunedProduct("int8_activation", 16, 4096, 4096),
        TunedProduct("w8a8", 64, 300, 512, 8, -1),
        TunedProduct("w8a8", 512, 512, 512, 8, -1),
    ],
)
def test_every_candidate_can_run(problem):
    found = tune.candidates(problem, H200, HOPPER_SHARED)
    assert found[0] == problem.derived(H200)
    assert len(found) == len(set(found)) > 3
    for shape in found:
        if isinstance(shape, Shape):
            assert tune.why_not(problem, shape, H200, HOPPER_SHARED) == []
            tiles = -(-problem.M // shape.block_m) * -(-problem.N // shape.block_n)
            assert shape.split_k == 1 or tiles <= workspace.SLICE
    assert (DEQUANTIZE in found) == (problem.M == 4096)
    assert any(isinstance(shape, Shape) and shape.split_k > 1 for shape in found) == (problem.M < 4096)


@pytest.mark.parametrize(
    ("problem", "shape", "shared", "reason"),
    [
        (DECODE, Shape(16, 128), 30_000, "36864 bytes of shared memory; 30000 are there"),
        (replace(DECODE, N=60), Shape(16, 128), HOPPER_SHARED, "128 rows per tile for 60 outputs"),
        (replace(DECODE, M=999), Shape(256, 256), HOPPER_SHARED, "256x256 spills with 4 warps"),
        (replace(DECODE, M=9999), Shape(64, 64, 2), HOPPER_SHARED, "tiles need no split by 2"),
        (replace(DECODE, K=512), Shape(16, 128, 4), HOPPER_SHARED, "4 steps are too few to split by 4"),
    ],
)
def test_what_is_not_tried_and_why(problem, shape, shared, reason):
    assert any(reason in given for given in tune.why_not(problem, shape, H200, shared))


def test_the_fastest_is_chosen_and_then_its_depth():
    tile, deep = Shape(16, 64, 8, 4, 4), Shape(16, 64, 8, 4, 3)
    timer = timer_of({tile: 1.0, deep: 0.9})
    entry = tune.tune_one(DECODE, Fake(), H200, HOPPER_SHARED, timer)
    assert entry.run == deep
    assert (entry.device, entry.M, entry.N, entry.kind) == ("NVIDIA H200", 1, 4096, DECODE.kind)
    assert entry.measured["median_ms"] == 0.9
    assert entry.measured["derived_ms"] == 2.0
    tiles, depths = timer.seen
    assert len({*tiles, *depths}) == entry.measured["tried"]
    assert depths[:2] == [DECODE.derived(H200), tile]
    assert {replace(tile, num_stages=depth) for depth in tune.DEPTHS} <= {*depths}


def test_noise_does_not_replace_what_was_derived():
    entry = tune.tune_one(DECODE, Fake(), H200, HOPPER_SHARED, timer_of({Shape(16, 64, 8): 1.99}))
    assert entry.run == DECODE.derived(H200)
    assert entry.measured["median_ms"] == 2.0


def test_what_is_wrong_or_does_not_run_is_never_timed():
    wrong, broken = Shape(16, 64, 8), Shape(16, 64, 4)
    timer = timer_of({wrong: 0.1, broken: 0.1})
    entry = tune.tune_one(DECODE, Fake([broken], [wrong]), H200, HOPPER_SHARED, timer)
    assert entry.run == DECODE.derived(H200)
    assert not any(choice in seen for seen in timer.seen for choice in (wrong, broken))
    assert entry.measured["left_out"] == [
        "RuntimeError: out of resource: shared memory",
        "wrong result: nan of the tolerance",
    ]


def test_a_derived_configuration_that_does_not_run_is_an_error():
    derived = DECODE.derived(H200)
    with pytest.raises(CompressError, match="does not run: RuntimeError: out of resource"):
        tune.tune_one(DECODE, Fake([derived]), H200, HOPPER_SHARED, timer_of({}))


def test_dequantization_is_one_of_the_choices():
    many = replace(DECODE, M=512)
    assert tune.tune_one(many, Fake(), H200, HOPPER_SHARED, timer_of({DEQUANTIZE: 1.0})).run == DEQUANTIZE


def test_what_was_tuned_is_written_with_its_source_and_used(monkeypatch, home):
    chosen = Shape(16, 64, 8, 4, 5)
    monkeypatch.setattr(tune, "TuningOperands", lambda problem, device: Fake())
    monkeypatch.setattr(tune, "device_of", lambda device: H200)
    said = []
    problems = [DECODE, replace(DECODE, M=4)]
    found = tune.tune(problems, torch.device("cpu"), timer_of({Shape(16, 64, 8): 1.0, chosen: 0.5}), say=said.append)
    assert shapes.choose(DECODE.kind, 3, 4096, 4096, H200) == chosen
    assert table.read(home / "compress" / "tuned.json") == found
    for entry in found:
        assert {"commit", "device", "versions", "median_ms", "derived_ms"} <= entry.measured.keys()
    assert len(said) == 2
    assert "4.00x of derived" in said[0]


def test_tuning_needs_a_gpu():
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="CUDA"):
            tune.main(["--shapes", "64x64", "--tokens", "1"])
