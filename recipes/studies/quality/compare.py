"""Compares every method with every other on one model, by the command line, and stores the printed figures.

    python recipes/studies/quality/compare.py MODEL --calibration TEXT --text TEXT --group-size 32 --json OUT.json

Each row is a recipe: it is quantized, verified in a fresh process and evaluated on held-out text.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from compress.passes.protocol.recipe import parse_recipe
from compress.recipes.studies.figures import command, evaluated, keep, stored

# {title: passes}
Recipes = dict[str, list[dict[str, dict[str, object]]]]
STATIC = {"scheme": "w8a8", "activations": "static"}


def recipes(group_size: int) -> Recipes:
    """Every method, with the schemes that it is meant for."""
    found: Recipes = {}
    for scheme in ("w4a16", "w3a16"):
        own = {"scheme": scheme, "group_size": group_size}
        found[f"{scheme} rtn"] = [{"rtn": {**own}}]
        found[f"{scheme} awq"] = [{"awq": {**own}}]
        found[f"{scheme} gptq"] = [{"gptq": {**own}}]
        found[f"{scheme} awq, gptq"] = [{"awq": {**own, "rounding": "none"}}, {"gptq": {**own}}]
    few = {"group_size": group_size}
    found["w2a16 gptq"] = [{"gptq": {"scheme": "w2a16", **few}}]
    found["w2a16 gptq, a scale per channel"] = [{"gptq": {"scheme": "w2a16", "group_size": -1}}]
    found["ternary"] = [{"ternary": {**few}}]
    found["ternary, a scale per channel"] = [{"ternary": {"group_size": -1}}]
    found["binary"] = [{"binary": {**few}}]
    found["w8a8 dynamic rtn"] = [{"rtn": {"scheme": "w8a8"}}]
    found["w8a8 dynamic gptq"] = [{"gptq": {"scheme": "w8a8"}}]
    found["w8a8 dynamic smoothquant"] = [{"smoothquant": {"scheme": "w8a8"}}]
    found["w8a8 dynamic smoothquant, gptq"] = [
        {"smoothquant": {"scheme": "w8a8", "rounding": "none"}},
        {"gptq": {"scheme": "w8a8"}},
    ]
    for calibrator in ("minmax", "moving-average", "percentile", "mse", "kl"):
        found[f"w8a8 static {calibrator} rtn"] = [{"rtn": {**STATIC, "calibrator": calibrator}}]
    found["w8a8 static minmax asymmetric rtn"] = [{"rtn": {**STATIC, "activation_grid": "asymmetric"}}]
    found["w8a8 static minmax smoothquant"] = [{"smoothquant": {**STATIC}}]
    found["w8a8 static mse smoothquant"] = [{"smoothquant": {**STATIC, "calibrator": "mse"}}]
    small = {"scheme": "w4a8", "group_size": group_size}
    found["w4a8 rtn"] = [{"rtn": {**small}}]
    found["w4a8 smoothquant"] = [{"smoothquant": {**small}}]
    found["fp8 dynamic rtn"] = [{"rtn": {"scheme": "fp8"}}]
    found["fp8 static minmax rtn"] = [{"rtn": {"scheme": "fp8", "activations": "static"}}]
    found["fp8 dynamic smoothquant"] = [{"smoothquant": {"scheme": "fp8"}}]
    found["fp8 dynamic gptq"] = [{"gptq": {"scheme": "fp8"}}]
    for method in ("magnitude", "wanda", "sparsegpt", "taylor"):
        found[f"{method} 2:4"] = [{method: {"pattern": "2:4"}}]
        found[f"{method} half"] = [{method: {"sparsity": 0.5}}]
    for method in ("wanda", "sparsegpt"):
        found[f"{method} half, layer-loss"] = [{method: {"sparsity": 0.5, "allocate": "layer-loss"}}]
    codes = {"scheme": "w4a16", "group_size": group_size}
    for method in ("rtn", "gptq"):
        found[f"w4a16 sparsegpt 2:4, {method}"] = [{"sparsegpt": {"pattern": "2:4"}}, {method: codes}]
    best = {"gptq": {"scheme": "w4a16", "group_size": group_size}}
    for scheme in ("w8a16", "w4a16"):
        found[f"w4a16 gptq, embeddings {scheme}"] = [best, {"embeddings": {"scheme": scheme}}]
    for kind in ("int8", "fp8"):
        for per in ("token", "head", "tensor"):
            found[f"kv-cache {kind} per {per}, nothing else"] = [{"kv-cache": {"type": kind, "granularity": per}}]
    return found


def main() -> None:
    compare(parser(__doc__).parse_args(), recipes)


def parser(about: str | None) -> argparse.ArgumentParser:
    """The parser of a comparison's command line."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--text", required=True)
    for of, what in (("", "calibration"), ("text-", "held-out")):
        parser.add_argument(f"--{of}samples", help=f"windows of {what} text; by default as the command line has it")
        parser.add_argument(f"--{of}length", help=f"tokens of a window of {what} text")
    parser.add_argument("--training", help="what recipes that train are shown; by default what they are calibrated on")
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument(
        "--only", nargs="+", help="titles, or words of them, like gptq fp8; other rows stay as the file has them"
    )
    parser.add_argument("--json", type=Path, required=True)
    return parser


def compare(
    arguments: argparse.Namespace,
    recipes: Callable[[int], Recipes],
    store: Callable[[str], str | None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Quantize, verify and evaluate by every recipe; print a row for each, and store all of them.

    store: the value of `--store` for a title; None for no such option.
    """
    rows = {row["title"]: row for row in stored(arguments.json)}
    wanted = recipes(arguments.group_size)
    for title, passes in wanted.items():
        if arguments.only and not any(word == title if word in wanted else word in title for word in arguments.only):
            continue
        with tempfile.TemporaryDirectory() as scratch:
            out, recipe = str(Path(scratch) / "out"), Path(scratch) / "recipe.yaml"
            recipe.write_text(yaml.safe_dump({"passes": passes}), encoding="utf-8")
            calibrated = any(p.calibrated for p in parse_recipe({"passes": passes}, title))
            options = ["--recipe", str(recipe)]
            if calibrated:
                options += ["--calibration", arguments.calibration, *_windows(arguments.samples, arguments.length)]
            if arguments.training and any("train" in step for step in passes):
                options += ["--training", arguments.training]
            form = store(title)
            options += [] if form is None else ["--store", form]
            record = command("quantize", arguments.model, *options, "--output", out)
            windows = _windows(arguments.text_samples, arguments.text_length)
            found = evaluated(out, arguments.model, arguments.text, *windows)
        row = {"title": title, "passes": passes, **found, "text": Path(arguments.text).name}
        row |= {"seconds": record["seconds"], "verification": record["verification"], "store": form}
        rows[title] = row
        print(
            f"| {title} | {found['perplexity']:.4f} | {found['kl_mean']:.5f} | {found['same_top']:.2%} | "
            f"{found['bits_per_weight']:.2f} | {found['bytes']} |",
            flush=True,
        )
        keep(arguments.json, arguments, [rows[title] for title in wanted if title in rows])
    return [rows[title] for title in wanted if title in rows]


def _windows(samples: str | None, length: str | None) -> list[str]:
    """The options that select windows of a text."""
    said = {"--samples": samples, "--length": length}
    return [word for option, value in said.items() if value is not None for word in (option, value)]


if __name__ == "__main__":
    main()
