"""`quantize_within`: quantizes a model within a budget or a KL, with a scheme for each unit.

    measure -> allocate -> quantize by the recipe -> evaluate on the held-out rows

Where the KL is above the one asked for, the next round aims lower by the factor of the miss.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.api.job import Result
from compress.api.quantize import quantize
from compress.api.request import Calibration
from compress.checkpoint.sensitivity import Sensitivity
from compress.errors import InputError
from compress.evaluation.evaluate import evaluate
from compress.search.budget import Allocation, Budget, allocate
from compress.search.candidate import Candidate
from compress.search.sensitivity import measure_sensitivity
from compress.system.progress import Reporter, Silent

ROUNDS = 4


@dataclass(frozen=True)
class Mixed:
    """The result of `quantize_within`. achieved_kl: of the checkpoint, in nats per token, on the held-out rows of the
    sensitivities; None for a model that predicts no next token. seen: the calibration of the checkpoint used these
    rows, too. rounds: the number of recipes tried."""

    result: Result
    sensitivity: Sensitivity
    allocation: Allocation
    achieved_kl: float | None
    seen: bool
    rounds: int


def quantize_within(
    model: str | Path,
    candidates: Sequence[Candidate],
    budget: Budget | str | None = None,
    *,
    calibration: Calibration,
    output: str | Path,
    max_kl: float | None = None,
    text: str | Tensor | None = None,
    fused: bool = True,
    ignore: Sequence[str] = (),
    samples: int | None = None,
    length: int | None = None,
    bos: str | None = None,
    batch_size: int = 8,
    device: str | torch.device | None = None,
    resume: bool = False,
    overwrite: bool = False,
    verify: bool | None = None,
    trust_remote_code: bool = False,
    reporter: Reporter | None = None,
) -> Mixed:
    """Measure sensitivities, allocate, quantize and evaluate. Options are those of `measure_sensitivity`, `allocate`
    and `quantize`; `grid_of_candidates` makes candidates.

    With max_kl, a checkpoint whose KL is above it is made again by a recipe of a lower aim, up to four times in all.
    Raises InputError.
    """
    if Path(output).exists() and not overwrite:
        raise InputError(f"output {str(output)!r} exists; give another, or replace it with --overwrite")
    reporter = reporter or Silent()
    data: dict[str, Any] = {"calibration": calibration, "samples": samples, "length": length, "bos": bos}
    data["batch_size"] = batch_size
    shared: dict[str, Any] = {"device": device, "trust_remote_code": trust_remote_code, "reporter": reporter}
    how: dict[str, Any] = {"fused": fused, "ignore": ignore, "run_once": max_kl is not None}
    measured = measure_sensitivity(model, candidates, **data, text=text, **how, **shared)
    found, rows, aim = measured.table, measured.rows, max_kl
    for rounds in range(1, ROUNDS + 1):
        allocation = allocate(found, budget, max_kl=aim)
        result = quantize(
            model,
            allocation.passes,
            output=output,
            resume=resume and rounds == 1,
            overwrite=overwrite or rounds > 1,
            ignore=ignore,
            verify=verify,
            **data,
            **shared,
        )
        kl = evaluate(output, reference=model, text=rows.ids, **shared).kl_mean
        if max_kl is None or aim is None or kl is None or kl <= max_kl:
            break
        aim *= 0.98 * max_kl / kl
        reporter.note(f"KL {kl:.4g} is above {max_kl:g}: aimed at {aim:.4g} instead")
    return Mixed(result, found, allocation, kl, text is None, rounds)
