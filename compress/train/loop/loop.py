"""The loop: samples through student and teacher, a step of the optimizer, again.

In one process and under FSDP2 alike; a step's gradient is the same on any number of ranks. Layers are in evaluation
mode: nothing is dropped out, and batch norms keep their statistics.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.base.collectives import Comm
from compress.base.errors import CompressError
from compress.base.progress import Reporter, tell
from compress.train.inputs.fsdp_shards import reshard
from compress.train.inputs.samples import Batch, Rows, SampleOrder, micro_batches
from compress.train.loop import train_checkpoints
from compress.train.loop.best import Best, interval, measured_samples
from compress.train.loop.metrics import Log, ends
from compress.train.loop.optimizer import Learned, clip, mean_gradients, optimizer, set_rates
from compress.train.loop.stopping import Stopping
from compress.train.objective.objective import Objective
from compress.train.options import TrainingOptions

Line = dict[str, float | int]
LITTLE = 1 / 5  # of what was lost
NOTHING = 1e-3  # nats a token: so little divergence that there is nothing to take back


def unchanged(step: int) -> Mapping[str, float]:
    """The default `before`: changes nothing, logs nothing."""
    return {}


def as_given(batch: Batch, step: int) -> Batch:
    """The default `written`: changes nothing."""
    return batch


def untouched(rate: float) -> None:
    """The default `after`: changes nothing."""


@dataclass(frozen=True)
class Training:
    """A training run: parameters, objective, samples, and the place of its checkpoints (None: none are written).

    learned: the trained parameters. fixed: other tensors that a checkpoint stores. micro: samples per micro-batch.
    resume: whether to continue from a checkpoint. before: called before each step, with its number counted from 0;
    returns values to log. after: called after each step with the learning rate of the weights; may change them.
    written: takes the samples of a step and its number, returns them with words of the student's (`on_policy`). first:
    the step to begin with, of all that the schedule of rates knows. best_since: the step from which on the parameters
    of least held-out loss are kept and restored at the end; None: the last parameters stay. seconds: the most that the
    steps may take; None for as long as they take.
    """

    options: TrainingOptions
    objective: Objective
    learned: Learned
    fixed: Mapping[str, Tensor]
    rows: Rows
    micro: int
    comm: Comm
    reporter: Reporter
    place: Path | None = None
    resume: bool = False
    before: Callable[[int], Mapping[str, float]] = unchanged
    after: Callable[[float], None] = untouched
    written: Callable[[Batch, int], Batch] = as_given
    first: int = 0
    best_since: int | None = None
    seconds: float | None = None


@dataclass
class History:
    """The measurements of a training. steps: a line per step. held_out: losses on held-out samples, by step; the one
    before the first step has number 0. measuring: seconds spent on these. kept: the step whose parameters stay.
    earlier: lines of the run that this one continues, as in `metrics`."""

    steps: list[Line] = field(default_factory=list)
    held_out: list[Line] = field(default_factory=list)
    seconds: float = 0.0
    measuring: float = 0.0
    kept: int = 0
    resumed: int = 0
    earlier: list[dict[str, Any]] = field(default_factory=list)


def train(this: Training) -> History:
    """Train. Raises CompressError where a loss is not finite, and, after writing a checkpoint, KeyboardInterrupt where
    a signal asked to stop."""
    options, comm = this.options, this.comm
    seen, kept_out = this.rows.split(options.held_out)
    kept_out = kept_out.some(measured_samples(options))
    order = SampleOrder(len(seen), options.rows, options.seed)
    adamw = optimizer(this.learned, options)
    best = Best(this.learned.all, this.best_since if len(kept_out) else None)
    every = options.evaluate_every or (0 if best.since is None else interval(options, len(kept_out)))
    tell(this.reporter, "phase", "train", "unknown")
    history, started = History(), time.monotonic()
    history.resumed = _resumed(this, adamw, best)
    if history.resumed:
        this.reporter.note(f"training goes on behind step {history.resumed} of {options.steps}")
    log = Log(this.place if comm.rank == 0 else None, history.resumed)
    history.earlier = log.earlier
    unit = "tokens" if this.objective.is_by_token(seen.take([0])) else "samples"

    def measure(step: int) -> None:
        began = time.monotonic()
        history.held_out.append(measure_held_out(this, kept_out, step))
        history.measuring += time.monotonic() - began
        log.held_out(history.held_out[-1])
        if step > history.resumed or not step:  # a resumed checkpoint already records whether it is the best
            best.offer(step, this.objective.of_outputs(history.held_out[-1]))

    with Stopping(comm) as stopping:
        if len(kept_out):
            measure(history.resumed)
        this.reporter.step(history.resumed, options.steps, "")
        for step in range(history.resumed, options.steps):
            said = this.before(step)
            samples = samples_of_step(this, seen, order.of_step(step), step)
            history.steps.append({**take_step(this, adamw, *samples, step), **said})
            done = step + 1
            last = done == options.steps or _is_over(this, started)
            line = history.steps[-1]
            log.step(line)
            words = f"step {done}, loss {line['loss']:.4g}, {line['per_second']:.0f} {unit}/s"
            this.reporter.step(done, options.steps, words)
            if len(kept_out) and (last or (every and done % every == 0)):
                measure(done)
            asked = stopping.asked()
            if this.place is not None and (
                last or asked is not None or (options.save_every and done % options.save_every == 0)
            ):
                train_checkpoints.save(this.place, done, this.learned, {**this.fixed, **best.fixed}, adamw, comm)
            if asked is not None:
                raise asked
            if last:
                break
        else:
            done = options.steps
    history.kept = done if best.step is None else best.step
    if history.kept != done:
        reshard(this.objective.models[0])  # FSDP's root, once run, would not see the restored parameters
        best.put_back()
    history.seconds = time.monotonic() - started
    return history


def samples_of_step(this: Training, rows: Rows, indices: Sequence[int], step: int) -> tuple[Rows, Sequence[int]]:
    """(Samples, the ones of a step among them): on the share `on_policy` of the steps, words of the student's."""
    share = this.options.on_policy
    if int((step + 1) * share) == int(step * share):
        return rows, indices
    return Rows(this.written(rows.take(indices), step)), range(len(indices))


