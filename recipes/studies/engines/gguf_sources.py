"""Do we read files that llama.cpp wrote? Model by model, type by type.

    python recipes/studies/engines/gguf_sources.py MODEL... --llama LIBRARY --json OUT.json [--types Q4_0 ...]
        [--files FILE.gguf ...]

Exports each model as it is, lets llama.cpp quantize that file (`llama_model_quantize` of LIBRARY, a libllama of any
program that holds it), and reads the result by `compress.load`. All dequantized weights are held against those of
transformers' own reader, bit for bit, and logits on codes against its logits, in float32. `original` is our export
itself, held against the model that it was made of. FILE: a file of somebody else's.

LIBRARY comes with the package of Node.js: npm pack @node-llama-cpp/linux-x64@3.22.1
"""

import argparse
import ctypes
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from torch import nn

import compress
from compress.checkpoint.read.pretrained import load_tokenizer
from compress.checkpoint.read.source import DEMO, Source, find_source
from compress.recipes.studies.engines.gguf_check import keep
from compress.recipes.studies.figures import asked, made_by

TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "IQ4_XS")
LENGTH = 128
QUANTIZE = "import sys; from compress.recipes.studies.engines.gguf_sources import quantize; quantize(*sys.argv[1:])"


class Parameters(ctypes.Structure):
    """The first fields of `llama_model_quantize_params`, and room for the others."""

    _fields_ = (("threads", ctypes.c_int32), ("type", ctypes.c_int32), ("others", ctypes.c_uint8 * 248))


def quantize(library: str, file: str, kind: str, output: str) -> None:
    """Let llama.cpp quantize a file."""
    sys.stdout.flush()
    for path in sorted(Path(library).parent.glob("libggml*.so")):
        if "cpu" not in path.name:
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    llama = ctypes.CDLL(library)
    defaults = llama.llama_model_quantize_default_params
    defaults.restype = Parameters
    parameters: Parameters = defaults()
    parameters.threads, parameters.type = 1, gguf.LlamaFileType[f"MOSTLY_{kind}"]
    if llama.llama_model_quantize(file.encode(), output.encode(), ctypes.byref(parameters)):
        sys.exit("llama_model_quantize failed")


def row_of(file: Path, reference: nn.Module, text: str) -> dict[str, Any]:
    """Figures of a file that is read, beside a model of the same weights in float32."""
    source: Source = find_source(str(file))
    notes: list[str] = []
    model: Any = compress.load(file, torch.float32, notes=notes)
    dense = compress.load(file, torch.float32, dequantize=True) if source.quantization else model
    held = dense.state_dict()
    wanted = {name: value for name, value in reference.state_dict().items() if name in held}
    ids = torch.tensor([load_tokenizer(source)(text)["input_ids"][:LENGTH]])
    with torch.no_grad():
        ours, theirs = (each(input_ids=ids).logits.double().log_softmax(-1) for each in (model, reference))
    return {
        "types": dict(Counter(each.tensor_type.name for each in gguf.GGUFReader(file).tensors)),
        "remarks": [note.replace(file.name, "the file") for note in notes],
        "tensors": len(wanted),
        "differ": [name for name, value in wanted.items() if not torch.equal(value.float(), held[name].float())],
        "tokens": ids.shape[1],
        "kl": float((theirs.exp() * (theirs - ours)).sum(-1).mean()),
    }


def read_by_transformers(file: Path) -> nn.Module:
    kind = transformers.AutoModelForCausalLM
    model: nn.Module = kind.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return model


def rows_of(model: str, arguments: argparse.Namespace, text: str, scratch: Path) -> Iterator[dict[str, Any]]:
    """Rows of one model: our export, and what llama.cpp makes of it."""
    compress.export(model, scratch / "original", "gguf", verify=False)
    file, name = scratch / "original" / "model.gguf", Path(model).name
    yield {"model": name, "title": "original", **row_of(file, compress.load(model, torch.float32), text)}
    for kind in arguments.types:
        output = scratch / f"{kind}.gguf"
        line = [sys.executable, "-c", QUANTIZE, arguments.llama, str(file), kind, str(output)]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        if done.returncode:
            yield {"model": name, "title": kind, "error": done.stderr.strip().splitlines()[-1]}
            continue
        yield {"model": name, "title": kind, **row_of(output, read_by_transformers(output), text)}


def line_of(row: Mapping[str, Any]) -> str:
    """A row as Markdown."""
    if "error" in row:
        return f"| {row['model']} | {row['title']} | {row['error']} | | |"
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(row["types"].items()))
    return f"| {row['model']} | {row['title']} | {kinds} | {len(row['differ'])} of {row['tensors']} | {row['kl']:.1e} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help="directories, or 'demo'")
    parser.add_argument("--llama", required=True, help="a shared library of llama.cpp")
    parser.add_argument("--types", nargs="*", default=TYPES, choices=TYPES)
    parser.add_argument("--files", nargs="*", default=[], type=Path, help="GGUF files of others")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    text = (DEMO / "heldout.txt").read_text(encoding="utf-8")[: 16 * LENGTH]
    print("| model | file | types | tensors that differ | KL |\n|---|---|---|---|---|", flush=True)

    def done(row: dict[str, Any]) -> None:
        print(line_of(row), flush=True)
        if arguments.json:
            keep(arguments.json, {**row, "command": asked(__file__), "made_by": made_by()})

    for model in arguments.models:
        with tempfile.TemporaryDirectory() as scratch:
            for row in rows_of(model, arguments, text, Path(scratch)):
                done(row)
    for file in arguments.files:
        done({"model": file.name, "title": "as it is", **row_of(file, read_by_transformers(file), text)})


if __name__ == "__main__":
    main()
