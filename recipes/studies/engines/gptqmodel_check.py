"""Does GPTQModel read what `compress export --to gptq` and `--to awq` write to the weights that were decided?

    python recipes/studies/engines/gptqmodel_check.py demo MODEL --random qwen3 --python VENV/bin/python --json OUT.json

Rounds each model by each scheme with scales of float16, exports it, and lets GPTQModel multiply each layer by the
identity (`compress.checkpoint.export.read_back`). A layer differs where the product is not our weight, rounded to the
dtype in which GPTQModel computes, bit for bit. VENV has gptqmodel, what it needs, and compress:

    python -m venv VENV && VENV/bin/pip install -e . && VENV/bin/pip install --no-deps gptqmodel==7.7.0 \\
        pypcre tokenicer logbar device-smi defuser threadpoolctl dill torchao accelerate
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import compress
from compress.base.fresh_process import fresh
from compress.checkpoint.files import read_json
from compress.passes.protocol.recipe import make_pass
from compress.recipes.studies.engines.gguf_check import keep
from compress.recipes.studies.engines.random_models import add_models, named_models
from compress.recipes.studies.figures import asked, made_by


@dataclass(frozen=True)
class LayoutCase:
    """A scheme in a layout."""

    scheme: str
    layout: str = "gptq"
    grid: str = "signed-scale"

    @property
    def title(self) -> str:
        return f"{self.scheme} {self.layout}{', asymmetric' if self.grid == 'asymmetric' else ''}"


CASES = (
    *(LayoutCase(f"w{bits}a16") for bits in range(2, 9)),
    LayoutCase("w4a16", grid="asymmetric"),
    LayoutCase("w4a8"),
    LayoutCase("w8a8"),
    LayoutCase("w4a16", "awq"),
    LayoutCase("w4a16", "awq", "asymmetric"),
)


def row_of(name: str, model: Path, case: LayoutCase, python: str, scratch: Path) -> dict[str, Any]:
    """The row of one model and case."""
    row = {"model": name, "title": case.title, **vars(case)}
    options = {"scheme": case.scheme, "grid": case.grid, "scales": "float16"}
    try:
        compress.quantize(model, make_pass("rtn", options), output=scratch / "checkpoint", verify=False)
        made = compress.export(scratch / "checkpoint", scratch / "export", case.layout, verify=False)
    except compress.CompressError as error:
        return {**row, "refused": str(error).partition(": ")[2]}
    config = read_json(made.output / "config.json")["quantization_config"]
    return {**row, "group_size": config["group_size"], **read(python, made.output, scratch / "result.json")}


LINE = 200  # characters of a message
READ = """
import json, sys
from pathlib import Path
from compress.checkpoint.export.read_back import by_gptqmodel
Path(sys.argv[2]).write_text(json.dumps(by_gptqmodel(Path(sys.argv[1]))))
"""


def read(python: str, folder: Path, result: Path) -> dict[str, Any]:
    """{reader, layers, differ (how many)}, or {error: the beginning of the last line that it said}."""
    _, environment = fresh()
    line = [python, "-P", "-c", READ, str(folder), str(result)]
    done = subprocess.run(line, capture_output=True, text=True, errors="replace", env=environment, check=False)
    if not result.exists():
        return {"error": (done.stderr.strip().splitlines() or [f"it ends with {done.returncode}"])[-1][:LINE]}
    found = read_json(result)
    return {**found, "differ": len(found["differ"])}


def line_of(row: Mapping[str, Any]) -> str:
    """A row as Markdown."""
    found = row.get("refused", row.get("error"))
    found = f"{row['differ']} of {row['layers']} layers differ" if found is None else found
    return f"| {row['model']} | {row['title']} | {row.get('group_size', '')} | {found} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser)
    titles = [case.title for case in CASES]
    parser.add_argument("--only", nargs="+", choices=titles, default=titles, metavar="CASE", help="like 'w4a16 awq'")
    parser.add_argument("--python", default=sys.executable, help="python with gptqmodel and compress")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    cases = [case for case in CASES if case.title in arguments.only]
    print("| model | scheme | groups | GPTQModel |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        named = named_models(arguments.models, arguments.random, Path(folder))
        for (name, model), case in product(named.items(), cases):
            with tempfile.TemporaryDirectory() as scratch:
                row = row_of(name, model, case, arguments.python, Path(scratch))
            print(line_of(row), flush=True)
            if arguments.json:
                keep(arguments.json, {**row, "command": asked(__file__), "made_by": made_by()})


if __name__ == "__main__":
    main()
