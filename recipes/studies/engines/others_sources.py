"""Do we read what AutoRound and GPTQModel themselves write?

    python recipes/studies/engines/others_sources.py MODEL... --text TEXT --python VENV/bin/python --json OUT.json

Lets each package quantize a model on a CPU and save it, reads the folder by `compress.load`, and holds its logits, in
float32, against those of a dense model of the same weights: (codes - zero points) * scales, unpacked here in loops over
the bits of the words that the package wrote. VENV has both packages and what they need:

    python -m venv VENV && VENV/bin/pip install -e . auto-round && VENV/bin/pip install --no-deps gptqmodel==7.7.0 \\
        pypcre tokenicer logbar device-smi defuser threadpoolctl dill torchao accelerate
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

import compress
from compress.checkpoint.files import read_json
from compress.checkpoint.read.compressed_layers import stored_in
from compress.checkpoint.read.pretrained import load_tokenizer
from compress.checkpoint.read.source import find_source
from compress.recipes.studies.engines.gguf_check import keep
from compress.recipes.studies.figures import asked, made_by

ROWS, LENGTH, WORD = 16, 128, 32
AUTO_ROUND = """
import json, sys
from importlib.metadata import version
from auto_round import AutoRound
model, output, rows, options = json.load(sys.stdin)
form = options.pop("format")
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
held = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
tokens = [torch.tensor([row]) for row in rows]
made = AutoRound(held, AutoTokenizer.from_pretrained(model), iters=2, nsamples=len(rows), seqlen=len(rows[0]),
                 dataset=tokens, device_map="cpu", batch_size=4, **options)
