"""CPU seconds of GPTQ by this package, by GPTQModel and by llm-compressor, and of trellis codes by this package: one
model, the same tokens, in turns.

    python recipes/studies/cost/solver_time.py MODEL --calibration TEXT --text TEXT [--blocks 4] \\
        --group-size 64 --json OUT.json
    python recipes/studies/cost/solver_time.py --random 1024 --blocks 2 --group-size 128 --json OUT.json

MODEL is read in float32, of its blocks the first `--blocks`; `--random` is a Llama of that width with random weights
and tokens. Every library quantizes it to symmetric 4-bit codes in a process of its own (`solver_worker.py`) with so
many threads, as its defaults are; compress once more as the paper has it, without its additional defaults, and to
trellis codes of 4 bits. The figure is seconds of user and system after the imports: reading, quantizing, writing.
`compress evaluate` then holds each result of a MODEL against the float32 one on held-out tokens; predictions of random
weights mean nothing.

GPTQModel and llm-compressor want environments of their own, with the versions of torch and transformers from here;
`--gptqmodel-python` and `--llmcompressor-python` are their interpreters, without which they are left out:

    python -m venv VENV && VENV/bin/pip install torch==2.13.0 transformers==5.23.0 llmcompressor==0.14.0.1
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from compress.checkpoint.files import write_json
from compress.data.text import load_tokens
from compress.kernels.cpu.processor import cpu_name
from compress.recipes.studies.figures import asked, evaluated, made_by

WORKER = Path(__file__).with_name("solver_worker.py")
VOCABULARY, HEAD_WIDTH = 8192, 64
PLAIN = {"drift": 0.0, "clip": False, "refit": 0, "sweeps": 0, "shrink": False}
# GPTQModel plans for half the cores, and wants two workers at least, whatever it computes with.
ENVIRONMENT = {"GPTQMODEL_CPU_WORKERS": "2", "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
SHOWN = ("perplexity", "kl_mean", "same_top")


@dataclass(frozen=True)
class SolverCase:
    """A library with options that are not its defaults. method: of compress, the class of a pass."""

    library: str
    title: str
    options: dict[str, Any] = field(default_factory=dict)
    method: str = "GPTQ"


CASES = [
    SolverCase("compress", "defaults"),
    SolverCase("compress", "as the paper has it", PLAIN),
    SolverCase("compress", "trellis codes, defaults", method="Trellis"),
    SolverCase("gptqmodel", "defaults", {"offload_to_disk": False}),
    SolverCase("llmcompressor", "defaults"),
]


def write_random(folder: Path, hidden: int, blocks: int) -> None:
    """A Llama in float32 whose channels differ in size and are correlated, as trained ones are: norms of unlike sizes,
    embeddings with a falling spectrum. With a tokenizer, which libraries ask for and nothing uses."""
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=blocks,
        num_attention_heads=hidden // HEAD_WIDTH,
        num_key_value_heads=hidden // HEAD_WIDTH // 2,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
    )
    model, generator = LlamaForCausalLM(config), torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            drawn = (drawn / 2).exp()
        elif "embed" in name:
            mixing = torch.randn(hidden, hidden, generator=generator)
            drawn = (drawn * torch.arange(1, hidden + 1).pow(-0.5)) @ mixing * hidden**-0.25
        else:
            drawn *= parameter.shape[1] ** -0.5
        parameter.data = drawn
    model.save_pretrained(folder)
    words = Tokenizer(WordLevel({"<unk>": 0, "<pad>": 1, "</s>": 2}, unk_token="<unk>"))
    special = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


def write_first(folder: Path, source: str, blocks: int | None) -> None:
    """The first blocks of a model in float32, with its tokenizer."""
    fewer = {} if blocks is None else {"num_hidden_layers": blocks}
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **fewer).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def windows(arguments: argparse.Namespace, source: str | None, seed: int, count: int, what: str) -> Tensor:
    """[count, length] tokens of a text, or random ones where there is none."""
    shape = (count, arguments.length)
    if arguments.random is not None:
        return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    return load_tokens(source or "demo", tokenizer, None, what=what, length=arguments.length, samples=count).ids


def quantized(case: SolverCase, python: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The worker's report on one run, whose result lies in the folder; `error`, with its last line, where it died."""
    output, values = folder / "out", folder / "values"
    job = {
        "library": case.library,
        "model": str(folder / "model"),
        "tokens": str(folder / "calibration.pt"),
        "group_size": arguments.group_size,
        "threads": arguments.threads,
        "options": case.options,
        "method": case.method,
        "output": str(output),
        "values": str(values),
    }
    subprocess.run(["rm", "-rf", str(output), str(values)], check=True)
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    (folder / "result.json").unlink(missing_ok=True)
    threads = {name: str(arguments.threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    line = [python, str(WORKER), str(folder / "job.json"), str(folder / "result.json")]
    with (folder / "log").open("wb") as log:
        subprocess.run(line, env={**os.environ, **threads, **ENVIRONMENT}, stdout=log, stderr=log, check=False)
    if not (folder / "result.json").exists():
        last = (folder / "log").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        return {"error": f"it died: {' '.join(last)}"}
    found: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return found


def figures(folder: Path) -> dict[str, float]:
    """The figures of the latest result by our evaluator, against the model that it was made of."""
    made = folder / "values" if (folder / "values").exists() else folder / "out"
    found = evaluated(str(made), str(folder / "model"), str(folder / "held_out.pt"))
    return {name: found[name] for name in SHOWN}


def rows_of(
    arguments: argparse.Namespace, folder: Path, keep: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """A row for each library and setting; seconds of every turn, figures of the first. keep: called after each run."""
    pythons = {
        "compress": sys.executable,
        "gptqmodel": arguments.gptqmodel_python,
        "llmcompressor": arguments.llmcompressor_python,
    }
    cases = [case for case in CASES if pythons[case.library]]
    rows: list[dict[str, Any]] = [
        {"library": c.library, "setting": c.title, "options": c.options, "import": [], "work": []} for c in cases
    ]
    for _ in range(arguments.turns):
        for case, row in zip(cases, rows, strict=True):
            if "error" in row:
                continue
            found = quantized(case, pythons[case.library], folder, arguments)
            if "error" in found:
                row["error"] = found["error"]
                keep(rows)
                continue
            for name in ("import", "work"):
                row[name].append(round(found[name], 2))
            row["versions"] = found["versions"]
            if "spent" in found:
                row.setdefault("spent", []).append({name: round(s, 2) for name, s in found["spent"].items()})
            keep(rows)
            if arguments.random is None and "kl_mean" not in row:
                row |= figures(folder)
                keep(rows)
            print(json.dumps(row), flush=True)
    return rows


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="directory or hub id of a language model")
    parser.add_argument("--random", type=int, help="width of a random Llama instead")
    parser.add_argument("--blocks", type=int, help="blocks of the random Llama (2), or the first of the model (all)")
    parser.add_argument("--calibration", help="text or token rows")
    parser.add_argument("--text", help="held-out text or token rows")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--held-out", type=int, default=4, help="windows of held-out text")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--gptqmodel-python")
    parser.add_argument("--llmcompressor-python")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    if (arguments.model is None) == (arguments.random is None):
        parser.error("give a model, or --random WIDTH")
    return arguments


def main() -> None:
    """Print the rows as they come, and store them with their provenance."""
    arguments = parse()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if arguments.random is None:
            write_first(folder / "model", arguments.model, arguments.blocks)
        else:
            write_random(folder / "model", arguments.random, arguments.blocks or 2)
        tokens = windows(arguments, arguments.calibration, 1, arguments.samples, "calibration")
        torch.save(tokens, folder / "calibration.pt")
        torch.save(windows(arguments, arguments.text, 2, arguments.held_out, "held-out"), folder / "held_out.pt")
        record = {
            "command": asked(__file__),
            **made_by(),
            "cpu": cpu_name(),
            "threads": arguments.threads,
            "calibration": list(tokens.shape),
        }
        rows_of(arguments, folder, lambda rows: write_json(arguments.json, {**record, "rows": rows}))


if __name__ == "__main__":
    main()
