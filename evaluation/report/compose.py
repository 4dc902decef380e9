"""A report of one run or several, as the content that all its forms show."""

from collections.abc import Sequence

from compress.base.errors import InputError
from compress.evaluation.document import Evaluation
from compress.evaluation.report import facts, layer_map, pareto, quality, sensitivity, wording
from compress.evaluation.report.content import Article, Block, Picture, Report, ReportTable, Section, Words
from compress.evaluation.report.drawing import alone
from compress.evaluation.report.runs import ReportedRun
from compress.evaluation.report.verdict import change, held_out, tiles, verdict


def compose(runs: Sequence[ReportedRun]) -> Report:
    """The report of these runs, in their order."""
    first = runs[0].evaluation
    same = len(runs) > 1 and all(run.evaluation.sensitivity == first.sensitivity for run in runs)
    articles = [article(run, sensitive=not same) for run in runs]
    if len(runs) == 1:
        return Report(title_of(runs[0]), articles[0].verdict, articles)
    overview, said = compare_runs(runs, [each.recipe for each in articles])
    of_all = sensitivity.section(first, stored=False) if same else None
    return Report(f"{len(runs)} runs compared", said, articles, [overview, *([] if of_all is None else [of_all])])


def title_of(run: ReportedRun) -> str:
    """The title of a report of one run."""
    recipe = facts.recipe_words(run.evaluation)
    return wording.name(f"{run.name}: {recipe}" if recipe else run.name)


def article(run: ReportedRun, sensitive: bool = True) -> Article:
    """Everything about one run. sensitive: include the sensitivity of its original, which several runs may share."""
    evaluation = run.evaluation
    parts: list[Section | None] = [
        quality.section(evaluation),
        quality.tasks(evaluation.tasks),
        facts.size(evaluation),
        facts.speed(evaluation),
        None if evaluation.run is None else layer_map.section(evaluation.run.layers),
        sensitivity.section(evaluation) if sensitive else None,
        quality.generations(evaluation.generations),
        None if evaluation.run is None else facts.left_alone(evaluation.run),
        None if evaluation.run is None else facts.verification(evaluation.run),
        facts.missing(evaluation),
        facts.provenance(evaluation),
    ]
    sections = [part for part in parts if part is not None]
    return Article(
        wording.name(run.name), facts.recipe_words(evaluation), verdict(evaluation), tiles(evaluation), sections
    )


def compare_runs(runs: Sequence[ReportedRun], recipes: Sequence[str]) -> tuple[Section, str]:
    """All runs beside each other, and a sentence that names those on the Pareto front."""
    key, alike, left = pareto.comparable(runs)
    by_run = {id(run): recipe for run, recipe in zip(runs, recipes, strict=True)}
    points = pareto.points_of(alike, key, [by_run[id(run)] for run in alike])
    best = {id(alike[i]) for i in pareto.front(points)}
    blocks: list[Block] = []
    if len(points) > 1:
        note = "Smaller is to the left, better is below. What another run beats in both is grey; lines: 95 % intervals."
        blocks.append(Picture("", pareto.draw_front(points, key), note))
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
    return Section("Quality against bytes", blocks), front_sentence(points, runs)


def _row(run: ReportedRun, recipe: str, best: bool) -> tuple[str, ...]:
    evaluation = run.evaluation
    text = held_out(evaluation)
    figures = {} if text is None else text.figures
    moved = change(evaluation)
    return (
        wording.name(run.name),
        wording.data(evaluation.bytes),
        wording.with_error(figures.get("kl_mean")),
        wording.number(figures["perplexity"].value) if "perplexity" in figures else wording.NOT_MEASURED,
        wording.NONE if moved is None else f"{'+' if moved.value >= 0 else ''}{wording.with_error(moved, 100, ' %')}",
        wording.figure_words("same_top", figures.get("same_top")),
        wording.NOT_MEASURED if evaluation.size is None else f"{evaluation.size.bits_per_weight:.2f}",
        "yes" if best else "",
        recipe or wording.NONE,
    )


def front_sentence(points: Sequence[pareto.Point], runs: Sequence[ReportedRun]) -> str:
    if not points:
        return f"None of these {len(runs)} runs can be compared with another."
    best = [points[i] for i in sorted(pareto.front(points), key=lambda i: points[i].bytes)]
    names = ", ".join(wording.name(point.name) for point in best)
    sentence = (
        f"Of {len(points)} runs that were measured alike, nothing beats {len(best)} in both bytes and quality: {names}."
    )
    if len(best) > 1:
        smallest, closest = (wording.data(point.bytes) for point in (best[0], best[-1]))
        sentence += f" The smallest takes {smallest}, the closest to the original {closest}."
    return sentence


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
    return ReportTable(("run", *quality.TASK_COLUMNS), rows, f"Task {wording.name(name)}")


def _speed(runs: Sequence[ReportedRun]) -> ReportTable:
    """A table of tokens per second. Its title tells whether the original was timed in turns with every run, or once."""
    measured = [run.evaluation.speed for run in runs if run.evaluation.speed is not None]
    turns = "in turns with the original" if all(each.in_turns for each in measured) else "the original taken once"
    rows = [(wording.name(run.name), *speed_cells(run.evaluation)) for run in runs]
    columns = ("run", "decoding, tokens/s", "original", "ratio", "prompt, tokens/s", "original", "device")
    return ReportTable(columns, rows, left=frozenset({6}), title=f"Speed of one sequence, {turns}")


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
