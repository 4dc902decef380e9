"""Several runs beside each other and their original: a picture, a pick with its reason, and tables."""

from collections.abc import Sequence
from dataclasses import dataclass

from compress.base.errors import InputError
from compress.evaluation.document import Evaluation, Figure
from compress.evaluation.report import facts, pareto, quality, wording
from compress.evaluation.report.content import Block, Picture, ReportTable, Section, Words
from compress.evaluation.report.drawing import alone
from compress.evaluation.report.runs import ReportedRun
from compress.evaluation.report.verdict import change, held_out, smaller

CLOSE = 0.05  # nats per token: a convention of this report
RULE = (
    f"The pick is the smallest run whose 95 % interval of KL lies below {CLOSE} nats per token. This limit is a "
    "convention of the report: for another one, read the tables."
)
COLUMNS = ("run", "weight files", "smaller by", "KL, mean", "perplexity", "change")
LAST = ("bits per weight", "front", "recipe")


@dataclass(frozen=True)
class Pick:
    """A run that is the best in one way. what: the way."""

    what: str
    run: ReportedRun


def picks(runs: Sequence[ReportedRun], key: str) -> list[Pick]:
    """The pick first, where there is one: the smallest run with a KL surely below `CLOSE`. Then the best run by each
    figure alone; by speed where it is beyond errors. runs: measured alike; key: the figure of quality."""

    def size(run: ReportedRun) -> int:
        return run.evaluation.bytes or 0

    def loss(run: ReportedRun) -> float:
        text = held_out(run.evaluation)
        assert text is not None
        return text.figures[key].value

    close = [run for run in runs if key == "kl_mean" and _surely_close(run.evaluation)]
    chosen = [Pick(f"smallest with a KL below {CLOSE}", min(close, key=lambda r: (size(r), loss(r))))] if close else []
    best = "closest to the original" if key == "kl_mean" else "lowest perplexity"
    chosen.append(Pick(best, min(runs, key=lambda r: (loss(r), size(r)))))
    chosen.append(Pick("smallest", min(runs, key=lambda r: (size(r), loss(r)))))
    timed = sorted(
        ((each.speed.model.decode, run) for run in runs if (each := run.evaluation).speed is not None), key=_rate
    )
    if len(timed) > 1 and _rate(timed[-1], -1) > _rate(timed[-2], 1):
        chosen.append(Pick("fastest in decoding", timed[-1][1]))
    return chosen


def _rate(timed: tuple[Figure, ReportedRun], errors: int = 0) -> float:
    """Tokens per second, more or less so many errors."""
    return timed[0].value + errors * (timed[0].error or 0.0)


def _surely_close(evaluation: Evaluation) -> bool:
    text = held_out(evaluation)
    ends = None if text is None else wording.bounds(text.figures.get("kl_mean"))
    return ends is not None and ends[1] < CLOSE


def compare_runs(runs: Sequence[ReportedRun], recipes: Sequence[str]) -> tuple[Section, str]:
    """All runs beside each other, and the pick in a sentence."""
    key, alike, left = pareto.comparable(runs)
    by_run = {id(run): recipe for run, recipe in zip(runs, recipes, strict=True)}
    points = pareto.points_of(alike, key, [by_run[id(run)] for run in alike])
    best = {id(alike[i]) for i in pareto.front(points)}
    blocks: list[Block] = []
    chosen = picks(alike, key) if alike else []
    if len(points) > 1:
        note = "Smaller is to the left, better is below. What another run beats in both is grey; lines: 95 % intervals."
        blocks += [Picture("", pareto.draw_front(points, key), note), _pick_table(chosen, key), Words(RULE, "note")]
    order = sorted(runs, key=lambda run: run.evaluation.bytes or 0)
    timed = any(run.evaluation.speed is not None for run in runs)
    marks = {**dict.fromkeys(best, "yes"), **({id(chosen[0].run): "pick"} if chosen else {})}
    rows = [_row(run, by_run[id(run)], marks.get(id(run), ""), timed) for run in order]
    rows += _originals(runs, timed)
    known = {id(run) for run in alike}
    faint = frozenset(i for i, run in enumerate(order) if id(run) in known and id(run) not in best)
    columns = (*COLUMNS, *(["decoding, tokens/s"] if timed else []), *LAST)
    words = frozenset({len(columns) - 1, len(columns) - 2})
    blocks.append(ReportTable(columns, rows, "All runs, smallest first, and the original", left=words, faint=faint))
    blocks += comparisons(order)
    blocks += [Words(f"Not compared: {wording.clean(each)}.", "warning") for each in left]
    return Section("Quality against bytes", blocks), sentence(chosen, len(best), len(runs))


def _pick_table(chosen: Sequence[Pick], key: str) -> ReportTable:
    shown = COLUMNS.index("KL, mean" if key == "kl_mean" else "perplexity")
    rows = []
    for each in chosen:
        cells = (wording.name(each.run.name), *_cells(each.run))
        rows.append((each.what, *cells[:2], cells[shown]))
    return ReportTable(("best as", *COLUMNS[:2], COLUMNS[shown]), rows, "What to take", names=2)


