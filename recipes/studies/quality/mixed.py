"""The value of choosing bits layer by layer: GPTQ at 3 and at 4 bits, and a budget half-way shared out between layers.

    python recipes/studies/quality/mixed.py MODEL --calibration TEXT --text TEXT --group-size 128 --json OUT.json

The line interpolates KL between both, at the bits per weight of the budget: about the result of layers chosen by
chance. Each row is written, verified in a fresh process and evaluated on held-out text, by the command line.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from compress.recipes.studies.figures import asked, command, evaluated, made_by

WIDTHS = (3, 4)


def quantized(said: argparse.Namespace, title: str, options: list[str]) -> dict[str, Any]:
    """A row: the figures of MODEL by GPTQ with these options. A budget is shared out by `allocate`."""
    common = ["--method", "gptq", "--calibration", said.calibration, *options]
    with tempfile.TemporaryDirectory() as scratch:
        out = str(Path(scratch) / "out")
        if "--budget" in options:
            record = command("allocate", said.model, *common, "--group-sizes", str(said.group_size), "--run", out)
        else:
            record = command("quantize", said.model, *common, "--group-size", str(said.group_size), "--output", out)
        found = evaluated(out, said.model, said.text)
    found |= {"title": title, "options": options, "text": Path(said.text).name}
    return found | {name: record[name] for name in ("achieved_kl", "rounds") if name in record}


def on_the_line(rows: list[dict[str, Any]], bits: float) -> float:
    """KL at these bits per weight, between two rows."""
    (low, below), (high, above) = ((row["bits_per_weight"], row["kl_mean"]) for row in rows)
    return float(below + (above - below) * (bits - low) / (high - low))


def main() -> None:
    told = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    told.add_argument("model")
    told.add_argument("--calibration", required=True)
    told.add_argument("--text", required=True)
    told.add_argument("--group-size", type=int, default=128)
    told.add_argument("--json", type=Path, required=True)
    said = told.parse_args()
    rows = [quantized(said, f"w{bits}", ["--scheme", f"w{bits}a16"]) for bits in WIDTHS]
    budget = sum(row["bits_per_weight"] for row in rows) / len(rows)
    mixed = quantized(said, "mixed", ["--budget", f"{budget:.4f}bpw"])
    mixed["line"] = on_the_line(rows, mixed["bits_per_weight"])
    for row in (*rows, mixed):
        print(
            f"| {row['title']} | {row['perplexity']:.4f} | {row['kl_mean']:.5f} | {row.get('line', row['kl_mean']):.5f}"
            f" | {row['bits_per_weight']:.2f} | {row['bytes']:,} |"
        )
    record = {
        "model": Path(said.model).name,
        "command": asked(__file__),
        "group_size": said.group_size,
        "reference_perplexity": mixed["reference_perplexity"],
        **made_by(),
        "rows": [*rows, mixed],
    }
    said.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
