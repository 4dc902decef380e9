"""Runs one benchmark, from a person's options to a finished report, for the command line."""

from pathlib import Path
from typing import Any

import torch

from compress.evaluation.speed.linears import bench_linears
from compress.evaluation.speed.models import bench_model
from compress.evaluation.speed.options import linear_options, model_options
from compress.evaluation.speed.plot import write_plots
from compress.evaluation.speed.report import SpeedReport
from compress.system.progress import Reporter


def run_bench(
    model: str | None, json_file: Path | None, page: Path | None, reporter: Reporter, **given: Any
) -> SpeedReport:
    """Measure the linear layers, or `model`. given: `linear_options` or `model_options`; None is a default.

    The report is complete when this returns, and so are its files; `failures` names the candidates with wrong results.
    Raises InputError before anything is measured.
    """
    if model is None:
        linear = linear_options(**given)
        settings = {"shapes": [list(shape) for shape in linear.shapes], "tokens": list(linear.tokens)}
        report = SpeedReport("linears", linear.device, settings | _common(linear) | {"tune": linear.tune}, json_file)
        _choose(linear.device)
        bench_linears(linear, report, reporter)
    else:
        whole = model_options(model, **given)
        settings = {"model": model, "batches": list(whole.batches), "prompt": whole.prompt, "new": whole.new}
        report = SpeedReport("model", whole.device, settings | _common(whole), json_file)
        _choose(whole.device)
        bench_model(whole, report, reporter)
    report.finish()
    if page is not None:
        write_plots(report, page)
    return report


def _choose(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _common(options: Any) -> dict[str, Any]:
    dtype = str(options.dtype).removeprefix("torch.")
    return {"dtype": dtype, "rounds": options.rounds, "quick": options.quick}