made.quantize_and_save(output, format=form)
print(version("auto-round"), file=sys.stderr)
"""
GPTQ_MODEL = """
import json, os, sys
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # it asks for two threads, and has half as many as cores
from importlib.metadata import version
model, output, rows, options = json.load(sys.stdin)
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
held = GPTQModel.load(model, QuantizeConfig(device="cpu", **options))
held.quantize([{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows], batch_size=4)
held.save(output)
print(version("gptqmodel"), file=sys.stderr)
"""
SIZES = {"bits": 4, "group_size": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "AutoRound, symmetric": (AUTO_ROUND, {**SIZES, "sym": True, "format": "auto_gptq"}),
    "AutoRound, asymmetric": (AUTO_ROUND, {**SIZES, "sym": False, "format": "auto_gptq"}),
    "AutoRound's own format, symmetric": (AUTO_ROUND, {**SIZES, "sym": True, "format": "auto_round"}),
    "AutoRound's own format, asymmetric": (AUTO_ROUND, {**SIZES, "sym": False, "format": "auto_round"}),
    "GPTQModel, symmetric": (GPTQ_MODEL, {**SIZES, "sym": True, "desc_act": False}),
    "GPTQModel, act-order": (GPTQ_MODEL, {**SIZES, "sym": True, "desc_act": True}),
    "GPTQModel, 8 bits": (GPTQ_MODEL, {"bits": 8, "group_size": 32, "sym": True, "desc_act": False}),
}


def unpacked(words: Tensor, bits: int) -> Tensor:
    """[K, N] numbers of words [K bits / 32, N], lowest bits first."""
    ones = torch.stack([words >> place & 1 for place in range(WORD)], 1).flatten(0, 1)
    numbers = ones.unflatten(0, (-1, bits)).to(torch.int64)
    return sum(numbers[:, place] << place for place in range(bits))


def unpacked_awq(words: Tensor) -> Tensor:
    """[M, N] codes of 4 bits of words [M, N / 8]: each holds eight outputs, the even ones in its lower half."""
    halves = torch.stack([words >> 4 * place & 15 for place in range(8)], -1).unflatten(-1, (2, 4))
    return halves.transpose(-1, -2).flatten(1).to(torch.int64)


def dense_weights(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """({weight: float32 [N, K]} of the layers of a folder in GPTQ's or AWQ's layout, its other tensors in float32)."""
    config = read_json(folder / "config.json")["quantization_config"]
    bits, less = config["bits"], 0 if "v2" in str(config.get("checkpoint_format")) else 1
    awq = str(config.get("packing_format")).endswith("awq")
    tensors = {name: held for file in folder.glob("*.safetensors") for name, held in load_file(file).items()}
    weights = {}
    for name in (each.removesuffix(".qweight") for each in tensors if each.endswith(".qweight")):
        words, zero_words = (tensors[f"{name}.{part}"] for part in ("qweight", "qzeros"))
        codes = unpacked_awq(words) if awq else unpacked(words, bits)
        zeros = unpacked_awq(zero_words) if awq else unpacked(zero_words.t(), bits).t() + less
        columns = torch.arange(len(codes))
        group = tensors.get(f"{name}.g_idx", columns // (len(codes) // len(zeros))).long()
        scales = tensors[f"{name}.scales"].float()
        weights[f"{name}.weight"] = ((codes - zeros[group]) * scales[group]).t().contiguous()
    parts = ("qweight", "qzeros", "scales", "g_idx")
    return weights, {n: held.float() for n, held in tensors.items() if n.rpartition(".")[2] not in parts}


def row_of(model: Path, title: str, python: str, rows: list[list[int]], folder: Path) -> dict[str, Any]:
    """The row of one model and case."""
    script, options = CASES[title]
    row = {"model": model.name, "title": title, "options": options}
    given = json.dumps([str(model), str(folder), rows, options])
    done = subprocess.run([python, "-c", script], input=given, capture_output=True, text=True, check=False)
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    if done.returncode:
        return {**row, "error": last}
    found = next(path.parent for path in sorted(folder.rglob("config.json")))
    dense: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    weights, others = dense_weights(found)
    dense.load_state_dict({**others, **weights}, strict=False)
    source, loaded = find_source(str(found)), compress.load(found, torch.float32)
    values = compress.load(found, torch.float32, dequantize=True).state_dict()
    ids = torch.tensor(rows[:1])
    with torch.no_grad():
        ours, wanted = (each(input_ids=ids).logits.double() for each in (loaded, dense))
    p, q = wanted.log_softmax(-1), ours.log_softmax(-1)
    kinds = sorted({str(layer.scheme) for layer in stored_in(source).layers.values()})
    return {
        **row,
        "version": last,
        "schemes": kinds,
        "layers": len(weights),
        "differ": [name for name, held in weights.items() if not torch.equal(held, values[name])],
        "largest_difference": float((ours - wanted).abs().max()),
        "kl": float((p.exp() * (p - q)).sum(-1).mean()),
    }


def rows_of(model: Path, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of one model."""
    ids = load_tokenizer(find_source(str(model)))(arguments.text.read_text(encoding="utf-8")[:40000])["input_ids"]
    rows = [ids[i * LENGTH : (i + 1) * LENGTH] for i in range(ROWS)]
    for title in (title for title in CASES if any(word in title for word in arguments.only)):
        with tempfile.TemporaryDirectory() as scratch:
            yield row_of(model, title, arguments.python, rows, Path(scratch) / "made")


def line_of(row: Mapping[str, Any]) -> str:
    """A row as Markdown."""
    if "error" in row:
        return f"| {row['model']} | {row['title']} | {row['error']} | | |"
    said = f"{len(row['differ'])} of {row['layers']} layers differ"
    return (
        f"| {row['model']} | {row['title']} {row['version']} | {', '.join(row['schemes'])} | {said} | {row['kl']:.1e} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path, help="directories")
    parser.add_argument("--text", type=Path, required=True, help="a text to calibrate on")
    parser.add_argument("--python", required=True, help="python with auto-round, gptqmodel and compress")
    parser.add_argument("--only", nargs="+", default=[""], help="words of titles")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print("| model | written by | read as | weights | KL |\n|---|---|---|---|---|", flush=True)
    for model in arguments.models:
        for row in rows_of(model, arguments):
            print(line_of(row), flush=True)
            if arguments.json:
                keep(arguments.json, {**row, "command": asked(__file__), "made_by": made_by()})


if __name__ == "__main__":
    main()
