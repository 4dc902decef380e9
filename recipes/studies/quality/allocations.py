"""Bits shared out between layers by each score, beside the uniform model of as many bytes.

    python recipes/studies/quality/allocations.py MODEL --calibration TEXT --text TEXT --bits 2,3,4 --group-size 128 \
        --uniform w3a16:128 --json OUT.json

Each score measures every layer under each width of GPTQ, on the same calibration data, and shares out the bits per
weight of the uniform model. Each recipe is run and evaluated on held-out text. `rank` is Spearman's correlation of a
score with the KL of models in which one unit alone is replaced, over all units and widths. Seconds are CPU time of the
measurement of a score, with the solving of all widths.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr

import compress
from compress.checkpoint.sensitivity import Sensitivity
from compress.data.documents import TOKEN_FORMATS
from compress.passes.protocol.base import Pass
from compress.recipes.studies.figures import asked, flat, made_by
from compress.search.budget import By

SCORES: tuple[By, ...] = ("loss", "fisher", "kl")


def figures_of(said: argparse.Namespace, title: str, passes: Any, data: dict[str, Any]) -> dict[str, Any]:
    """A row: the figures of a checkpoint by these passes on held-out text."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        compress.quantize(said.model, passes, output=out, verify=False, **data)
        how = {"length": said.text_length, "samples": said.text_samples}
        row = {"title": title, **flat(compress.evaluate(out, reference=said.model, text=said.text, **how))}
    row["text"] = Path(said.text).name
    error = row["standard_errors"]["kl_mean"]
    print(f"| {title} | {row['kl_mean']:.5f} ± {error:.5f} | {row['bits_per_weight']:.3f} |", flush=True)
    return row


def measured(said: argparse.Namespace, score: By, data: dict[str, Any]) -> tuple[Sensitivity, float]:
    """(The table of a score, CPU seconds)."""
    schemes = compress.grid_of_candidates("gptq", bits=said.bits, group_sizes=(said.group_size,), options=said.fast)
    began = time.process_time()
    found = compress.measure_sensitivity(said.model, schemes, score=score, run_once=False, cached=False, **data)
    return found.table, time.process_time() - began


def ranks(tables: dict[By, Sensitivity]) -> dict[By, float]:
    """{score: its rank correlation with the KLs of swaps}."""
    found: dict[By, list[float]] = {
        "loss": [t.relative_loss for u in tables["loss"].units for t in u.tried.values()],
        "fisher": [float(t.fisher or 0.0) for u in tables["fisher"].units for t in u.tried.values()],
        "kl": [float(t.kl or 0.0) for u in tables["kl"].units for t in u.tried.values()],
    }
    return {score: float(spearmanr(values, found["kl"]).statistic) for score, values in found.items()}


def uniform(said: argparse.Namespace) -> Pass:
    scheme, size = said.uniform.split(":")
    return compress.GPTQ(scheme=scheme, group_size=int(size), **said.fast)


def main() -> None:
    told = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    told.add_argument("model")
    told.add_argument("--calibration", required=True)
    told.add_argument("--text", required=True)
    told.add_argument("--bits", type=lambda words: [int(word) for word in words.split(",")], default=[2, 3, 4])
    told.add_argument("--group-size", type=int, default=128)
    told.add_argument("--uniform", required=True, metavar="SCHEME:SIZE")
    told.add_argument("--samples", type=int)
    told.add_argument("--length", type=int)
    told.add_argument("--text-samples", type=int)
    told.add_argument("--text-length", type=int)
    told.add_argument("--fast", action="store_const", const={"refit": 0, "sweeps": 0}, default={}, help="GPTQ's sweep")
    told.add_argument("--json", type=Path, required=True)
    said = told.parse_args()
    calibration = said.calibration
    if calibration.endswith(TOKEN_FORMATS):
        calibration = torch.load(calibration)
    data = {"calibration": calibration, "samples": said.samples, "length": said.length}
    rows = [figures_of(said, "uniform", uniform(said), data)]
    tables: dict[By, Sensitivity] = {}
    for score in SCORES:
        tables[score], seconds = measured(said, score, data)
        print(f"{score}: {seconds:.1f} s", flush=True)
        made = compress.allocate(tables[score], f"{rows[0]['bits_per_weight']:.9f}bpw", by=score)
        row = figures_of(said, score, made.passes, data)
        rows.append({**row, "score_cpu_seconds": round(seconds, 2), "predicted_kl": made.predicted_kl})
    for row in rows[1:]:
        row["rank"] = ranks(tables)[row["title"]]
    kl = rows[-1]["score_cpu_seconds"]
    for row in rows[1:]:
        print(f"{row['title']}: rank {row['rank']:.3f}, time {row['score_cpu_seconds'] / kl:.3f} of kl's")
    record = {
        "model": Path(said.model).name,
        "command": asked(__file__),
        **made_by(),
        "units": len(tables["kl"].units),
        "rows": rows,
    }
    said.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
