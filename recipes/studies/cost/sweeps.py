"""CPU seconds of a sweep of several bits and group sizes of GPTQ, beside those of a run for each of them.

    python recipes/studies/cost/sweeps.py MODEL --calibration TEXT --text TEXT [--bits 2 3 4] \\
        [--group-sizes 32 64 128] [--samples 128] [--length N] [--defaults 64] --json OUT.json

Recipes have prefix=original and drift=0, so that a sweep gathers statistics once. A run is `compress quantize`,
verification included, and `compress evaluate` against the original; the sweep does both for all recipes. The figures
are seconds of user and system of the commands and of the processes that they start. --defaults adds a sweep of groups
of these sizes by GPTQ as it is by default, whose statistics no two recipes share.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from compress.checkpoint.files import write_json
from compress.kernels.cpu.processor import cpu_name
from compress.recipes.studies.figures import asked, made_by

ORIGINAL = {"prefix": "original", "drift": 0}


def cpu_seconds_of(*words: object) -> float:
    """CPU seconds of a `compress` command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "compress", *map(str, words), "--quiet"], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return round(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, 2)


def recipes_of(bits: Sequence[int], sizes: Sequence[int], more: dict[str, Any], folder: Path) -> dict[str, Path]:
    """{name: recipe file} of every combination of bits and group sizes, with more options of GPTQ."""
    folder.mkdir()
    found = {}
    for width, size in product(bits, sizes):
        options = {"scheme": f"w{width}a16", "group_size": size, **more}
        found[f"w{width}-g{size}"] = folder / f"w{width}-g{size}.yaml"
        found[f"w{width}-g{size}"].write_text(json.dumps({"passes": [{"gptq": options}]}))
    return found


def data_of(arguments: argparse.Namespace) -> list[object]:
    """The options of calibration data."""
    given = {"--samples": arguments.samples, "--length": arguments.length}
    chosen = [word for name, value in given.items() if value is not None for word in (name, value)]
    return ["--calibration", arguments.calibration, *chosen]


def separate(arguments: argparse.Namespace, recipes: dict[str, Path], folder: Path) -> list[dict[str, Any]]:
    """The seconds of a run for each recipe, and its KL."""
    rows = []
    text = ["--text", arguments.text, "--samples", arguments.text_samples]
    for name, recipe in recipes.items():
        out, found = folder / name, folder / f"{name}.json"
        run = ["quantize", arguments.model, "--recipe", recipe, *data_of(arguments), "--output", out]
        row = {"recipe": name, "quantize": cpu_seconds_of(*run)}
        compared = ["evaluate", out, "--reference", arguments.model, *text, "--json", found]
        row["evaluate"] = cpu_seconds_of(*compared)
        row["kl"] = json.loads(found.read_text())["texts"][0]["figures"]["kl_mean"]["value"]
        rows.append(row)
        print(row, flush=True)
    return rows


def swept(arguments: argparse.Namespace, recipes: Sequence[Path], folder: Path) -> dict[str, Any]:
    """The seconds of a sweep of all recipes, and their KLs."""
    out = folder / "sweep"
    text = ["--text", arguments.text, "--text-samples", arguments.text_samples]
    seconds = cpu_seconds_of("sweep", arguments.model, *recipes, *data_of(arguments), *text, "--output", out)
    rows = json.loads((out / "sweep.json").read_text())["rows"]
    return {"seconds": seconds, "kl": {row["name"]: row["kl_mean"] for row in rows}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--group-sizes", type=int, nargs="+", default=[32, 64, 128])
    parser.add_argument("--samples", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--text-samples", type=int, default=32)
    parser.add_argument("--defaults", type=int, nargs="+", default=[])
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        recipes = recipes_of(arguments.bits, arguments.group_sizes, ORIGINAL, folder / "original")
        together = swept(arguments, list(recipes.values()), folder)
        print(together, flush=True)
        alone = separate(arguments, recipes, folder)
        usual = None
        if arguments.defaults:
            others = recipes_of(arguments.bits, arguments.defaults, {}, folder / "defaults")
            usual = swept(arguments, list(others.values()), folder / "defaults")
            print(usual, flush=True)
    total = sum(row["quantize"] + row["evaluate"] for row in alone)
    same = {row["recipe"]: row["kl"] for row in alone} == together["kl"]
    found = {"ratio": round(together["seconds"] / total, 3), "same_kl": same, "sweep": together, "separate": alone}
    found["defaults"] = usual
    write_json(arguments.json, {"command": asked(__file__), **made_by(), "cpu": cpu_name(), **found})
    print(f"sweep {together['seconds']:.0f} s, separate runs {total:.0f} s: {found['ratio']}; KL the same: {same}")


if __name__ == "__main__":
    main()
