"""What a person reads of a sweep."""

from rich.table import Table

from compress.cli.sweeping import INDEX, Sweep
from compress.cli.tables import MIB, number
from compress.cli.terminal import console


def rows(made: Sweep, output: str) -> None:
    """A line for each recipe, by bytes; a star where no other has fewer bytes and a lower KL."""
    table = Table(title=f"{made.model}, evaluated on {made.text}", title_justify="left")
    table.add_column("recipe")
    for heading in ("MiB", "bits/weight", "perplexity", "KL", "same top", "front"):
        table.add_column(heading, justify="right")
    for row in made.rows:
        if row.problem is not None:
            table.add_row(row.name, *("failed" if i == 0 else "-" for i in range(6)))
            continue
        table.add_row(
            row.name,
            number(row.bytes, ".2f", MIB),
            number(row.bits_per_weight, ".2f"),
            number(row.perplexity, ".4f"),
            number(row.kl_mean, ".5f"),
            number(row.same_top, ".2%"),
            "*" if row.front else "",
        )
    console().print(table)
    console().print(f"{output}/{INDEX} has these rows; each recipe has its checkpoint and evaluation beside it")
