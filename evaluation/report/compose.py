"""A report of one run or several, as the content that all its forms show."""

from collections.abc import Sequence

from compress.base.errors import InputError
from compress.evaluation.document import Evaluation, TaskResult
from compress.evaluation.report import facts, layer_map, pareto, quality, sensitivity, wording
from compress.evaluation.report.content import Article, Block, Picture, Report, ReportTable, Section, Words
from compress.evaluation.report.drawing import alone
from compress.evaluation.report.runs import ReportedRun
from compress.evaluation.report.verdict import change, held_out, outcome, points, tiles, verdict


def compose(runs: Sequence[ReportedRun]) -> Report:
    """The report of these runs, in their order."""
    first = runs[0].evaluation
    same = len(runs) > 1 and all(run.evaluation.sensitivity == first.sensitivity for run in runs)
    articles = [article(run, sensitive=not same) for run in runs]
    if len(runs) == 1:
        return Report(title_of(runs[0]), articles[0].verdict, articles)
    overview, said = compared(runs, [each.recipe for each in articles])
    of_all = sensitivity.section(first, stored=False) if same else None
    return Report(f"{len(runs)} runs compared", said, articles, [overview, *([] if of_all is None else [of_all])])


def title_of(run: ReportedRun) -> str:
    """The title of a report of one run."""
    recipe = facts.recipe_words(run.evaluation)
    return wording.name(f"{run.name}: {recipe}" if recipe else run.name)


def article(run: ReportedRun, sensitive: bool = True) -> Article:
    """Everything about one run. sensitive: include the sensitivity of its original, which several runs may share."""
    found = run.evaluation
    parts: list[Section | None] = [
        quality.section(found),
        quality.tasks(found.tasks),
        facts.size(found),
        facts.speed(found),
        None if found.run is None else layer_map.section(found.run.layers),
        sensitivity.section(found) if sensitive else None,
        quality.generations(found.generations),
        None if found.run is None else facts.left_alone(found.run),
        None if found.run is None else facts.verification(found.run),
        facts.missing(found),
        facts.provenance(found),
    ]
    sections = [part for part in parts if part is not None]
    return Article(wording.name(run.name), facts.recipe_words(found), verdict(found), tiles(found), sections)


def compared(runs: Sequence[ReportedRun], recipes: Sequence[str]) -> tuple[Section, str]:
    """All runs beside each other, and a sentence that names those on the Pareto front."""
    key, alike, left = pareto.comparable(runs)
    by_run = {id(run): recipe for run, recipe in zip(runs, recipes, strict=True)}
    points = pareto.points_of(alike, key, [by_run[id(run)] for run in alike])
    best = {id(alike[i]) for i in pareto.front(points)}
    blocks: list[Block] = []
    if len(points) > 1:
        note = "Smaller is to the left, better is below. What another run beats in both is grey; lines: 95 % intervals."
        blocks.append(Picture("", pareto.drawn(points, key), note))
    order = sorted(runs, key=lambda run: run.evaluation.bytes or 0)
    rows = [_row(run, by_run[id(run)], id(run) in best) for run in order]
    columns = (
        "run",
        "weight files",
        "KL, mean",
        "perplexity",
        "change",
        "same first choice",
        "bits per weight",
        "front",
        "recipe",
    )
    known = {id(run) for run in alike}
    faint = frozenset(i for i, run in enumerate(order) if id(run) in known and id(run) not in best)
    blocks.append(ReportTable(columns, rows, "All runs, smallest first", left=frozenset({7, 8}), faint=faint))
    blocks += comparisons(order)
    blocks += [Words(f"Not compared: {wording.clean(each)}.", "warning") for each in left]
    return Section("Quality against bytes", blocks), _said(points, runs)


def _row(run: ReportedRun, recipe: str, best: bool) -> tuple[str, ...]:
    found = run.evaluation
    text = held_out(found)
    figures = {} if text is None else text.figures
    moved = change(found)
    return (
        wording.name(run.name),
        wording.data(found.bytes),
        wording.with_error(figures.get("kl_mean")),
        wording.number(figures["perplexity"].value) if "perplexity" in figures else wording.NOT_MEASURED,
        wording.NONE if moved is None else f"{'+' if moved.value >= 0 else ''}{wording.with_error(moved, 100, ' %')}",
        wording.figure_words("same_top", figures.get("same_top")),
        wording.NOT_MEASURED if found.size is None else f"{found.size.bits_per_weight:.2f}",
        "yes" if best else "",
        recipe or wording.NONE,
    )


def _said(points: Sequence[pareto.Point], runs: Sequence[ReportedRun]) -> str:
    if not points:
        return f"None of these {len(runs)} runs can be compared with another."
    best = [points[i] for i in sorted(pareto.front(points), key=lambda i: points[i].bytes)]
    names = ", ".join(wording.name(point.name) for point in best)
    said = (
        f"Of {len(points)} runs that were measured alike, nothing beats {len(best)} in both bytes and quality: {names}."
    )
    if len(best) > 1:
        smallest, closest = (wording.data(point.bytes) for point in (best[0], best[-1]))
        said += f" The smallest takes {smallest}, the closest to the original {closest}."
    return said


def picture(runs: Sequence[ReportedRun]) -> str:
    """Quality against bytes as a file of its own. Raises InputError where there are not two runs to compare."""
    key, alike, left = pareto.comparable(runs)
    if len(alike) < 2:
        raise InputError(f"no two of these runs were measured alike ({'; '.join(left)}); there is nothing to draw")
    return alone(pareto.drawn(pareto.points_of(alike, key, [facts.recipe_words(run.evaluation) for run in alike]), key))


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
