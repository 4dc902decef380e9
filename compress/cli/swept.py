"""The table of a sweep, on standard output."""

from compress.cli.tables import MIB, number
from compress.evaluation.report.content import ReportTable
from compress.evaluation.report.terminal import show
from compress.search.sweep import INDEX, PAGE, TEXT
from compress.search.sweep_rows import Sweep


def rows(made: Sweep, output: str) -> None:
    """A line for each recipe, by bytes; a star where no other has fewer bytes and a lower KL."""
    tasks = list(dict.fromkeys(name for row in made.rows for name in row.tasks))
    timed = any(row.decode is not None for row in made.rows)
    headings = ["MiB", "bits/weight", "perplexity", "KL", "same top", *tasks, *(["tokens/s"] if timed else []), "front"]
    shown: list[tuple[str, ...]] = []
    for row in made.rows:
        if row.problem is not None:
            shown.append((row.name, *("failed" if i == 0 else "-" for i in range(len(headings)))))
            continue
        shown.append(
            (
                row.name,
                number(row.bytes, ".2f", MIB),
                number(row.bits_per_weight, ".2f"),
                number(row.perplexity, ".4f"),
                number(row.kl_mean, ".5f"),
                number(row.same_top, ".2%"),
                *(number(row.tasks.get(name, {}).get("accuracy"), ".2%") for name in tasks),
                *([number(row.decode, ".1f")] if timed else []),
                "*" if row.front else "",
            )
        )
    lines = [f"{output}/{INDEX} has these rows; each recipe has its checkpoint and evaluation beside it"]
    if len(made.failed) < len(made.rows):
        lines.append(f"{output}/{PAGE} and {TEXT} compare all that have figures")
    show(ReportTable(("recipe", *headings), shown, f"{made.model}, evaluated on {made.text}"), *lines)
