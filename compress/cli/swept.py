"""What a person reads of a sweep."""

from rich.table import Table

from compress.cli.tables import MIB, number
from compress.search.rows import Sweep
from compress.search.sweep import INDEX, PAGE, TEXT
from compress.system.terminal import console


def rows(made: Sweep, output: str) -> None:
    """A line for each recipe, by bytes; a star where no other has fewer bytes and a lower KL."""
    table = Table(title=f"{made.model}, evaluated on {made.text}", title_justify="left")
    table.add_column("recipe")
    tasks = list(dict.fromkeys(name for row in made.rows for name in row.tasks))
    timed = any(row.decode is not None for row in made.rows)
    headings = ["MiB", "bits/weight", "perplexity", "KL", "same top", *tasks, *(["tokens/s"] if timed else []), "front"]
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in made.rows:
        if row.problem is not None:
            table.add_row(row.name, *("failed" if i == 0 else "-" for i in range(len(headings))))
            continue
        table.add_row(
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
    console().print(table)
    console().print(f"{output}/{INDEX} has these rows; each recipe has its checkpoint and evaluation beside it")
    if len(made.failed) < len(made.rows):
        console().print(f"{output}/{PAGE} and {TEXT} compare all that have figures")
