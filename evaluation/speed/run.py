"""Runs one benchmark, from a person's options to a finished report, for the command line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from compress.base.progress import Reporter
from compress.evaluation.speed.models import bench_model
from compress.evaluation.speed.options import LinearOptions, linear_options, model_options
from compress.evaluation.speed.plot import write_plots
from compress.evaluation.speed.report import SpeedReport
from compress.kernels import workspace
from compress.kernels.cpu import dense
from compress.kernels.measure import benchmark
from compress.kernels.measure.ceilings import measure_ceilings


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


# (operator, bits, columns per scale; -1: one per output) of our candidates.
# (operator, bits, columns per scale; -1: one per output) of our candidates.
TUNED = (("weight_only", 4, benchmark.GROUP), ("weight_only", 8, -1), ("w8a8", 8, -1))


def bench_linears(options: LinearOptions, report: SpeedReport, reporter: Reporter) -> None:
    """Fill a report, saving it after every shape and number of tokens."""
    steps = 1 + options.tune + len(options.shapes) * len(options.tokens)
    if options.device.type == "cuda":
        workspace.prepare(options.device)
    report.ceilings |= measure_ceilings(options.device, options.quick)
    report.keep()
    done = 1
    reporter.step(done, steps, "ceilings")
    if options.tune:
        report.tuned += tune_products(options, reporter.note)
        report.keep()
        done += 1
        reporter.step(done, steps, "")  # tuning takes longer than measuring
        reporter.step(done, steps, "tuned")
    for N, K in options.shapes:
        products = benchmark.measure(
            N, K, options.tokens, options.dtype, options.device, options.rounds, report.ceilings
        )
        for M, entries in zip(options.tokens, products, strict=True):
            report.results += entries
            report.failures += [
                f"{e['candidate']} {N}x{K} M={M}: {e['skipped']}, {e['error_over_tolerance']:.3g} times what is allowed"
                for e in entries
                if e["ours"] and e.get("skipped") == benchmark.WRONG
            ]
            report.keep()
            done += 1
            reporter.step(done, steps, f"{N}x{K} M={M}")
    if options.device.type == "cpu":
        report.notes += dense.told()
        report.keep()


def tune_products(options: LinearOptions, say: Callable[[str], object]) -> list[dict[str, Any]]:
    """Measure configurations of the Triton kernels for these products and add the best to the table of this user."""
    from compress.kernels.measure.tune import Problem, tune

    problems = [
        Problem(op, M, N, K, bits, group, dtype=options.dtype)
        for N, K in options.shapes
        for M in options.tokens
        for op, bits, group in TUNED
    ]
    return [entry.stored() for entry in tune(problems, options.device, say=say)]
