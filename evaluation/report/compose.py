"""A report of one run or several, as the content that all its forms show."""

from collections.abc import Sequence

from compress.evaluation.report import facts, layer_map, quality, sensitivity, uses, wording
from compress.evaluation.report.comparison import compare_runs
from compress.evaluation.report.content import Article, Report, Section
from compress.evaluation.report.runs import ReportedRun
from compress.evaluation.report.verdict import held_out, tiles, verdict


def compose(runs: Sequence[ReportedRun]) -> Report:
    """The report of these runs, in their order."""
    first = runs[0].evaluation
    same = len(runs) > 1 and all(run.evaluation.sensitivity == first.sensitivity for run in runs)
    articles = [article(run, sensitive=not same) for run in runs]
    if len(runs) == 1:
        return Report(title_of(runs[0]), articles[0].verdict, articles, about=about(runs))
    overview, said = compare_runs(runs, [each.recipe for each in articles])
    of_all = sensitivity.section(first, stored=False) if same else None
    sections = [overview, *([] if of_all is None else [of_all])]
    return Report(f"{len(runs)} runs compared", said, articles, sections, about=about(runs))


def title_of(run: ReportedRun) -> str:
    """The title of a report of one run."""
    recipe = facts.recipe_words(run.evaluation)
    return wording.name(f"{run.name}: {recipe}" if recipe else run.name)


def article(run: ReportedRun, sensitive: bool = True) -> Article:
    """Everything about one run. sensitive: include the sensitivity of its original, which several runs may share."""
    evaluation = run.evaluation
    parts: list[Section | None] = [
        uses.section(evaluation),
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


def about(runs: Sequence[ReportedRun]) -> str:
    """The original, the held-out text and the dates of evaluations in a line; what is not known is left out."""
    found = [run.evaluation for run in runs]
    originals = dict.fromkeys(each.reference.name for each in found if each.reference is not None)
    texts = (held_out(each) for each in found)
    read = dict.fromkeys(f"{text.name} ({wording.count(text.tokens)} tokens)" for text in texts if text is not None)
    dates = sorted({str(each.provenance["date"])[:10] for each in found if each.provenance.get("date")})
    parts = [f"original: {', '.join(originals)}"] if originals else []
    parts += [f"text: {', '.join(read)}"] if read else []
    parts += [f"evaluated {' to '.join(dict.fromkeys((dates[0], dates[-1])))}"] if dates else []
    return wording.clean("; ".join(parts))
