"""Two of four weights zero, at the bytes that they take, beside few bits without zeros.

    python recipes/studies/quality/halved.py MODEL --calibration TEXT --text TEXT --group-size 128 \\
        --json OUT.json --svg OUT.svg

Weights that are pruned 2:4 are stored without their zeros (`--store 2:4`). *then*: rounded to nearest where they are
not zero; *with*: rounded by GPTQ, which knows of the zeros. Each row is written, verified in a fresh process and
evaluated on held-out text, by the command line.
"""

from pathlib import Path

from compress.recipes.studies.quality.compare import Recipes, compare, parser
from compress.recipes.studies.quality.front import drawn

COLOURS = {"magnitude": "#bbbbbb", "wanda": "#ccbb44", "sparsegpt": "#ee6677", "gptq": "#4477aa"}


def recipes(group_size: int) -> Recipes:
    """{title: passes}, titles beginning with the kind that a colour is for."""
    found: Recipes = {}
    codes: dict[str, object] = {"scheme": "w4a16", "group_size": group_size}
    for method in ("magnitude", "wanda", "sparsegpt"):
        pruned: dict[str, dict[str, object]] = {method: {"pattern": "2:4"}}
        found[f"{method} 2:4"] = [pruned]
        found[f"{method} 2:4, then w4 by rtn"] = [pruned, {"rtn": codes}]
        if method == "sparsegpt":
            for bits in (3, 4):
                found[f"{method} 2:4 with w{bits} by gptq"] = [pruned, {"gptq": {**codes, "scheme": f"w{bits}a16"}}]
    for bits in (2, 3, 4):
        found[f"gptq w{bits}"] = [{"gptq": {"scheme": f"w{bits}a16", "group_size": group_size}}]
    return found


def main() -> None:
    told = parser(__doc__)
    told.add_argument("--svg", type=Path, help="draw the rows with codes into this file")
    arguments = told.parse_args()
    rows = compare(arguments, recipes, lambda title: "2:4" if "2:4" in title else None)
    if arguments.svg is not None:
        coded = [row for row in rows if " w" in row["title"]]
        arguments.svg.write_text(drawn(coded, Path(arguments.model).name, COLOURS), encoding="utf-8")


if __name__ == "__main__":
    main()
