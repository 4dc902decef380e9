"""Range test: the learning rate of a run to which nobody gave one (Smith 2017, arXiv 1506.01186).

A few steps from the start of the run, with a rate that grows by the same factor from step to step:

    r_i = r_0 (r_n / r_0)^(i / n)       l_i: the loss after step i, l: before the first

    low     = {i: l_i <= min l_i + NEAR (l - min l_i)}
    chosen  = PART exp(mean of log r_i over low)

All steps are of the same samples, those of the first step of the run. So l_i has no noise of samples, and what ends its
fall are steps that are too long for the model, not those that are too long for one batch after another: the latter do
no harm to a run whose rate falls in the end. A few steps bear more than many, hence a part of the rate at the minimum;
how large a part is measured (`recipes/studies/quality/rates.py`). The steepest fall, the other usual rule, says nothing
here: a student that is far from its teacher falls fastest in the first steps, whatever their rate.

Parameters, gradients and random state are restored afterwards: a run begins as if its rate had been given.
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

from compress.base.errors import CheckpointError, CompressError, WriteError
from compress.base.progress import tell
from compress.train.inputs.fsdp_shards import reshard
from compress.train.inputs.samples import Rows, SampleOrder
from compress.train.loop.loop import Training, take_step, untouched
from compress.train.loop.metrics import RATE, UNFINISHED
from compress.train.loop.optimizer import optimizer, set_learning_rate

LOWEST, HIGHEST = 1e-6, 1e-1  # rates that are tried
TRIALS = 31  # six for each power of ten
FEWEST = 16  # three for each, of a run of a few steps
FEW, USUAL = 4, (1e-5, 1e-2)  # as many trials between these, where there is time for no more
UNTESTED = 1e-4  # the rate where there is not even time for these
NEAR = 0.1  # of the whole fall: losses as near to the smallest one are as good
PART = 1 / 2
MOST = 1 / 3  # of the time of a run: no more is spent on the test
SLOWER = 1.15  # times the pace of the test: a step with its share of measurements
TOO_FAR = 2.0  # times the smallest loss: no larger rate is tried
SHOWN = 8  # places of a curve in a line

Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class RangeTest:
    """The rate that was chosen, by the loss before the first step, and after a step of every rate that was tried, up to
    the first that made it no number, or much larger; of none where there was no time for it."""

    learning_rate: float
    start: float
    curve: list[tuple[float, float]]
    seconds: float

    def steps_in(self, minutes: float) -> int:
        """The steps that a run of so many minutes has time for, the test taken off."""
        pace = self.seconds / (len(self.curve) + (2 if self.curve else 1))  # with the step that told how long one takes
        return max(1, int((60 * minutes - self.seconds) / (SLOWER * pace)))

    def __str__(self) -> str:
        """The rate, and enough of the curve for a line."""
        if not self.curve:
            return f"learning rate {self.learning_rate:.2g}: the time is too short for a range test"
        few = self.curve[:: max(1, -(-len(self.curve) // SHOWN))]
        shown = few if few[-1:] == self.curve[-1:] else [*few, self.curve[-1]]
        told = ", ".join(f"{rate:.0e}: {loss:.4g}" for rate, loss in shown)
        return f"learning rate {self.learning_rate:.2g}, by a range test (loss {self.start:.4g}, after steps of {told})"


def trial_rates(steps: int) -> list[float]:
    """The rates that are tried for a run of so many steps, from the smallest on."""
    return _spread(LOWEST, HIGHEST, max(FEWEST, min(TRIALS, steps // 2)))


def fewer_rates(rates: list[float], count: int) -> list[float]:
    """Rates that are tried where there is time for so many: all, or some of a smaller range; none for fewer
    than `FEW`."""
    if count >= len(rates):
        return rates
    ends = (LOWEST, HIGHEST) if count >= FEWEST else USUAL
    return _spread(*ends, count) if count >= FEW else []


def _spread(low: float, high: float, count: int) -> list[float]:
    return [low * (high / low) ** (i / (count - 1)) for i in range(count)]


def choose_rate(start: float, curve: Curve) -> float:
    """The rate for a run, by the loss before the first step and those after a step of each rate, from the smallest on:
    the smallest one where every step did harm."""
    least = min((loss for _, loss in curve), default=start)
    if least >= start:
        return LOWEST
    low = [math.log(rate) for rate, loss in curve if loss <= least + NEAR * (start - least)]
    return PART * math.exp(math.fsum(low) / len(low))


def range_test(this: Training) -> RangeTest:
    """Try the rates, and restore the model. All values are the same on all ranks, the chosen rate included. A
    collective."""
    began, options = time.monotonic(), this.options
    seen, _ = this.rows.split(options.held_out)
    samples = SampleOrder(len(seen), options.rows, options.seed).of_step(0)
    rates = trial_rates(options.steps)
    tell(this.reporter, "phase", "learning rate", "part")
    if options.minutes:
        loss = _losses_of(this, seen, samples, [LOWEST])[0]
        pace = time.monotonic() - began
        steps = this.comm.gather_objects(int(MOST * 60 * options.minutes / pace))[0]
        rates = fewer_rates(rates, steps - 2)  # this one, and the one that measures the effect of the last
        if not rates:
            return RangeTest(UNTESTED, loss, [], pace)
    start, *after = _losses_of(this, seen, samples, [*rates, HIGHEST])
    curve = list(zip(rates, after, strict=False))
    return RangeTest(choose_rate(start, curve), start, curve, time.monotonic() - began)


def _losses_of(this: Training, seen: Rows, samples: Sequence[int], rates: Sequence[float]) -> list[float]:
    """The loss before a step of each rate, one after the other, up to the first that is much larger or no number; the
    model is restored."""
    losses: list[float] = []
    with _as_before(this):
        adamw = optimizer(this.learned, this.options)
        for trial, rate in enumerate(rates):
            step = replace(this.options, learning_rate=rate, minutes=0.0, warmup=0.0, schedule="constant")
            set_learning_rate(adamw, this.learned, rate)
            try:
                line = take_step(replace(this, options=step, after=untouched), adamw, seen, samples, trial)
            except CompressError:  # the loss is not finite, on all ranks
                if not losses:
                    raise
                break
            losses.append(float(line["loss"]))
            if len(rates) > 1:
                this.reporter.step(min(trial + 1, len(rates) - 1), len(rates) - 1, f"tried {rate:.1e}")
            if losses[-1] > TOO_FAR * min(losses):
                break
    return losses


def range_test_once(this: Training) -> RangeTest:
    """The range test of a run, or the stored one of the run that this one continues. A collective. Raises
    CheckpointError for a damaged file."""
    path = None if this.place is None else this.place / RATE
    earlier = _read(path) if this.resume and path is not None and this.comm.rank == 0 else None
    rate_test = this.comm.gather_objects(earlier)[0]
    if rate_test is None:
        rate_test = range_test(this)
        if path is not None:
            this.comm.fail_together(_write(path, rate_test) if this.comm.rank == 0 else None)
    assert isinstance(rate_test, RangeTest)
    return rate_test


@contextmanager
def _as_before(this: Training) -> Iterator[None]:
    """Puts parameters and random state back after a training."""
    parameters = list(this.learned.all.values())
    changed = [*parameters, *this.objective.buffers()]
    before = [tensor.detach().clone() for tensor in changed]
    device = parameters[0].device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            reshard(this.objective.models[0])  # FSDP's root, once run, would not see the restored parameters
            with torch.no_grad():
                for tensor, value in zip(changed, before, strict=True):
                    tensor.copy_(value)
                for p in parameters:
                    p.grad = None


def _read(path: Path) -> RangeTest | None:
    if not path.exists():
        return None
    try:
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        curve = [(float(rate), float(loss)) for rate, loss in kept["curve"]]
        return RangeTest(float(kept["learning_rate"]), float(kept["start"]), curve, float(kept["seconds"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); start again with --overwrite") from None


def _write(path: Path, found: RangeTest) -> WriteError | None:
    part = path.with_name(RATE + UNFINISHED)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(asdict(found)) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        return WriteError(f"cannot write {path}: {error.strerror}")
    return None
