"""What training adds to a method, at the same size, by the command line; what was printed is kept.

    python recipes/trained.py MODEL --calibration TEXT --training TEXT --text TEXT --group-size 32 --json OUT.json

Each pair of rows is a method, and the method trained (`compress methods train`) from the original's logits.
"""

from compress.recipes.compare import Recipes, compare, parser

STARTS: dict[str, list[dict[str, dict[str, object]]]] = {
    "w2a16 gptq": [{"gptq": {"scheme": "w2a16"}}],
    "w4a4 gptq": [{"gptq": {"scheme": "w4a4"}}],
    "w4a4 smoothquant, gptq": [{"smoothquant": {"scheme": "w4a4", "rounding": "none"}}, {"gptq": {"scheme": "w4a4"}}],
    "sparsegpt 2:4": [{"sparsegpt": {"pattern": "2:4"}}],
    "ternary": [{"ternary": {}}],
}


def recipes(group_size: int, steps: int, rows: int, rate: float) -> Recipes:
    """Every start, alone and trained."""
    found: Recipes = {}
    for title, passes in STARTS.items():
        start = [
            {name: options if name == "sparsegpt" else {**options, "group_size": group_size}}
            for each in passes
            for name, options in each.items()
        ]
        training: dict[str, object] = {"steps": steps, "rows": rows, "learning_rate": rate}
        training |= {"scales": "anchored", "scale_rate": 3e-3, "warmup": 0.1}
        found[title] = start
        found[f"{title}, trained"] = [*start, {"train": training}]
    return found


def main() -> None:
    reader = parser(__doc__)
    reader.add_argument("--steps", type=int, default=200)
    reader.add_argument("--rows", type=int, default=16)
    reader.add_argument("--learning-rate", type=float, default=3e-4)
    said = reader.parse_args()
    compare(said, lambda size: recipes(size, said.steps, said.rows, said.learning_rate))


if __name__ == "__main__":
    main()