def _cells(run: ReportedRun) -> tuple[str, ...]:
    """The cells of `COLUMNS`, but for the name."""
    text, moved = held_out(run.evaluation), change(run.evaluation)
    figures = {} if text is None else text.figures
    return (
        wording.data(run.evaluation.bytes),
        _saved(run.evaluation) or wording.NONE,
        wording.with_error(figures.get("kl_mean")),
        wording.number(figures["perplexity"].value) if "perplexity" in figures else wording.NOT_MEASURED,
        wording.NONE if moved is None else f"{'+' if moved.value >= 0 else ''}{wording.with_error(moved, 100, ' %')}",
    )


def _saved(evaluation: Evaluation) -> str:
    """The share of the original's bytes that is saved; empty where it is not known."""
    times = smaller(evaluation)
    return "" if times is None else f"{100 * (1 - 1 / times):.1f} %"


def _row(run: ReportedRun, recipe: str, mark: str, timed: bool) -> tuple[str, ...]:
    size, speed = run.evaluation.size, run.evaluation.speed
    bits = wording.NOT_MEASURED if size is None else f"{size.bits_per_weight:.2f}"
    rate = wording.NOT_MEASURED if speed is None else wording.number(speed.model.decode.value, 3)
    last = (bits, mark, recipe or wording.NONE)
    return wording.name(run.name), *_cells(run), *([rate] if timed else []), *last


def _originals(runs: Sequence[ReportedRun], timed: bool) -> list[tuple[str, ...]]:
    """A row for each original, with the figures of the first run that was compared with it."""
    first: dict[str, Evaluation] = {}
    for run in runs:
        if run.evaluation.reference is not None:
            first.setdefault(run.evaluation.reference.identity, run.evaluation)
    rows = []
    for evaluation in first.values():
        assert evaluation.reference is not None
        text, size, speed = held_out(evaluation), evaluation.reference_size, evaluation.speed
        perplexity = None if text is None else text.figures.get("reference_perplexity")
        own = None if speed is None or speed.reference is None else speed.reference.decode.value
        rows.append(
            (
                f"{wording.name(evaluation.reference.name)} (original)",
                wording.data(None if size is None else size.bytes),
                *(wording.NONE, wording.NONE, wording.number(None if perplexity is None else perplexity.value)),
                *(wording.NONE, *([wording.number(own, 3)] if timed else [])),
                *(wording.NOT_MEASURED if size is None else f"{size.bits_per_weight:.2f}", "", ""),
            )
        )
    return rows


def sentence(chosen: Sequence[Pick], best: int, count: int) -> str:
    """The pick and its reason, and how many others nothing beats."""
    if not chosen:
        return f"None of these {count} runs can be compared with another."
    first = chosen[0]
    size, saved, kl, *_ = _cells(first.run)
    saved = f", {saved} less than the original" if smaller(first.run.evaluation) is not None else ""
    kl = f", KL {kl}" if kl != wording.NOT_MEASURED else ""
    why = first.what if first.what.startswith("smallest") else f"{first.what}, none has a KL surely below {CLOSE}"
    why = first.what if first.what == "lowest perplexity" else why
    front = f"{best} of {count} runs are on the front: no other is both smaller and closer to the original."
    return f"Pick: {wording.name(first.run.name)} ({why}): {size}{saved}{kl}. {front if count > 2 else ''}".rstrip()


def picture(runs: Sequence[ReportedRun]) -> str:
    """Quality against bytes as a file of its own. Raises InputError where there are not two runs to compare."""
    key, alike, left = pareto.comparable(runs)
    if len(alike) < 2:
        raise InputError(f"no two of these runs were measured alike ({'; '.join(left)}); there is nothing to draw")
    recipes = [facts.recipe_words(run.evaluation) for run in alike]
    return alone(pareto.draw_front(pareto.points_of(alike, key, recipes), key))


def comparisons(runs: Sequence[ReportedRun]) -> list[Block]:
    """A table for every task, and one of speed, in the order of the runs. Measurements that no run has are left out."""
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
        cells = [wording.NOT_MEASURED] * len(quality.TASK_COLUMNS) if task is None else quality.task_cells(task)
        rows.append((wording.name(run.name), *cells))
    return ReportTable(("run", *quality.TASK_COLUMNS), rows, f"Task {wording.name(name)}", folded=True)


def _speed(runs: Sequence[ReportedRun]) -> ReportTable:
    """A table of tokens per second. Its title tells whether the original was timed in turns with every run, or once."""
    measured = [run.evaluation.speed for run in runs if run.evaluation.speed is not None]
    turns = "in turns with the original" if all(each.in_turns for each in measured) else "the original taken once"
    rows = [(wording.name(run.name), *speed_cells(run.evaluation)) for run in runs]
    columns = ("run", "decoding, tokens/s", "original", "ratio", "prompt, tokens/s", "original", "device")
    return ReportTable(columns, rows, left=frozenset({6}), title=f"Speed of one sequence, {turns}", folded=True)


def speed_cells(evaluation: Evaluation) -> tuple[str, ...]:
    speed = evaluation.speed
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
