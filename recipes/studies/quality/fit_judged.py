"""`compress fit` for sizes and for KL targets, each judged beside a stored front of fixed recipes.

    python recipes/studies/quality/fit_judged.py MODEL --calibration TEXT --text TEXT --front FRONT.json \\
        --sizes 424184B 467384B 582592B --kl 0.05 0.01 --hours 0.25 --json OUT.json

MODEL is the one of which FRONT.json (of `front.py`, or a sweep) has rows, and TEXT what these were evaluated on: no fit
sees it. Each row is one `compress fit`, with the time that it took. What it wrote is evaluated on TEXT.

A size is judged beside the best recipe of the front: the one of least KL with no more bytes, or the smallest of the
front where none has so few. It is made again here, for a difference of KL that is paired by windows. A KL target is met
on TEXT where the KL there is at most the target. Rows that the file has and nobody asks for stay.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

import compress
from compress.data.documents import TOKEN_FORMATS
from compress.data.text import load_tokens
from compress.passes.protocol.recipe import parse_recipe
from compress.recipes.studies.figures import asked, evaluated, made_by, stored
from compress.search.fitting.paired_kl import compare, interval

Row = dict[str, Any]


def fitted(said: argparse.Namespace, target: Sequence[str], out: Path) -> Row:
    """Run `compress fit`: target, proof in short, and time. Raises CalledProcessError unless it met its target or said
    that it missed it."""
    words = ["fit", said.model, *target, "--hours", str(said.hours), "--calibration", said.calibration]
    words += [*windows(said.samples, said.length), *said.options]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    line = [sys.executable, "-m", "compress", *words, "--output", str(out), "--json", "-", "--quiet"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 1) or not done.stdout:
        raise subprocess.CalledProcessError(done.returncode, line, done.stdout, done.stderr)
    proof = json.loads(done.stdout)
    (chosen,) = (run for run in proof["runs"] if run["name"] == proof["chosen"])
    return {
        "title": " ".join([*target, *said.options]),
        "command": asked_of(words),
        "met": proof["met"],
        "miss_said": done.returncode == 1,
        "held_out": chosen["figures"]["kl_mean"],
        "notes": proof["notes"],
        "recipes_run": [run["name"] for run in proof["runs"]],
        "seconds": round(seconds, 1),
        "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "within_hours": seconds <= 3600 * said.hours,
    }


def asked_of(words: Sequence[str]) -> str:
    """A `compress` command line, files by their names."""
    return " ".join(["compress", *(Path(word).name if "/" in word else word for word in words)])


def windows(samples: int | None, length: int | None) -> list[str]:
    """The options that select windows of a text."""
    said = {"--samples": samples, "--length": length}
    return [word for option, value in said.items() if value is not None for word in (option, str(value))]


def points(path: Path) -> list[Row]:
    """Rows of a stored front: title, passes, bytes, kl_mean, its error."""
    return [
        {
            "title": row.get("title") or row["name"],
            "passes": row.get("passes") or row["recipe"]["passes"],
            "bytes": row["bytes"],
            "kl_mean": row["kl_mean"],
            "error": (row.get("standard_errors") or row["errors"])["kl_mean"],
        }
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]
    ]


def beside(front: Sequence[Row], size: int) -> Row:
    """The recipe of the front to compare with at a size."""
    as_small = [row for row in front if row["bytes"] <= size]
    return min(as_small, key=lambda row: row["kl_mean"]) if as_small else min(front, key=lambda row: row["bytes"])


def judged(said: argparse.Namespace, row: Row, out: Path, scratch: Path) -> Row:
    """A row with figures on TEXT, beside the front."""
    length = windows(said.text_samples, said.text_length)
    row |= evaluated(str(out), said.model, said.text, *length)
    row["text"] = Path(said.text).name
    if row["title"].startswith("--kl"):
        return row | {"met_on_text": row["kl_mean"] <= float(row["title"].split()[1])}
    other = beside(points(said.front), row["bytes"])
    made = made_again(said, other, scratch)
    how = {"what": "held-out", "length": said.text_length, "samples": said.text_samples}
    rows = load_tokens(said.text, lambda: AutoTokenizer.from_pretrained(said.model), None, **how)
    difference = compare(said.model, out, made, rows.ids)
    row["front"] = {**other, "made_again": evaluated(str(made), said.model, said.text, *length)["kl_mean"]}
    row["difference"] = {**asdict(difference), "interval_95": interval(difference)}
    row["on_or_below"] = interval(difference)[0] <= 0
    return row


def made_again(said: argparse.Namespace, row: Row, scratch: Path) -> Path:
    """The checkpoint of a recipe of the front, made once."""
    made = scratch / row["title"].replace("/", "-")
    if not made.exists():
        calibration = torch.load(said.calibration) if said.calibration.endswith(TOKEN_FORMATS) else said.calibration
        passes = parse_recipe({"passes": row["passes"]}, row["title"])
        how = {"samples": said.samples, "length": said.length}
        compress.quantize(said.model, passes, calibration=calibration, output=made, verify=False, **how)
    return made


def shown(row: Row) -> str:
    """A row of the table."""
    kl = f"{row['kl_mean']:.5f} ± {row['standard_errors']['kl_mean']:.5f}"
    words = [row["title"], f"{row['bytes']:,}", kl, f"{row['seconds']:.0f} s", "met" if row["met"] else "miss said"]
    if "front" in row:
        low, high = row["difference"]["interval_95"]
        words += [f"{row['front']['title']}, {row['front']['bytes']:,} bytes, {row['front']['kl_mean']:.5f}"]
        words += [f"{low:+.5f} to {high:+.5f}"]
    else:
        words += ["met on text" if row["met_on_text"] else "missed on text"]
    return f"| {' | '.join(words)} |"


def main() -> None:
    told = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    told.add_argument("model")
    told.add_argument("--calibration", required=True)
    told.add_argument("--text", required=True)
    told.add_argument("--front", type=Path, required=True)
    told.add_argument("--sizes", nargs="*", default=[])
    told.add_argument("--kl", nargs="*", default=[])
    told.add_argument("--hours", type=float, default=0.25)
    for of, what in (("", "calibration"), ("text-", "held-out")):
        told.add_argument(f"--{of}samples", type=int, help=f"windows of {what} text")
        told.add_argument(f"--{of}length", type=int, help=f"tokens of a window of {what} text")
    told.add_argument("--options", nargs="*", default=[], help="other words for fit, without dashes: no-embeddings")
    told.add_argument("--json", type=Path, required=True)
    said = told.parse_args()
    said.options = [f"--{word}" for word in said.options]
    rows = {row["title"]: row for row in stored(said.json)}
    targets = [["--size", size] for size in said.sizes] + [["--kl", kl] for kl in said.kl]
    with tempfile.TemporaryDirectory() as fronts:
        for target in targets:
            with tempfile.TemporaryDirectory() as scratch:
                row = fitted(said, target, Path(scratch) / "out")
                row = judged(said, row, Path(scratch) / "out", Path(fronts))
            rows[row["title"]] = {**row, **made_by()}
            print(shown(row), flush=True)
            record = {"model": Path(said.model).name, "command": asked(__file__), **made_by()}
            said.json.write_text(json.dumps({**record, "rows": [*rows.values()]}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
