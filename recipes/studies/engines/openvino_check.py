"""OpenVINO on our ONNX graphs, beside `compress.load`.

    python recipes/studies/engines/openvino_check.py MODEL... --random qwen3 --python VENV/bin/python --json OUT.json

Rounds each model by a scheme, exports it for ONNX Runtime, and lets OpenVINO compute the logits of windows of text on a
CPU in float32, the second half of a window with the cache of the first. Layers' inputs are as they are, or rounded to 8
bits in groups of 32, which is OpenVINO's default. Stores the KL of both from `compress.load` in float32.

    python -m venv VENV && VENV/bin/pip install openvino==2026.4.1
"""

import argparse
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import compress
from compress.checkpoint.read.pretrained import load_tokenizer
from compress.checkpoint.read.source import find_source
from compress.data.text import load_tokens
from compress.onnx.readback import divergence
from compress.recipes.studies.engines.gguf_check import keep
from compress.recipes.studies.engines.random_models import add_models, named_models
from compress.recipes.studies.figures import asked, made_by

SCHEMES = ("w2a16", "w4a16", "w8a16", "w8a8")
INPUTS = {"as they are": "0", "rounded by OpenVINO": "32"}
WORKER = """
import sys
import numpy as np
import openvino
PAST = "past_key_values"
graph, ids, size, out = sys.argv[1:]
core, rows = openvino.Core(), np.load(ids)
options = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": size}
model = core.compile_model(core.read_model(graph), "CPU", options)
cache, logits, seen = {}, [], 0
for each in model.inputs:
    shape = each.partial_shape
    if each.any_name.startswith(PAST):  # rows, heads, tokens, channels
        cache[each.any_name] = np.zeros([len(rows), shape[1].get_length(), 0, shape[3].get_length()], np.float32)
for part in np.split(rows, [rows.shape[1] // 2], 1):
    seen += part.shape[1]
    feed = {"input_ids": part, "attention_mask": np.ones([len(rows), seen], np.int64), **cache}
    found = model({each.any_name: feed[each.any_name] for each in model.inputs})
    logits.append(found[model.output("logits")])
    cache = {name: found[model.output(name.replace(PAST, "present"))] for name in cache}
np.savez(out, logits=np.concatenate(logits, 1), version=openvino.__version__)
"""


def rows_of(
    name: str, model: Path, scheme: str, arguments: argparse.Namespace, scratch: Path
) -> Iterator[dict[str, Any]]:
    """The rows of a model in one scheme."""
    out, row = scratch / "out", {"model": name, "scheme": scheme}
    groups: dict[str, Any] = {"group_size": 32} if scheme.endswith("a16") else {}
    compress.quantize(model, compress.RTN(scheme=scheme, **groups), output=out, verify=False)
    ours: Any = compress.load(out, torch.float32)
    source = find_source(str(out))
    limits = {"samples": arguments.windows, "length": arguments.length}
    ids = load_tokens(arguments.text, lambda: load_tokenizer(source), source.config, what="text", **limits).ids
    np.save(scratch / "ids.npy", ids.numpy())
    with torch.no_grad():
        wanted = ours(input_ids=ids).logits
    compress.export(out, scratch / "onnx", "onnx", verify=False)
    for title, size in INPUTS.items():
        task = (str(scratch / "onnx" / "model.onnx"), str(scratch / "ids.npy"), size, str(scratch / "found.npz"))
        done = subprocess.run([arguments.python, "-c", WORKER, *task], capture_output=True, text=True, check=False)
        told = {**row, "title": f"{scheme}, inputs {title}", "inputs": title}
        if done.returncode:
            yield {**told, "error": done.stderr.strip().splitlines()[-1]}
            continue
        held = np.load(scratch / "found.npz")
        found = torch.from_numpy(held["logits"])
        same = float((wanted.argmax(-1) == found.argmax(-1)).double().mean())
        yield {**told, "kl": divergence(wanted, found), "same_top": same, "reader": f"OpenVINO {held['version']}"}


def line_of(row: dict[str, Any]) -> str:
    """A row as Markdown."""
    figures = row["error"] if "error" in row else f"{row['kl']:.1e} | {row['same_top']:.1%}"
    return f"| {row['model']} | {row['scheme']} | {row['inputs']} | {figures} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser)
    parser.add_argument("--python", required=True, help="python with openvino")
    parser.add_argument("--text", default="demo")
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print("| model | scheme | inputs | KL | same top |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, model in named_models(arguments.models, arguments.random, Path(folder)).items():
            for scheme in arguments.schemes:
                with tempfile.TemporaryDirectory() as scratch:
                    for row in rows_of(name, model, scheme, arguments, Path(scratch)):
                        print(line_of(row), flush=True)
                        if arguments.json:
                            keep(arguments.json, {**row, "command": asked(__file__), "made_by": made_by()})


if __name__ == "__main__":
    main()
