"""Measures the ranks of a quantization: memory of each at its peak, CPU time, and bytes that they send.

    python recipes/studies/cost/ranks.py --model MODEL --calibration TEXT --ranks 1 2 2 --fsdp - 1x2 2x1 \\
        --json OUT.json -- --method gptq
    python recipes/studies/cost/ranks.py --model deepseek --experts 256 --ranks 2 --fsdp 1x2 --json OUT.json -- ...

Runs `compress quantize MODEL` by torchrun on gloo, once for each number of ranks, with the words after `--`. `--fsdp`
has the shape of the mesh for each run, `-` for one process without torchrun. `deepseek` is a checkpoint of random
weights in float8, of DeepSeek-V3's structure: sizes a quarter of its own, its number of experts, a block without
experts before others. Every 50 ms each rank's anonymous memory is read (`RssAnon` of /proc/PID/status). CPU time is
that of all processes of a run. Bytes are those of the loopback device in a network namespace of its own, which root can
make.
"""

import argparse
import ctypes
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from compress.base.memory import anonymous_bytes
from compress.model.split_experts import split_experts
from compress.recipes.studies.figures import asked, made_by

CLONE_NEWNET = 0x40000000  # of unshare(2)
INTERVAL_S = 0.05
SAMPLES, LENGTH = 8, 256
BLOCK = 128
FLOAT8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
QUARTER = {
    "hidden_size": 1792,
    "intermediate_size": 4608,
    "moe_intermediate_size": 512,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "q_lora_rank": 384,
    "kv_lora_rank": 128,
    "first_k_dense_replace": 1,
    "vocab_size": 8192,
    "dtype": "bfloat16",
    "architectures": ["DeepseekV3ForCausalLM"],
}


def write_deepseek(folder: Path, layers: int, experts: int) -> int:
    """A checkpoint of so many blocks and routed experts, and calibration tokens beside it; returns its bytes."""
    config = DeepseekV3Config(**QUARTER, num_hidden_layers=layers, n_routed_experts=experts)
    config.save_pretrained(folder)
    said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**said, "quantization_config": FLOAT8}), encoding="utf-8")
    with torch.device("meta"):
        model = DeepseekV3ForCausalLM(config)
        split_experts(model)
    generator = torch.Generator().manual_seed(0)
    torch.save(torch.randint(config.vocab_size, (SAMPLES, LENGTH), generator=generator), folder / "tokens.pt")
    held: dict[str, str] = {}
    for i in range(-1, layers):
        own = f"model.layers.{i}."
        tensors: dict[str, Tensor] = {}
        for name, meta in model.state_dict().items():
            if name.startswith(own) if i >= 0 else not name.startswith("model.layers."):
                tensors |= _random(name, meta.shape, generator)
        file = f"model-{i + 2:05d}-of-{layers + 1:05d}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        held |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": held}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _random(name: str, shape: torch.Size, generator: torch.Generator) -> dict[str, Tensor]:
    if len(shape) == 1:
        return {name: torch.zeros(shape) if "bias" in name else torch.ones(shape, dtype=torch.bfloat16)}
    weight = torch.empty(shape, dtype=torch.bfloat16).normal_(0, 1, generator=generator)
    if "_proj" not in name:
        return {name: weight * 0.02}
    scales = torch.full([-(-size // BLOCK) for size in shape], 0.02)
    return {name: weight.to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}


def sent_bytes() -> int:
    """Bytes that have been sent over loopback in this network namespace."""
    lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[9]) for line in lines if line.lstrip().startswith("lo:"))


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    try:
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text("utf-8").split()]
    except OSError:
        return []


def measured(model: str, ranks: int, shape: str, words: list[str], folder: Path) -> dict[str, Any]:
    """A row: one run."""
    started = [sys.executable] if shape == "-" else [sys.executable, "-m", "torch.distributed.run"]
    started += [] if shape == "-" else ["--nproc-per-node", str(ranks), "--master-port", "29511"]
    sharded = [] if shape == "-" else ["--fsdp", shape]
    line = [*started, "-m", "compress", "quantize", model, "--output", str(folder), *sharded, *words, "--quiet"]
    before, sent, begun = resource.getrusage(resource.RUSAGE_CHILDREN), sent_bytes(), time.monotonic()
    peaks: dict[int, int] = {}
    process = subprocess.Popen([*line, "--no-verify", "--device", "cpu"], env={**os.environ, "OMP_NUM_THREADS": "1"})
    while process.poll() is None:
        for pid in [process.pid] if shape == "-" else children(process.pid):
            peaks[pid] = max(peaks.get(pid, 0), anonymous_bytes(pid) or 0)
        time.sleep(INTERVAL_S)
    if process.returncode:
        raise SystemExit(f"the command ended with {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    record = json.loads((folder / "compress.json").read_text(encoding="utf-8"))
    return {
        "ranks": ranks,
        "fsdp": shape,
        "seconds": round(time.monotonic() - begun, 1),
        "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "sent_mb": round((sent_bytes() - sent) / 1e6, 1),
        "peak_anonymous_mb": [round(peak / 1e6) for peak in peaks.values()],
        "notes": record["notes"],
    }


def main() -> None:
    """The measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--calibration")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--ranks", type=int, nargs="+", required=True)
    parser.add_argument("--fsdp", nargs="+", required=True)
    parser.add_argument("--folder", type=Path, help="where checkpoints are made")
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("words", nargs="+", help="options of compress quantize")
    arguments = parser.parse_args()
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise SystemExit("no network namespace can be made here")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    rows = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        model, calibration, size = arguments.model, arguments.calibration, None
        if model == "deepseek":
            model = str(Path(scratch) / "in")
            size = write_deepseek(Path(model), arguments.layers, arguments.experts)
            calibration = calibration or str(Path(model) / "tokens.pt")
        words = [*arguments.words, *(["--calibration", calibration] if calibration else [])]
        for ranks, shape in zip(arguments.ranks, arguments.fsdp, strict=True):
            rows.append(measured(model, ranks, shape, words, Path(scratch) / "out"))
            print(json.dumps({key: value for key, value in rows[-1].items() if key != "notes"}), flush=True)
            shutil.rmtree(Path(scratch) / "out")
    checkpoint = {} if size is None else {"checkpoint_mb": round(size / 1e6)}
    found = {"command": asked(__file__), **made_by(), **checkpoint, "rows": rows}
    arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
