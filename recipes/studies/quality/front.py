"""KL against measured bits per weight, of codes, codes and outliers, SpQR, codes and a low rank, and trellis codes.

    python recipes/studies/quality/front.py MODEL --calibration TEXT --text TEXT --group-size 32 \\
        --json OUT.json --svg OUT.svg

--group-size is the largest that divides the inputs of all layers; smaller ones down to 32 are tried, too. Each row is
quantized, verified in a fresh process and evaluated on held-out text, by the command line.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compress.recipes.studies.quality.compare import Recipes, compare, parser
from compress.recipes.studies.quality.frames import Frame, key, picture

GROUPS, WIDTHS = (32, 64, 128), (2, 3, 4)
# The paper, with nothing of ours.
PUBLISHED = {
    "threshold": 0.2,
    "damp": 1.0,
    "drift": 0.0,
    "act_order": "none",
    "search": False,
    "refit": 0,
    "sweeps": 0,
    "shrink": False,
}
COLOURS = {
    "gptq": "#4477aa",
    "outliers": "#66ccee",
    "spqr": "#ee6677",
    "published": "#aa3377",
    "lqs": "#228833",
    "trellis": "#ccbb44",
}


def recipes(group_size: int) -> Recipes:
    """{title: passes}, titles beginning with the kind that a colour is for."""
    found: Recipes = {}
    groups = [size for size in GROUPS if size <= group_size]
    for bits in WIDTHS:
        for size in groups:
            found[f"gptq w{bits} g{size}"] = [{"gptq": {"scheme": f"w{bits}a16", "group_size": size}}]
    for bits in WIDTHS:
        for share in (0.005, 0.01, 0.02):
            options = {"scheme": f"w{bits}a16", "group_size": group_size, "outliers": share}
            found[f"outliers w{bits} g{group_size} {share:.1%}"] = [{"gptq": options}]
    wide = {"group_size": 32, "tile_rows": 32}
    spqr: dict[str, dict[str, object]] = {
        "w2 1%": {"scheme": "w2a16"},
        "w3 g32, none": {"outliers": 0.0, **wide},
        "w3, none": {"outliers": 0.0},
        "w3 0.3%": {"outliers": 0.003},
        "w3 1%": {},
        "w4 g32, none": {"scheme": "w4a16", "outliers": 0.0, **wide},
        "w4, none": {"scheme": "w4a16", "outliers": 0.0},
    }
    for title, options in spqr.items():
        found[f"spqr {title}"] = [{"spqr": options}]
    for bits in (3, 4):
        found[f"published spqr w{bits}"] = [{"spqr": {"scheme": f"w{bits}a16", **PUBLISHED}}]
    for bits in (2, 3):
        for more in ({"rank": 8, "factor_bits": 8}, {"rank": 8, "factor_bits": 8, "outliers": 0.005}):
            title = f"lqs w{bits} g{group_size} " + ", ".join(f"{key} {value}" for key, value in more.items())
            found[title] = [{"lqs": {"scheme": f"w{bits}a16", "group_size": group_size, **more}}]
    rotation: dict[str, dict[str, object]] = {"rotate": {"hidden": False, "heads": False, "online": True}}
    for bits in WIDTHS:
        codes: dict[str, dict[str, object]] = {"trellis": {"scheme": f"w{bits}a16"}}
        found |= {f"trellis w{bits}": [codes], f"trellis w{bits}, rotated online": [rotation, codes]}
        found[f"trellis w{bits}, rotated online, 2^14 states"] = [
            rotation,
            {"trellis": {"scheme": f"w{bits}a16", "state_bits": 14}},
        ]
    return found


def drawn(rows: list[dict[str, Any]], title: str, colours: Mapping[str, str] = COLOURS) -> str:
    """The rows as a picture: bits per weight to the right, KL upwards by its logarithm. colours: by the first word of a
    row's title."""
    bits, kl = [row["bits_per_weight"] for row in rows], [row["kl_mean"] for row in rows]
    frame = Frame(math.floor(min(bits)), math.ceil(max(bits)), min(kl), max(kl))
    marks = frame.axes(range(int(frame.left), int(frame.right) + 1))
    for row in rows:
        x, y = frame.place(row["bits_per_weight"], row["kl_mean"])
        colour = colours[row["title"].split()[0]]
        note = f"{row['title']}: {row['bits_per_weight']:.2f} bits, KL {row['kl_mean']:.4g}"
        marks.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"><title>{note}</title></circle>')
    heading = f"{title}: KL to the original, by measured bits per weight"
    return picture(heading, [*marks, *key(list(colours.items()))])


def main() -> None:
    told = parser(__doc__)
    told.add_argument("--svg", type=Path, help="draw the rows into this file")
    arguments = told.parse_args()
    rows = compare(arguments, recipes)
    if arguments.svg is not None:
        arguments.svg.write_text(drawn(rows, Path(arguments.model).name), encoding="utf-8")


if __name__ == "__main__":
    main()
