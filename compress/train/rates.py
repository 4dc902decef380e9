"""Range test: the learning rate of a run to which nobody gave one (Smith 2017, arXiv 1506.01186).

A few steps from the start of the run, on its own samples, with a rate that grows by the same factor from step to step:

    r_i = r_0 (r_n / r_0)^(i / n)       l_i: the loss after step i, of samples that no step has seen

    chosen = PART argmin l              l: geometric means of three neighbours

Every l_i is of the same samples, so that differences of a few thousandths show, and not of those that are trained on:
on one batch, again and again, quantized weights learn that batch by heart and bear higher rates. The loss falls slowly,
and rises at once where steps are too long: its minimum is at the longest step that a few steps bear, and a run has
many. The part of it is measured (`recipes/rates.py`). The steepest fall, the other usual rule, says nothing of a rate
here: a student that is far from its teacher falls fastest in the first steps, whatever their rate.

Parameters, gradients and random state are afterwards what they were: a run begins as if its rate had been given.
"""

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from compress.errors import CheckpointError, CompressError, WriteError
from compress.train.loop import Training, measured, take_step, untouched
from compress.train.optimizer import optimizer, set_learning_rate
from compress.train.rows import Order, Rows
from compress.train.shards import reshard

LOWEST, HIGHEST = 1e-6, 1e-1  # rates that are tried
TRIALS = 31  # six for each power of ten
FEWEST = 6  # one for each: of a run of a few steps
PART = 1 / 3
TOO_FAR = 2.0  # times the smallest loss: no larger rate is tried
SHOWN = 8  # places of a curve in a line
FILE = "rate.json"  # beside the checkpoints of a run: what was chosen, for the run that goes on

Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class RangeTest:
    """The rate that was chosen, and the loss after a step of every rate that was tried; none where it diverged."""

    learning_rate: float
    curve: list[tuple[float, float]]
    seconds: float

    def __str__(self) -> str:
        """The rate, and enough of the curve for a line."""
        found = [(r, loss) for r, loss in self.curve if math.isfinite(loss)]
        few = found[:: max(1, len(found) // SHOWN)]
        shown = few if few[-1:] == found[-1:] else [*few, *found[-1:]]
        told = ", ".join(f"{rate:.0e}: {loss:.4g}" for rate, loss in shown)
        return f"learning rate {self.learning_rate:.2g}, of a range test (loss after a step of each rate: {told})"


def tried(steps: int) -> list[float]:
    """The rates that are tried for a run of so many steps, from the smallest on."""
    trials = max(FEWEST, min(TRIALS, steps // 2))
    return [LOWEST * (HIGHEST / LOWEST) ** (i / (trials - 1)) for i in range(trials)]


def smoothed(curve: Curve) -> list[float]:
    """The loss at each rate as the geometric mean of it and its neighbours: of two at the ends."""
    logs = [math.log(max(loss, torch.finfo(torch.float64).tiny)) for _, loss in curve]
    near = [logs[max(0, i - 1) : i + 2] for i in range(len(logs))]
    return [math.exp(math.fsum(each) / len(each)) for each in near]


def chosen(curve: Curve) -> float:
    """The rate for a run, by the losses after a step of each rate that was tried, from the smallest on. Losses that are
    not finite end the curve. The smallest rate where every step did harm."""
    finite = [(rate, loss) for rate, loss in curve if math.isfinite(loss)]
    if not finite:
        return LOWEST
    losses = smoothed(finite)
    return PART * finite[losses.index(min(losses))][0]


def range_test(this: Training) -> RangeTest:
    """Try rates. Everything is the same on all ranks, what is chosen included. A collective."""
    started, options = time.monotonic(), this.options
    seen, kept_out = this.rows.split(options.held_out)
    order = Order(len(seen), options.rows, options.seed)
    rates = tried(options.steps)
    probe = _first(kept_out if len(kept_out) else seen, options.rows)
    curve: list[tuple[float, float]] = []
    with _as_before(this):
        adamw = optimizer(this.learned, options)
        for trial, rate in enumerate(rates):
            step = replace(options, learning_rate=rate, warmup=0.0, schedule="constant")
            trying = replace(this, options=step, after=untouched)
            set_learning_rate(adamw, this.learned, rate)
            try:
                take_step(trying, adamw, seen, order.of_step(trial), trial)
                loss = this.objective.total(measured(trying, probe, trial))
            except CompressError:  # the loss of a step is not finite, on all ranks
                loss = math.inf
            curve.append((rate, loss))
            this.reporter.step(trial + 1, len(rates), f"range test, rate {rate:.1e}")
            if not loss <= TOO_FAR * min(found for _, found in curve):
                break
    return RangeTest(chosen(curve), curve, time.monotonic() - started)


def range_test_once(this: Training) -> RangeTest:
    """The range test of a run, or of the run that this one goes on from. A collective. Raises CheckpointError for a
    file that is damaged."""
    path = None if this.place is None else this.place / FILE
    earlier = _read(path) if this.resume and path is not None and this.comm.rank == 0 else None
    found = this.comm.gather_objects(earlier)[0]
    if found is None:
        found = range_test(this)
        if path is not None:
            this.comm.fail_together(_write(path, found) if this.comm.rank == 0 else None)
    assert isinstance(found, RangeTest)
    return found


def _first(rows: Rows, count: int) -> Rows:
    return Rows(rows.take(range(min(count, len(rows)))))


@contextmanager
def _as_before(this: Training) -> Iterator[None]:
    """Within: training changes what it likes. Afterwards parameters and random state are as before."""
    parameters = list(this.learned.all.values())
    before = [p.detach().clone() for p in parameters]
    device = parameters[0].device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            reshard(this.objective.models[0])  # a root of FSDP that has run would not see what comes back
            with torch.no_grad():
                for p, value in zip(parameters, before, strict=True):
                    p.copy_(value)
                    p.grad = None


def _read(path: Path) -> RangeTest | None:
    if not path.exists():
        return None
    try:
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        curve = [(float(rate), float(loss)) for rate, loss in kept["curve"]]
        return RangeTest(float(kept["learning_rate"]), curve, float(kept["seconds"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); start again with --overwrite") from None


def _write(path: Path, found: RangeTest) -> WriteError | None:
    part = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(asdict(found)) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        return WriteError(f"cannot write {path}: {error.strerror}")
    return None
