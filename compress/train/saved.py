"""Checkpoints of training, which runs on any number of ranks resume from (`torch.distributed.checkpoint`).

A directory per checkpoint, `step-N`; one that is not whole has another name. What it holds: trained parameters, the
optimizer's two moments of each, what is fixed while a model is trained (masks, zero points, ranges), and the step.
"""

import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp

from compress.comm import Comm
from compress.errors import CheckpointError, first_line
from compress.train.optimizer import Learned

MOMENTS = ("exp_avg", "exp_avg_sq")
UNFINISHED = ".part"


def newest(place: Path) -> int | None:
    """The step of the newest checkpoint; None where there is none."""
    steps = [int(p.name.removeprefix("step-")) for p in place.glob("step-*") if not p.name.endswith(UNFINISHED)]
    return max(steps, default=None)


def save(
    place: Path, step: int, learned: Learned, fixed: Mapping[str, Tensor], adamw: torch.optim.AdamW, comm: Comm
) -> None:
    """Write a checkpoint after so many steps, then drop the one before it."""
    target = place / f"step-{step}"
    part = place / f"step-{step}{UNFINISHED}"
    if comm.rank == 0:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    comm.barrier()
    with _quiet():
        state = _state(learned, fixed, adamw)
        dcp.save(state, checkpoint_id=part, no_dist=not comm.active)  # type: ignore[attr-defined]
    comm.barrier()
    if comm.rank == 0:
        part.rename(target)
        for old in place.glob("step-*"):
            if old != target:
                shutil.rmtree(old, ignore_errors=True)
    comm.barrier()


def restore(
    place: Path, step: int, learned: Learned, fixed: Mapping[str, Tensor], adamw: torch.optim.AdamW, comm: Comm
) -> None:
    """Read a checkpoint into parameters and optimizer. Raises CheckpointError for one that is damaged."""
    state = _state(learned, fixed, adamw)
    try:
        with _quiet():
            checkpoint = place / f"step-{step}"
            dcp.load(state, checkpoint_id=checkpoint, no_dist=not comm.active)  # type: ignore[attr-defined]
    except BaseException as error:
        # CheckpointException of dcp is no Exception.
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise CheckpointError(
            f"{place / f'step-{step}'} cannot be read ({first_line(error)}); start again with --overwrite"
        ) from None
    for parameter in learned.all.values():
        adamw.state[parameter]["step"] = torch.tensor(float(step))


@contextmanager
def _quiet() -> Iterator[None]:
    """Within: dcp does not warn that one process is alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is", UserWarning)
        yield


@torch.no_grad()
def _state(learned: Learned, fixed: Mapping[str, Tensor], adamw: torch.optim.AdamW) -> dict[str, Any]:
    """The tensors themselves: they are saved, or read into. Moments that do not exist yet are made."""
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
    """What quantizers hold that is not trained, by name."""
    return {
        f"{name}.{key}": tensor
        for name, module in quantizers.items()
        for key, tensor in (*module.named_buffers(), *module.named_parameters())
        if not tensor.requires_grad
    }
