"""Checkpoints of training; any number of ranks can resume from them (`torch.distributed.checkpoint`).

Each checkpoint is a directory `step-N`; an incomplete one has another name. It holds the trained parameters, the
optimizer's two moments of each, the tensors that stay fixed during training (masks, zero points, ranges), and the step.
"""

import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp

from compress.base.collectives import Comm
from compress.base.errors import CheckpointError, WriteError, first_line
from compress.train.loop.metrics import UNFINISHED
from compress.train.loop.optimizer import Learned

MOMENTS = ("exp_avg", "exp_avg_sq")


def newest(place: Path) -> int | None:
    """The step of the newest checkpoint; None where there is none."""
    steps = [int(p.name.removeprefix("step-")) for p in place.glob("step-*") if not p.name.endswith(UNFINISHED)]
    return max(steps, default=None)


def save(
    place: Path, step: int, learned: Learned, fixed: Mapping[str, Tensor], adamw: torch.optim.AdamW, comm: Comm
) -> None:
    """Write a checkpoint after so many steps, then drop the one before it. Raises WriteError on every rank where it
    cannot be written; the one before it stays."""
    target = place / f"step-{step}"
    part = place / f"step-{step}{UNFINISHED}"

    def begin() -> None:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)

    def write() -> None:
        state = _state(learned, fixed, adamw)
        dcp.save(state, checkpoint_id=part, no_dist=not comm.active)  # type: ignore[attr-defined]

    def finish() -> None:
        part.rename(target)
        for old in place.glob("step-*"):
            if old != target:
                shutil.rmtree(old, ignore_errors=True)

    first = comm.rank == 0
    try:
        for work in (begin if first else None, write, finish if first else None):
            problem = None if work is None else _problem_of(work, target)
            comm.fail_together(problem)
    except WriteError:
        if first:
            shutil.rmtree(part, ignore_errors=True)
        raise


def _problem_of(work: Callable[[], None], target: Path) -> WriteError | None:
    """The reason why a part of a checkpoint cannot be written; None where it is."""
    try:
        with _quiet():
            work()
    except BaseException as error:  # noqa: BLE001 - dcp's error is no Exception; others like that are re-raised
        cause = cause_of(error)
        if not isinstance(cause, Exception):
            raise cause from None
        return WriteError(f"cannot write the checkpoint of training {target}: {_said(cause)}")
    return None


def _said(error: BaseException) -> str:
    """The operating system's message where it refused to write, which torch hides behind its own; otherwise the error's
    message."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError) and inner.strerror:
            return inner.strerror
        inner = inner.__cause__ or inner.__context__
    return first_line(error)


def cause_of(error: BaseException) -> BaseException:
    """The error of the first rank that failed, an interrupt included: dcp wraps it in a CheckpointException, which is
    not an Exception."""
    failures = getattr(error, "failures", None)
    return next((cause for cause, _ in failures.values()), error) if isinstance(failures, dict) else error


def restore(
    place: Path, step: int, learned: Learned, fixed: Mapping[str, Tensor], adamw: torch.optim.AdamW, comm: Comm
) -> None:
    """Read a checkpoint into parameters and optimizer. Raises CheckpointError for one that is damaged."""
    state = _state(learned, fixed, adamw)
    try:
        with _quiet():
            checkpoint = place / f"step-{step}"
            dcp.load(state, checkpoint_id=checkpoint, no_dist=not comm.active)  # type: ignore[attr-defined]
    except BaseException as error:  # noqa: BLE001 - as above
        cause = cause_of(error)
        if not isinstance(cause, Exception):
            raise cause from None
        raise CheckpointError(
            f"{place / f'step-{step}'} cannot be read ({first_line(cause)}); start again with --overwrite"
        ) from None
    for parameter in learned.all.values():
        adamw.state[parameter]["step"] = torch.tensor(float(step))


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress dcp's warning that only one process is running."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
        yield


@torch.no_grad()
def _state(learned: Learned, fixed: Mapping[str, Tensor], adamw: torch.optim.AdamW) -> dict[str, Any]:
    """The tensors themselves: they are saved, or read into. Moments that do not exist yet are created."""
    state: dict[str, Any] = {f"fixed.{name}": tensor for name, tensor in fixed.items()}
    for name, parameter in learned.all.items():
        state[f"parameter.{name}"] = parameter.detach()
        moments = adamw.state[parameter]
        for moment in MOMENTS:
            if moment not in moments:
                moments[moment] = torch.zeros_like(parameter)
            state[f"{moment}.{name}"] = moments[moment]
        moments.setdefault("step", torch.tensor(0.0))
    return state


def fixed_of(quantizers: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """The tensors of quantizers that are not trained, by name."""
    return {
        f"{name}.{key}": tensor
        for name, module in quantizers.items()
        for key, tensor in (*module.named_buffers(), *module.named_parameters())
        if not tensor.requires_grad
    }
