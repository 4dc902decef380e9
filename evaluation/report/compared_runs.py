"""Tables that compare the tasks and the speed of several runs; measurements that no run has are left out."""

from collections.abc import Sequence

from compress.evaluation.document import Evaluation, TaskResult
from compress.evaluation.report import wording
from compress.evaluation.report.content import Block, ReportTable
from compress.evaluation.report.runs import ReportedRun
from compress.evaluation.report.verdict import outcome, points


def tables(runs: Sequence[ReportedRun]) -> list[Block]:
    """A table for every task, and one of speed, in the order of the runs."""
    asked = dict.fromkeys((task.name, task.sha256) for run in runs for task in run.evaluation.tasks)
    found: list[Block] = [_task(name, sha256, runs) for name, sha256 in asked]
    if any(run.evaluation.speed is not None for run in runs):
        found.append(_speed(runs))
    return found


def _task(name: str, sha256: str, runs: Sequence[ReportedRun]) -> ReportTable:
    """A table of the runs' answers to one set of questions; other questions under the same name get a table of their
    own."""
    rows = []
    for run in runs:
        task = next((each for each in run.evaluation.tasks if (each.name, each.sha256) == (name, sha256)), None)
        rows.append((wording.name(run.name), *(_answered(task) if task is not None else (wording.NOT_MEASURED,) * 6)))
    columns = ("run", "questions", "accuracy", "original", "difference, points", "95 % of it", "")
    return ReportTable(columns, rows, f"Task {wording.name(name)}")


def _answered(task: TaskResult) -> tuple[str, ...]:
    span = task.interval
    return (
        wording.count(task.questions),
        wording.with_error(task.accuracy, 100, " %"),
        wording.with_error(task.reference_accuracy, 100, " %"),
        points(task.difference).removesuffix(" points"),
        wording.NONE if span is None else f"{100 * span[0]:+.2f} to {100 * span[1]:+.2f}",
        outcome(task),
    )


def _speed(runs: Sequence[ReportedRun]) -> ReportTable:
    """A table of tokens per second. Its title tells whether the original was timed in turns with every run, or once."""
    measured = [run.evaluation.speed for run in runs if run.evaluation.speed is not None]
    turns = "in turns with the original" if all(each.in_turns for each in measured) else "the original taken once"
    rows = [(wording.name(run.name), *_timed(run.evaluation)) for run in runs]
    columns = ("run", "decoding, tokens/s", "original", "ratio", "prompt, tokens/s", "original", "device")
    return ReportTable(columns, rows, left=frozenset({6}), title=f"Speed of one sequence, {turns}")


def _timed(found: Evaluation) -> tuple[str, ...]:
    speed = found.speed
    if speed is None:
        return (wording.NOT_MEASURED,) * 6
    own, other = speed.model, speed.reference
    ratio = wording.NONE
    if other is not None and other.decode.value:
        ratio = f"{own.decode.value / other.decode.value:.2f}"
    where = f"{speed.device}, {speed.threads} thread{'s' if speed.threads > 1 else ''}, {speed.dtype}"
    return (
        wording.with_error(own.decode),
        wording.NONE if other is None else wording.with_error(other.decode),
        ratio,
        wording.with_error(own.prefill),
        wording.NONE if other is None else wording.with_error(other.prefill),
        wording.clean(where),
    )
