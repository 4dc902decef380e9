"""The gain of training over a method alone, at the same size, by the command line; the printed figures are stored.

    python recipes/studies/quality/trained.py MODEL --calibration TEXT --training TEXT --text TEXT \\
        --group-size 32 --json OUT.json

Each pair of rows is a method, and the method trained (`compress methods train`) from the original's logits and hidden
states. Inputs of a w4a4 layer are rounded by a range fitted to each token, or (static) by one range per tensor, which
training learns.
"""

from compress.recipes.studies.quality.compare import Recipes, compare, parser

STATIC: dict[str, object] = {"scheme": "w4a4", "activations": "static", "calibrator": "mse"}
STARTS: dict[str, list[dict[str, dict[str, object]]]] = {
    "w2a16 gptq": [{"gptq": {"scheme": "w2a16"}}],
    "w2a16 gptq for the loss": [{"gptq": {"scheme": "w2a16", "objective": "loss"}}],
    "w4a4 gptq": [{"gptq": {"scheme": "w4a4"}}],
    "w4a4 smoothquant, gptq": [{"smoothquant": {"scheme": "w4a4", "rounding": "none"}}, {"gptq": {"scheme": "w4a4"}}],
    "w4a4 static smoothquant, gptq": [{"smoothquant": {**STATIC, "rounding": "none"}}, {"gptq": STATIC}],
    "sparsegpt 2:4": [{"sparsegpt": {"pattern": "2:4"}}],
    "w4a16 sparsegpt 2:4, gptq": [{"sparsegpt": {"pattern": "2:4"}}, {"gptq": {"scheme": "w4a16"}}],
    "q2_k gptq": [{"k-quants": {"scheme": "q2_k"}}],
    "q2_k gptq for the loss": [{"k-quants": {"scheme": "q2_k", "objective": "loss"}}],
    "q3_k gptq": [{"k-quants": {"scheme": "q3_k"}}],
    "q3_k gptq for the loss": [{"k-quants": {"scheme": "q3_k", "objective": "loss"}}],
    "ternary": [{"ternary": {}}],
}
WITHOUT_GROUPS = ("sparsegpt", "k-quants")  # passes without the option group_size


def recipes(group_size: int, training: dict[str, object]) -> Recipes:
    """Every start, alone and trained."""
    found: Recipes = {}
    for title, passes in STARTS.items():
        start = [
            {name: options if name in WITHOUT_GROUPS else {**options, "group_size": group_size}}
            for each in passes
            for name, options in each.items()
        ]
        found[title] = start
        found[f"{title}, trained"] = [*start, {"train": training}]
    return found


def main() -> None:
    reader = parser(__doc__)
    reader.add_argument("--steps", type=int, default=400)
    reader.add_argument("--minutes", type=float, help="instead of steps and a rate, which are then chosen by the time")
    reader.add_argument("--rows", type=int, default=8)
    reader.add_argument("--learning-rate", type=float, default=3e-4)
    reader.add_argument("--features", type=float, default=4.0)
    reader.add_argument("--precision", default="full")
    said = reader.parse_args()
    timed = said.minutes is not None
    names = ("minutes",) if timed else ("steps", "learning_rate", "precision")
    training = {name: getattr(said, name) for name in (*names, "rows", "features")}
    training |= {"scales": "anchored", "scale_rate": 3e-3, "warmup": 0.1}
    compare(said, lambda size: recipes(size, training))


if __name__ == "__main__":
    main()
