"""The time left that `compress quantize` tells, beside the time that was left.

    python recipes/studies/cost/time_left.py MODEL... --calibration TEXT [--methods gptq rtn] --json OUT.json

Each line of a run that tells the time left is a row: the part of the steps that are done, the seconds told, and the
seconds until the command ended, verification included. A run is alone in its process, with one thread.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from compress.checkpoint.files import write_json
from compress.kernels.cpu.processor import cpu_name
from compress.recipes.studies.figures import asked, made_by

TOLD = re.compile(r"quantize: (\d+)/(\d+) .*?(\d+) s left")


def told(model: str, method: str, calibration: str) -> dict[str, Any]:
    """{"model", "method", "seconds" of the command, "rows": what it told about the time left}."""
    data = ["--calibration", calibration] if method != "rtn" else []
    with tempfile.TemporaryDirectory() as folder:
        words = ["quantize", model, "--method", method, *data, "--output", f"{folder}/out"]
        started = time.monotonic()
        run = subprocess.Popen(
            [sys.executable, "-m", "compress", *words],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert run.stderr is not None
        heard = [(time.monotonic(), found) for line in run.stderr if (found := TOLD.match(line))]
        if run.wait():
            raise SystemExit(f"{' '.join(words)} failed")
    ended = time.monotonic()
    rows = [
        {"done": f"{found[1]}/{found[2]}", "told": int(found[3]), "left": round(ended - at, 1)} for at, found in heard
    ]
    return {"model": Path(model).name, "method": method, "seconds": round(ended - started, 1), "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--methods", nargs="+", default=["gptq", "rtn"])
    parser.add_argument("--beside", default="", help="what else the machine did")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    runs = []
    for model in arguments.models:
        for method in arguments.methods:
            runs.append(told(model, method, arguments.calibration))
            print(runs[-1], flush=True)
    about = {"command": asked(__file__), **made_by(), "cpu": cpu_name(), "beside": arguments.beside}
    write_json(arguments.json, {**about, "runs": runs})


if __name__ == "__main__":
    main()
