"""What a run costs beside the mathematics grows as the number of layers does."""

import cProfile
import pstats
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import compress
from compress.checkpoint.write.record import RunRecord
from compress.engine.walk.state import Spending

PASSES = {
    "rtn": compress.RTN(group_size=16),
    "gptq": compress.GPTQ(group_size=16, clip=False, refit=0, sweeps=0),
    "w8a8": compress.RTN(scheme="w8a8", activations="static", outputs="static"),
}

# Their functions are counted: whoever checks out the repository may have called its folder anything, `compress` too.
COUNTED = (Path(compress.__file__).parent, Path(nn.modules.__file__).parent)


def run(layers: int, p: compress.Pass) -> compress.Result:
    """Compress one block of so many layers."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers)))
    batch = [{"input": torch.randn(16, 16)}]
    return compress.quantize(model, p, calibration=batch if p.calibrated else None)


def calls(layers: int, p: compress.Pass) -> dict[str, int]:
    """How often each function of compress and of torch's modules is called, and each generator resumed."""
    profile = cProfile.Profile()
    profile.runcall(run, layers, p)
    found: dict[str, int] = {}
    for (file, _, name), (_, number, *_) in pstats.Stats(profile).stats.items():
        if any(Path(file).is_relative_to(folder) for folder in COUNTED):
            found[f"{file}: {name}"] = found.get(f"{file}: {name}", 0) + number
    return found


@pytest.mark.parametrize("name", PASSES)
def test_no_function_is_called_more_than_in_proportion_to_the_layers_of_a_block(name):
    p = PASSES[name]
    run(4, p)
    few, more, most = (calls(layers, p) for layers in (6, 12, 24))
    for function, number in most.items():
        first = more.get(function, 0) - few.get(function, 0)
        second = number - more.get(function, 0)
        # Twice as many more; four times would be a function that walks all layers for each of them.
        assert second <= 2.5 * first + 12, function


def test_what_seconds_are_spent_on_adds_up():
    record = run(24, PASSES["gptq"]).record
    assert set(record.spent) == {"forward", "statistics", "solve", "write"}
    assert min(record.spent.values()) >= 0
    assert 0 < sum(record.spent.values()) < record.seconds


def test_each_second_counts_for_the_innermost(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    spending = Spending(record := RunRecord(), torch.device("cpu"))
    with spending.on("solve"):
        assert [*spending.each("forward", iter("ab"))] == ["a", "b"]
        with spending.on("statistics"):
            pass
    # Three turns of the walk, the last of which finds nothing, each between two looks at the clock.
    assert record.spent == {"solve": 5.0, "forward": 3.0, "statistics": 1.0}


@pytest.mark.slow
@pytest.mark.parametrize("name", PASSES)
def test_time_grows_as_the_layers_of_a_block_do(name):
    """Printed with `pytest -s`. A cubic cost would be eight times as high for twice as many."""
    p = PASSES[name]
    run(4, p)
    seconds = []
    for layers in (50, 100, 200):
        started = time.process_time()
        run(layers, p)
        seconds.append(time.process_time() - started)
        print(f"{name}: {layers} layers {seconds[-1]:.2f} s of CPU time")
    assert seconds[2] < 3 * seconds[1]
