"""KL of trellis codes of 2, 3 and 4 bits, without a rotation, with one that is fused into the model (R1, R2), with one
that is computed as the model runs, too (R4), and with all of it computed as the model runs; each also rounded for the
loss.

    python recipes/studies/quality/trellis_codes.py MODEL --calibration TEXT --text TEXT --json OUT.json

Each row is quantized, verified in a fresh process and evaluated on held-out text, by the command line.
"""

from compress.recipes.studies.quality.compare import Recipes, compare, parser

ROTATIONS: dict[str, dict[str, object] | None] = {
    "": None,
    "rotate, ": {},
    "rotate online, ": {"online": True},
    "rotate all online, ": {"hidden": False, "heads": False, "online": True},
}


OBJECTIVES: dict[str, dict[str, object]] = {"": {}, " for the loss": {"objective": "loss"}}


def recipes(_: int) -> Recipes:
    """{title: passes}."""
    return {
        f"{before}trellis w{bits}{behind}": [
            *([] if rotation is None else [{"rotate": {**rotation}}]),
            {"trellis": {"scheme": f"w{bits}a16", **objective}},
        ]
        for bits in (2, 3, 4)
        for before, rotation in ROTATIONS.items()
        for behind, objective in OBJECTIVES.items()
    }


def main() -> None:
    compare(parser(__doc__).parse_args(), recipes)


if __name__ == "__main__":
    main()
