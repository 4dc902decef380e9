"""The peak memory of quantizing: checkpoints of more and more layers, the run and its verification.

    python recipes/studies/cost/quantize_memory.py [--layers 8 16 32] [--hidden 2048] \\
        [--method rtn] [--scheme w4a16] --json OUT.json

Every case writes a bfloat16 Llama of random weights to a temporary folder and quantizes it by the command line, with
`--verify`. While it runs, the anonymous memory (`RssAnon` of /proc/PID/status: what files do not back) of the command
and of the process that verifies is read every 10 ms; the figures are the largest of each. A method that calibrates gets
8 x 256 random tokens.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from compress.base.memory import anonymous_bytes
from compress.recipes.studies.figures import asked, made_by

VOCABULARY, HEAD_WIDTH, KEY_VALUE_HEADS = 32000, 64, 8
SAMPLES, LENGTH = 8, 256
INTERVAL_S = 0.01


def write_model(folder: Path, layers: int, hidden: int, intermediate: int) -> int:
    """A Llama of random weights in bfloat16; returns the bytes of its file."""
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_WIDTH,
        num_key_value_heads=KEY_VALUE_HEADS,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0, hidden**-0.5, generator=generator)
        if parameter.ndim == 1:
            parameter.data.fill_(1)
    model.tie_weights()
    model.save_pretrained(folder)
    return (folder / "model.safetensors").stat().st_size


def children(pid: int) -> list[int]:
    """The child processes of a process."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()]
    except OSError:
        return []


def peaks_of(words: list[str]) -> tuple[int, int]:
    """The largest anonymous memory of a command, and of its child processes, in bytes. Raises SystemExit where it
    fails."""
    process = subprocess.Popen(words)
    own = below = 0
    while process.poll() is None:
        own = max(own, anonymous_bytes(process.pid) or 0)
        below = max([below, *(anonymous_bytes(pid) or 0 for pid in children(process.pid))])
        time.sleep(INTERVAL_S)
    if process.returncode:
        raise SystemExit(f"the command ended with {process.returncode}")
    return own, below


def measured(folder: Path, method: str, scheme: str) -> dict[str, int]:
    """Peaks of the command and of its children, which are the verification, in 10^6 bytes, and its CPU seconds."""
    words = [sys.executable, "-m", "compress", "quantize", str(folder / "in"), "--method", method, "--scheme", scheme]
    words += ["--output", str(folder / "out"), "--verify", "--quiet"]
    if method != "rtn":
        torch.save(torch.randint(VOCABULARY, (SAMPLES, LENGTH)), folder / "tokens.pt")
        words += ["--calibration", str(folder / "tokens.pt")]
    before = os.times()
    own, verifying = peaks_of(words)
    cpu = os.times().children_user + os.times().children_system - before.children_user - before.children_system
    return {"run_mb": round(own / 1e6), "verification_mb": round(verifying / 1e6), "cpu_seconds": round(cpu)}


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=5632)
    parser.add_argument("--method", default="rtn")
    parser.add_argument("--scheme", default="w4a16")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    rows: list[dict[str, int]] = []
    record = {
        "command": asked(__file__),
        **made_by(),
        "method": arguments.method,
        "scheme": arguments.scheme,
        "hidden": arguments.hidden,
        "intermediate": arguments.intermediate,
        "rows": rows,
    }
    for layers in arguments.layers:
        with tempfile.TemporaryDirectory() as scratch:
            size = write_model(Path(scratch) / "in", layers, arguments.hidden, arguments.intermediate)
            found = measured(Path(scratch), arguments.method, arguments.scheme)
        rows.append({"layers": layers, "checkpoint_mb": round(size / 1e6), **found})
        print(json.dumps(rows[-1]), flush=True)
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
