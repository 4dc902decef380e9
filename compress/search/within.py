"""`quantize_within`: a model quantized so that it keeps to a budget, or to a KL, each unit by a scheme of its own.

    measure -> allocate -> quantize by the recipe -> evaluate on the held-out rows

A KL that is asked for and missed is aimed at again, by as much lower as it was missed.
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
from compress.search.budget import Allocation, Budget, By, allocate
from compress.search.candidate import Candidate
from compress.search.sensitivity import measure_sensitivity
from compress.system.progress import Reporter, Silent

ROUNDS = 4


@dataclass(frozen=True)
class Mixed:
    """What came of it. achieved_kl: of the checkpoint, on the rows that sensitivities were measured on; seen: whether
    calibration has seen these, too. rounds: how many recipes were tried."""

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
    by: By = "kl",
    fused: bool = True,
    ignore: Sequence[str] = (),
    samples: int | None = None,
    length: int | None = None,
    batch_size: int = 8,
    device: str | torch.device | None = None,
    resume: bool = False,
    overwrite: bool = False,
    verify: bool | None = None,
    trust_remote_code: bool = False,
    reporter: Reporter | None = None,
) -> Mixed:
    """Measure, allocate, quantize and evaluate. Options are those of `measure_sensitivity`, `allocate` and `quantize`;
    candidates, say, of `grid_of_candidates`.

    With max_kl the recipe is tried again with a lower aim, up to four times in all, while the checkpoint's KL is above.
    """
    if Path(output).exists() and not overwrite:
        raise InputError(f"output {str(output)!r} exists; give another, or replace it with --overwrite")
    reporter = reporter or Silent()
    data: dict[str, Any] = {"calibration": calibration, "samples": samples, "length": length, "batch_size": batch_size}
    shared: dict[str, Any] = {"device": device, "trust_remote_code": trust_remote_code, "reporter": reporter}
    measured = measure_sensitivity(model, candidates, **data, text=text, score=by, fused=fused, ignore=ignore, **shared)
    found, rows = measured.table, measured.rows
    aim = max_kl
    for rounds in range(1, ROUNDS + 1):
        allocation = allocate(found, budget, max_kl=aim, by=by)
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
        kl = None
        if rows is not None:
            kl = evaluate(output, reference=model, text=rows.ids, **shared).kl_mean
        if max_kl is None or aim is None or kl is None or kl <= max_kl:
            break
        aim *= 0.98 * max_kl / kl
        reporter.note(f"KL {kl:.4g} is above {max_kl:g}: aimed at {aim:.4g} instead")
    return Mixed(result, found, allocation, kl, text is None, rounds)
