"""Does onnxruntime-genai generate from our graphs what transformers generates from the same weights?

    python recipes/studies/engines/genai_check.py MODEL... --random qwen3 --python VENV/bin/python --json OUT.json

Rounds each model to 4 bits in groups of 32, exports it in both forms for ONNX Runtime, and lets onnxruntime-genai
continue a prompt greedily. The dense values of the codes in transformers, float32, continue the same prompt.
`onnx-exact` rounds no inputs, `onnx` rounds them to int8 in the product.

    python -m venv VENV && VENV/bin/pip install onnxruntime-genai==0.18.0
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import compress
from compress.checkpoint.read.pretrained import load_tokenizer
from compress.checkpoint.read.source import DEMO, find_source
from compress.recipes.studies.engines.agreement import same_start
from compress.recipes.studies.engines.gguf_check import keep
from compress.recipes.studies.engines.random_models import add_models, named_models
from compress.recipes.studies.figures import asked, made_by

FORMS = ("onnx-exact", "onnx")
PROMPT, TOKENS = 32, 64
WORKER = """
import json, sys
from importlib.metadata import version
import onnxruntime_genai as genai
folder, text, ids, count = json.load(sys.stdin)
model = genai.Model(folder)
options = genai.GeneratorParams(model)
options.set_search_options(max_length=len(ids) + count, min_length=len(ids) + count, do_sample=False)
generator = genai.Generator(model, options)
generator.append_tokens(ids)
while not generator.is_done():
    generator.generate_next_token()
found = [int(each) for each in generator.get_sequence(0)][len(ids):]
tokens = [int(each) for each in genai.Tokenizer(model).encode(text)]
print(json.dumps({"generated": found, "tokens": tokens, "reader": "onnxruntime-genai " + version("onnxruntime-genai")}))
"""


def rows_of(name: str, model: Path, arguments: argparse.Namespace, scratch: Path) -> Iterator[dict[str, Any]]:
    """The rows of one model."""
    out = scratch / "out"
    compress.quantize(model, compress.RTN(scheme="w4a16", group_size=32), output=out, verify=False)
    dense: Any = compress.load(out, torch.float32, dequantize=True)
    text = (DEMO / "heldout.txt").read_text(encoding="utf-8")[: 8 * PROMPT]
    tokenizer = load_tokenizer(find_source(str(out)))
    ids = tokenizer(text)["input_ids"][:PROMPT]
    words = tokenizer(text, add_special_tokens=False)["input_ids"]  # GenAI's adds no special tokens by default.
    counts = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS}
    wanted = dense.generate(torch.tensor([ids]), do_sample=False, **counts)[0, len(ids) :].tolist()
    for form in arguments.forms:
        compress.export(out, scratch / form, form, verify=False)
        given = json.dumps([str(scratch / form), text, ids, TOKENS])
        done = subprocess.run(
            [arguments.python, "-c", WORKER], input=given, capture_output=True, text=True, check=False
        )
        row = {"model": name, "title": form, "asked": TOKENS}
        if done.returncode:
            yield {**row, "error": done.stderr.strip().splitlines()[-1]}
            continue
        found = json.loads(done.stdout)
        row |= {"reader": found["reader"], "same_tokens": found["tokens"] == words}
        yield {**row, "same_start": same_start(wanted, found["generated"]), "generated": found["generated"]}


def line_of(row: Mapping[str, Any]) -> str:
    """A row as Markdown."""
    if "error" in row:
        return f"| {row['model']} | {row['title']} | {row['error']} | |"
    said = "same" if row["same_tokens"] else "differs"
    return f"| {row['model']} | {row['title']} | {row['same_start']} of {row['asked']} | {said} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser)
    parser.add_argument("--python", required=True, help="python with onnxruntime-genai")
    parser.add_argument("--forms", nargs="+", default=FORMS, choices=FORMS)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print("| model | form | same greedy | tokenizer |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        models = named_models(arguments.models, arguments.random, Path(folder))
        for name, model in models.items():
            with tempfile.TemporaryDirectory() as scratch:
                for row in rows_of(name, model, arguments, Path(scratch)):
                    print(line_of(row), flush=True)
                    if arguments.json:
                        keep(arguments.json, {**row, "command": asked(__file__), "made_by": made_by()})


if __name__ == "__main__":
    main()
