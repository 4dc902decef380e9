"""Quantize and evaluate a model by the command line, RTN beside GPTQ, and store the printed figures.

    python recipes/studies/figures.py MODEL --calibration TEXT --text TEXT --group-size 32 --json OUT.json

Runs `compress quantize` and `compress evaluate`, prints a Markdown table, and stores the options and the figures of
each run.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import compress
from compress.evaluation.document import Evaluation
from compress.evaluation.evaluation_file import read_evaluation
from compress.evaluation.provenance import timing_origin

# Figures of a row, and those of them that are means.
MEANS = ("perplexity", "reference_perplexity", "log_perplexity_ratio", "kl_mean", "same_top")
FIGURES = (*MEANS, "kl_median", "kl_p99")
# Keys of `flat` that a study of many rows on one text stores of each.
OF_A_ROW = ("kl_mean", "kl_median", "perplexity", "same_top", "standard_errors", "tokens", "windows", "length")


def command(*arguments: str) -> Any:
    """Run a `compress` command with --json and return its output."""
    line = [sys.executable, "-m", "compress", *arguments, "--quiet", "--json", "-"]
    return json.loads(subprocess.run(line, check=True, capture_output=True, text=True).stdout)


def evaluated(model: str, reference: str, text: str, *options: str) -> dict[str, Any]:
    """The figures of a model; the rest of the `--json` output is stored once, for all rows (`keep`)."""
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "evaluation.json"
        words = [
            "evaluate",
            model,
            "--reference",
            reference,
            "--text",
            text,
            *options,
            "--quiet",
            "--json",
            str(target),
        ]
        subprocess.run([sys.executable, "-m", "compress", *words], check=True)
        return flat(read_evaluation(target))


def flat(found: Evaluation) -> dict[str, Any]:
    """An evaluation against a reference as a row of figures: {figure: value}, standard errors, text and size."""
    (text,), size, original = found.texts, found.size, found.reference_size
    return {
        **{name: text.figures[name].value for name in FIGURES},
        "standard_errors": {name: text.figures[name].error for name in MEANS},
        "token_standard_errors": {name: text.figures[name].token_error for name in MEANS},
        "tokens": text.tokens,
        "windows": text.windows,
        "length": text.length,
        "bytes": None if size is None else size.bytes,
        "reference_bytes": None if original is None else original.bytes,
        "bits_per_weight": None if size is None else size.bits_per_weight,
        "bits_per_parameter": None if size is None else size.bits_per_parameter,
        "dtype": found.model.dtype,
        "text": text.name,
        "text_sha256": text.sha256,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--group-size", default="128")
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3, 2])
    parser.add_argument("--grids", nargs="+", default=["signed-scale", "asymmetric"])
    parser.add_argument("--methods", nargs="+", default=["rtn", "gptq"], help="the others stay as the file has them")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    before = {(row["bits"], row["grid"], row["method"]): row for row in stored(arguments.json)}
    rows = []
    for bits in arguments.bits:
        for grid in arguments.grids:
            for method in ("rtn", "gptq"):
                if method not in arguments.methods:
                    rows += [before[bits, grid, method]] if (bits, grid, method) in before else []
                    continue
                with tempfile.TemporaryDirectory() as scratch:
                    out = str(Path(scratch) / "out")
                    options = ["--method", method, "--scheme", f"w{bits}a16", "--group-size", arguments.group_size]
                    options += ["--grid", grid]
                    options += ["--calibration", arguments.calibration] if method == "gptq" else []
                    record = command("quantize", arguments.model, *options, "--output", out)
                    found = evaluated(out, arguments.model, arguments.text)
                shown = ["compress quantize MODEL", *options[: options.index("--grid") + 2]]
                row = {"bits": bits, "grid": grid, "method": method, "command": " ".join(shown), **found}
                row["text"] = Path(arguments.text).name
                row["seconds"] = record["seconds"]
                row["verification"] = record["verification"]
                rows.append(row)
                print(
                    f"| {bits} | {grid} | {method} | {found['perplexity']:.4f} | {found['kl_mean']:.5f} | "
                    f"{found['same_top']:.2%} | {found['bits_per_weight']:.2f} | {found['bytes']} |",
                    flush=True,
                )
    keep(arguments.json, arguments, rows)


def asked(script: str, words: Sequence[str] | None = None) -> str:
    """The command line of a script below `recipes/`, from the root of the repository; files of its arguments by their
    names alone. script: its `__file__`. words: its arguments, where they differ from those of this process."""
    given = sys.argv[1:] if words is None else words
    place = Path(script).resolve().relative_to(Path(__file__).resolve().parents[2]).as_posix()
    return shlex.join(["python", place, *(Path(w).name if os.sep in w else w for w in given)])


def made_by() -> dict[str, Any]:
    """The origin of figures: versions, the commit that is checked out, the device."""
    return {
        "commit": head(),
        "compress": compress.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": "cpu",
        "threads": torch.get_num_threads(),
    }


def head() -> str:
    """The commit that is checked out where this script lies."""
    line = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(line, capture_output=True, text=True, check=False).stdout.strip()


def tell_times(found: dict[str, Any], target: Path | None) -> None:
    """Print measured times with their provenance; write them, too, where a file is named."""
    about = timing_origin(torch.device("cpu"))
    del about["command"]  # it names folders of this machine
    said = json.dumps({**found, "about": about}, indent=1)
    print(said)
    if target is not None:
        target.write_text(said + "\n", encoding="utf-8")


def stored(target: Path) -> list[dict[str, Any]]:
    """The rows of an earlier run, each with its commit; none where there is no such file."""
    if not target.exists():
        return []
    record = json.loads(target.read_text(encoding="utf-8"))
    return [{**row, "commit": row.get("commit", record["commit"])} for row in record["rows"]]


def keep(target: Path, arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Write rows with their provenance; a row that has its own commit is of an earlier run."""
    record = {
        "model": Path(arguments.model).name,
        "group_size": int(arguments.group_size),
        "calibration": Path(arguments.calibration).name,
        "text": Path(arguments.text).name,
        "reference_perplexity": rows[0]["reference_perplexity"],
        "reference_bytes": rows[0]["reference_bytes"],
        **made_by(),
        "rows": rows,
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def keep_evaluated(
    target: Path, script: str, model: str, found: dict[str, Any], rows: list[dict[str, Any]], **more: Any
) -> None:
    """Write rows of evaluations on one text with their provenance. script: the study's `__file__`; found: one of the
    evaluations, as `flat` has it; more: what else is said of all rows."""
    record = {
        "model": Path(model).name,
        "command": asked(script),
        **more,
        **made_by(),
        "reference_perplexity": found["reference_perplexity"],
        "text_sha256": found["text_sha256"],
        "rows": rows,
    }
    target.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