def _is_over(this: Training, started: float) -> bool:
    """True once the time of a training is up, on all ranks together."""
    if this.seconds is None:
        return False
    return bool(this.comm.gather_objects(time.monotonic() - started > this.seconds)[0])


def _resumed(this: Training, adamw: torch.optim.AdamW, best: Best) -> int:
    """The step that training continues from."""
    step = train_checkpoints.newest(this.place) if this.place is not None and this.resume else None
    if step is None:
        return this.first
    assert this.place is not None
    train_checkpoints.restore(this.place, step, this.learned, {**this.fixed, **best.fixed}, adamw, this.comm)
    return step


def take_step(this: Training, adamw: torch.optim.AdamW, rows: Rows, indices: Sequence[int], step: int) -> Line:
    """Run one step of the optimizer; returns its measurements."""
    options, comm, started = this.options, this.comm, time.monotonic()
    share = set_rates(adamw, step, options)
    counts = this.objective.counts(rows.take(indices))
    sums = dict.fromkeys(counts, 0.0)
    with _computing(this):
        this.objective.begin_step(rows, indices, this.micro, comm)
    for part, counting in micro_batches(indices, this.micro, comm):
        with torch.enable_grad(), _computing(this):
            totals = this.objective(rows.take(part))
        loss = weighted_loss(this, totals, counts)
        # FSDP divides the sum of the ranks' gradients by their number.
        (loss * (comm.world if counting else 0)).backward()
        for name, found in totals.items():
            sums[name] += float(found.detach()) * counting
    losses = _over_ranks(sums, counts, comm)
    total = this.objective.total(losses)
    if not math.isfinite(total):
        raise CompressError(
            f"the loss of step {step + 1} is {total}; give a lower learning_rate or scale_rate, or precision=full"
        )
    mean_gradients([*this.learned.scales.values()], comm)
    lengths = [
        clip(list(some.values()), options.clip_norm, comm) for some in (this.learned.weights, this.learned.scales)
    ]
    adamw.step()
    this.after(share * options.learning_rate)
    adamw.zero_grad(set_to_none=True)
    seconds = time.monotonic() - started
    tokens = next(iter(counts.values()))
    line: Line = {"step": step + 1, "loss": total, **losses, "rate": share * options.learning_rate}
    norms = {"gradient": float(lengths[0]), "scale_gradient": float(lengths[1])}
    return {**line, **norms, "per_second": round(tokens / seconds, 1)}


def weighted_loss(this: Training, totals: Mapping[str, Tensor], counts: Mapping[str, int]) -> Tensor:
    """The loss of a micro-batch, weighted by its share of the whole step."""
    weights = this.objective.weights
    parts = [weights[name] / max(1, counts[name]) * total for name, total in totals.items()]
    return torch.stack(parts).sum()


def _computing(this: Training) -> AbstractContextManager[object]:
    """A context in which products are computed in the precision of the options."""
    device = next(iter(this.learned.all.values())).device.type
    return torch.autocast(device, torch.bfloat16) if this.options.precision == "bfloat16" else nullcontext()


def _over_ranks(sums: Mapping[str, float], counts: Mapping[str, int], comm: Comm) -> dict[str, float]:
    """The mean of each loss over the tokens or samples that it counts, on all ranks."""
    together = comm.gather_objects(dict(sums))
    return {name: math.fsum(each[name] for each in together) / max(1, count) for name, count in counts.items()}


@torch.no_grad()
def measure_held_out(this: Training, rows: Rows, step: int) -> Line:
    """The losses on samples that are not trained on."""
    indices = range(len(rows))
    counts = this.objective.counts(rows.take(indices))
    sums = dict.fromkeys(counts, 0.0)
    this.objective.begin_step(rows, indices, this.micro, this.comm)
    for part, counting in micro_batches(indices, this.micro, this.comm):
        for name, total in this.objective(rows.take(part)).items():
            sums[name] += float(total) * counting
    return {"step": step, **_over_ranks(sums, counts, this.comm)}


def little_gain(history: History, this: Training) -> str | None:
    """Advice where a training took back less than a fifth of the divergence from the teacher; None where it
    was more, and where it was not measured."""
    found = ends(asdict(history))
    if found is None or "logits" not in this.objective.weights:
        return None
    before, after = (float(losses["logits"]) for losses in found)
    if before < NOTHING or before - after >= LITTLE * before:
        return None
    options = this.options
    if history.kept == (taken := history.resumed + len(history.steps)):
        first = f"more {'steps' if this.seconds is None else 'time'} (now {taken} steps), as the divergence still fell"
    else:
        first = f"more text to train on, or a smaller learning_rate (now {options.learning_rate:.2g})"
    return (
        f"training took back {max(0.0, 1 - after / before):.0%} of the divergence from the teacher ({before:.3g} -> "
        f"{after:.3g} nats on held-out samples); try {first}, or lose less before it: more bits, or smaller groups"
    )
