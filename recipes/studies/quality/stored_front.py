"""Draws the stored rows of one model: KL by bits per weight. Formats that engines run have one front, those that
`compress.load` alone reads another. Rows on a front are named.

    python recipes/studies/quality/stored_front.py smollm2-135m-{sweep,trellis,trained}.json --svg OUT.svg
"""

import argparse
import html
import json
import math
from pathlib import Path
from typing import Any

from compress.base.errors import InputError
from compress.evaluation.report.pareto import undominated
from compress.recipes.studies.quality.frames import Frame, key, picture

OWN = {"spqr", "trellis", "lqs", "low-rank"}  # passes
COLOURS = {"engines run it": "#1f77b4", "compress.load": "#d62728"}
MOST = 5.0  # bits per weight


def reader_of(row: dict[str, Any]) -> str:
    """The key of `COLOURS` for the programs that read a row's format."""
    passes = row["passes"] if "passes" in row else row["recipe"]["passes"]
    steps = [(name, found) for step in passes for name, found in step.items() if isinstance(found, dict)]
    own = any(name in OWN or found.get("outliers") or found.get("store") for name, found in steps)
    return "compress.load" if own else "engines run it"


def label(row: dict[str, Any], x: float, y: float, below: bool) -> str:
    """The name of a row beside its point: to the left of it and below, or to the right and above."""
    name = html.escape((row.get("name") or row["title"]).removeprefix("rotate all online, "))
    at = f'x="{x - 7:.1f}" y="{y + 14:.1f}" text-anchor="end"' if below else f'x="{x + 7:.1f}" y="{y - 5:.1f}"'
    return f'<text {at} font-size="11">{name}</text>'


def drawn(rows: list[dict[str, Any]], title: str) -> str:
    """The rows as a picture: bits per weight to the right, KL upwards by its logarithm."""
    places = [(row["bits_per_weight"], row["kl_mean"]) for row in rows]
    bits, kl = zip(*places, strict=True)
    frame = Frame(math.floor(min(bits)), math.ceil(max(bits)), min(kl), max(kl))
    marks = frame.axes(range(int(frame.left), int(frame.right) + 1))
    for reader, colour in COLOURS.items():
        these = [i for i, row in enumerate(rows) if reader_of(row) == reader]
        best = sorted((these[i] for i in undominated([places[i] for i in these])), key=lambda i: bits[i])
        line = " ".join("{:.1f},{:.1f}".format(*frame.place(*places[i])) for i in best)
        marks.append(f'<polyline points="{line}" fill="none" stroke="{colour}"/>')
        for i in these:
            x, y = frame.place(*places[i])
            marks.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"/>')
        marks += [label(rows[i], *frame.place(*places[i]), below=bool(n % 2)) for n, i in enumerate(best)]
    return picture(f"{title}: KL to the original, by measured bits per weight", [*marks, *key(list(COLOURS.items()))])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--svg", type=Path, required=True)
    arguments = parser.parse_args()
    stored = [json.loads(path.read_text(encoding="utf-8")) for path in arguments.results]
    models = {record["model"] for record in stored}
    if len(models) > 1:
        raise InputError(f"the results are of {len(models)} models; give those of one")
    rows = [row for record in stored for row in record["rows"] if row["bits_per_weight"] <= MOST]
    arguments.svg.write_text(drawn(rows, models.pop()), encoding="utf-8")


if __name__ == "__main__":
    main()
