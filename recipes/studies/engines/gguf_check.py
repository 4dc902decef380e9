"""Does llama.cpp read what we write for it, and compute the same? Model by model, scheme by scheme.

    python recipes/studies/engines/gguf_check.py demo MODEL --random qwen2 gemma3 --text TEXT \\
        --llama-python VENV/bin/python --json OUT.json

Quantizes each model by each scheme with scales of float16 and exports it, or runs `compress quantize --for llama.cpp`;
lets llama.cpp give the log-probabilities of the next token at every place of a window and continue a prompt, and holds
them against `compress.load` in float32. llama.cpp rounds the inputs of blocks to int8 itself; ours is held against it
as stored and with these roundings (`as_llama_cpp`). What is left then is roundings that fall to the other side, because
sums are added in another order: `floor` says how far that carries, between two runs of ours that differ by one part in
a million.

`--random` makes models of a family with random weights (`random_models`). llama.cpp comes from the package xllamacpp,
in an environment of its own:

    python -m venv VENV && VENV/bin/pip install xllamacpp==2026.10.11549
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import compress
from compress.base.errors import InputError, one_of
from compress.checkpoint.files import RECORD, read_json, write_json
from compress.checkpoint.read.compressed_layers import stored_in
from compress.checkpoint.read.pretrained import load_tokenizer, read_config
from compress.checkpoint.read.source import DEMO, find_source
from compress.model.calls import evaluating
from compress.passes.protocol.recipe import parse_recipe
from compress.recipes.studies.engines.agreement import compared, same_start
from compress.recipes.studies.engines.random_models import FAMILIES, add_models, named_models
from compress.recipes.studies.figures import asked, made_by

WORKER = Path(__file__).with_name("gguf_worker.py")
PYTHON = "COMPRESS_LLAMA_PYTHON"
# llama.cpp's int8 inputs: of most blocks (Q8_0), and of super-blocks (Q8_K), whose scales are float32.
BLOCK, SUPER_BLOCK, LARGEST = 32, 256, 127
OF_SUPER_BLOCKS = ("k-quant", "ternary")  # kinds of formats
TEXT_SHOWN = 200  # characters of the text that llama.cpp tokenizes itself
JITTER = 1e-6
WINDOWS = {"samples": 16, "length": 128}  # of the calibration
TABLE = (
    "| model | scheme | types | perplexity | llama.cpp | KL, as stored | KL, inputs as llama.cpp | floor | same top | "
    "tokenizer | same greedy |\n|---|---|---|---|---|---|---|---|---|---|---|"
)
# Runs of the command line, which leave a file and its checkpoint: {title: words after `compress quantize MODEL`}.
FOR = "--for llama.cpp"
SCHEMES = (
    *(f"w{bits}a16" for bits in range(2, 9)),
    "mxfp4a16",
    "nvfp4a16",
    "iq4_nl",
    "w4a8",
    "w8a8",
    "q2_k",
    "q3_k_m",
    "q4_k_m",
    "q6_k",
    "iq4_xs",
)
WORDS = (FOR, *(f"{FOR} --scheme {scheme}" for scheme in (*SCHEMES, "q4_k_m --embeddings w8a16")))
COMMANDS = {words: f"--method gptq {words}" for words in WORDS}


def cases(group_size: int) -> dict[str, tuple[dict[str, dict[str, object]], ...]]:
    """{title: passes}; the first is the original."""

    def rtn(scheme: str, **options: object) -> dict[str, dict[str, object]]:
        return {"rtn": {"scheme": scheme, "group_size": group_size, **half, **options}}

    half = {"scales": "float16"}
    gptq: dict[str, dict[str, object]] = {"gptq": {"scheme": "w4a16", "group_size": group_size, **half}}
    return {
        "original": (),
        "w4a16 rounded": (rtn("w4a16"),),
        "w4a16 by GPTQ": (gptq,),
        "w4a16 by GPTQ, embeddings w8a16": (
            gptq,
            {"embeddings": {"scheme": "w8a16", "group_size": group_size, **half}},
        ),
        "w4a16 asymmetric": (rtn("w4a16", grid="asymmetric"),),
        "q4_k_m by GPTQ": ({"k-quants": {"scheme": "q4_k_m"}},),
        "w5a16": (rtn("w5a16"),),
        "w8a16": (rtn("w8a16"),),
        "ternary": ({"ternary": {"group_size": -1, **half}},),
        "binary": ({"binary": {"group_size": 128, **half}},),
    }


def rounded(x: Tensor, sign: float = 0.0) -> Tensor:
    """Inputs as llama.cpp rounds them: int8 in blocks of 32, scale absmax / 127 in float16."""
    blocks = (x * (1 + sign * JITTER)).unflatten(-1, (-1, BLOCK))
    most = blocks.abs().amax(-1, keepdim=True)
    codes = (blocks * torch.where(most == 0, most, LARGEST / most)).round()
    return (codes * (most / LARGEST).half().float()).flatten(-2)


def rounded_whole(x: Tensor, sign: float = 0.0) -> Tensor:
    """Inputs as llama.cpp rounds them for super-blocks: int8 in blocks of 256, the largest magnitude at -127."""
    blocks = (x * (1 + sign * JITTER)).unflatten(-1, (-1, SUPER_BLOCK))
    most = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    factor = torch.where(most == 0, most, -LARGEST / most)
    codes = (blocks * factor).round().clamp(max=LARGEST)
    return torch.where(factor == 0, blocks, codes / factor).flatten(-2)


def as_llama_cpp(model: nn.Module, kinds: Mapping[str, str], dtype: torch.dtype, sign: float = 0.0) -> list[Any]:
    """Let linear layers round their inputs as llama.cpp does: those in blocks to int8, the others to float16, unless
    their weights are float32. Returns the hooks. kinds: {layer in blocks: the kind of its format}. dtype: of the other
    weights. sign: of a change of one part in a million."""

    def super_blocks(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (rounded_whole(given[0], sign), *given[1:])

    def int8(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (rounded(given[0], sign), *given[1:])

    def half(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return given if dtype == torch.float32 else (given[0].half().float(), *given[1:])

    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    hooks = {name: super_blocks if kind in OF_SUPER_BLOCKS else int8 for name, kind in kinds.items()}
    return [module.register_forward_pre_hook(hooks.get(name, half)) for name, module in linear.items()]


@torch.no_grad()
def log_probs(model: Any, ids: Tensor) -> Tensor:
    """[T-1, V] float64."""
    return functional.log_softmax(model(input_ids=ids[None]).logits[0, :-1].double(), -1)


def plain_token(tokenizer: Any) -> int:
    """The id of a token that is a single small letter."""
    return next(place for word, place in sorted(tokenizer.get_vocab().items()) if len(word) == 1 and "a" <= word <= "z")


def ask(python: str, job: Mapping[str, Any], scratch: Path, limit: float) -> dict[str, Any]:
    """The results of `gguf_worker`; or {"error": the reason why there are none}."""
    job_file, result_file = scratch / "job.json", scratch / "result.json"
    result_file.unlink(missing_ok=True)
    write_json(job_file, job)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        done = subprocess.run(
            [python, "-P", str(WORKER), str(job_file), str(result_file)],
            capture_output=True,
            env=environment,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no result within {limit:.0f} s"}
    if not result_file.is_file():
        return {"error": f"it ends with {done.returncode}"}
    found: dict[str, Any] = read_json(result_file)
    return found


def by_command(model: Path, words: Sequence[str], calibration: str, output: Path) -> None:
    """Run `compress quantize` with so many words. Raises CompressError with its last line where it fails."""
    line = [sys.executable, "-m", "compress", "quantize", str(model), *words, "--calibration", calibration]
    line += [f"--{name}={value}" for name, value in WINDOWS.items()]
    done = subprocess.run([*line, "--output", str(output), "--quiet"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise compress.CompressError(done.stderr.strip().splitlines()[-1])


def step_by_step(model: Path, passes: Sequence[Any], calibration: str, output: Path, checkpoint: Path) -> Path:
    """Quantize by passes, and export. Returns the checkpoint: the model itself where there are no passes."""
    if passes:
        parsed = parse_recipe({"passes": passes}, "the case")
        needed = any(each.calibrated for each in parsed)
        options: dict[str, Any] = {"calibration": calibration, **WINDOWS} if needed else {}
        compress.quantize(str(model), parsed, output=checkpoint, verify=False, **options)
    found = checkpoint if passes else model
    compress.export(found, output, "gguf", verify=False)
    return found


def row_of(name: str, model: Path, title: str, arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The row of one model and scheme."""
    row: dict[str, Any] = {"model": name, "title": title}
    checkpoint, output = scratch / "out.checkpoint", scratch / "out"
    try:
        if title in COMMANDS:
            row["words"] = COMMANDS[title].split()
            by_command(model, row["words"], arguments.calibration, output)
        else:
            row["passes"] = list(cases(arguments.group_size)[title])
            checkpoint = step_by_step(model, row["passes"], arguments.calibration, output, checkpoint)
        read_back = compress.verify(output)
    except compress.CompressError as error:
        return {**row, "refused": str(error).replace(f"{checkpoint} ", "")}
    record = read_json(output / RECORD)
    row |= {
        "types": dict(Counter(each["type"] for each in record["gguf"]["tensors"].values())),
        "bytes": (output / record["gguf"]["file"]).stat().st_size,
        "notes": record["notes"],
        "read_back": read_back,
    }
    source = find_source(str(checkpoint))
    tokenizer: Any = load_tokenizer(source)
    text = Path(DEMO / "heldout.txt" if arguments.text == "demo" else arguments.text).read_text(encoding="utf-8")
    # A line: not every tokenizer has a token for its end.
    first = max(text[: 8 * TEXT_SHOWN].splitlines(), key=len)[:TEXT_SHOWN]
    ids = torch.tensor(tokenizer(text[: 8 * arguments.length])["input_ids"][: arguments.length])
    prompt = ids[: arguments.prompt].tolist()
    job = {
        "file": str(output / record["gguf"]["file"]),
        "ids": ids.tolist(),
        "text": first,
        "text_ids": tokenizer(first)["input_ids"],
        "prompt": prompt,
        "tokens": arguments.tokens,
        "top": min(arguments.top, int(source.config["vocab_size"])),
        "plain": plain_token(tokenizer),
        "threads": torch.get_num_threads(),
    }
    found = ask(arguments.llama_python, job, scratch, arguments.limit)
    row["versions"] = found.get("versions", {})
    if "error" in found:
        return {**row, "error": found["error"]}
    return {**row, **agreement(checkpoint, ids, prompt, job, found)}


def agreement(
    checkpoint: Path, ids: Tensor, prompt: list[int], job: Mapping[str, Any], found: Mapping[str, Any]
) -> dict[str, Any]:
    """Ours beside llama.cpp's: figures of `compared`, as stored and with its roundings; generation and tokenizer."""
    source = find_source(str(checkpoint))
    kinds = {name: layer.scheme.terms[0].kind for name, layer in stored_in(source).layers.items()}
    if source.quantization is None:
        kind = transformers.AutoModelForCausalLM
        model: Any = kind.from_pretrained(checkpoint, dtype=torch.float32)
    else:
        model = compress.load(checkpoint, torch.float32, dequantize=True)
    names, best = torch.tensor(found["names"])[None], torch.tensor(found["best"], dtype=torch.float64)[None]
    with evaluating(model):
        model.generation_config.eos_token_id = None
        mask = torch.ones(1, len(prompt), dtype=torch.long)
        options: dict[str, Any] = {"max_new_tokens": job["tokens"], "do_sample": False, "pad_token_id": 0}
        continued = model.generate(torch.tensor([prompt]), attention_mask=mask, **options)[0, len(prompt) :].tolist()
        ours = {"as stored": log_probs(model, ids)}
        for kind, sign in (("as llama.cpp", 0.0), ("again", 1.0)):
            hooks = as_llama_cpp(model, kinds, read_config(source).dtype, sign)
            ours[kind] = log_probs(model, ids)
            for hook in hooks:
                hook.remove()
    wanted = ids[1:, None]
    listed = names[0] == wanted
    own = torch.where(listed.any(1), (best[0] * listed).sum(1), torch.full((len(wanted),), float("nan")))
    theirs = {"own": own[None].nan_to_num(), "best": best, "names": names}
    first, again = ours["as llama.cpp"], ours["again"]
    result: dict[str, Any] = {
        "tokens": len(ids),
        "top": job["top"],
        "perplexity": float(own.nanmean().neg().exp()),
        "ours": {kind: compared([ours[kind]], ids[None], theirs) for kind in ("as stored", "as llama.cpp")},
        "floor": float((first.exp() * (first - again)).sum(1).mean()),
        "same_start": same_start(continued, found["generated"]),
        "asked": job["tokens"],
        "continued": found["continued"],
        "same_tokens": found["same_tokens"] and found["text_tokens"] == len(job["text_ids"]),
        "seconds": found["seconds"],
    }
    return result


def line_of(row: Mapping[str, Any]) -> str:
    """A row as Markdown."""
    start = f"| {row['model']} | {row['title']} | "
    if "refused" in row or "error" in row:
        return f"{start}{row.get('refused', row.get('error'))} | | | | | | | | |"
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(row["types"].items()))
    stored_as, emulated = row["ours"]["as stored"], row["ours"]["as llama.cpp"]
    return (
        f"{start}{kinds} | {stored_as['perplexity']:.4g} | {row['perplexity']:.4g} | {stored_as['kl']:.1e} | "
        f"{emulated['kl']:.1e} | {row['floor']:.1e} | {emulated['same_top']:.1%} | "
        f"{'same' if row['same_tokens'] else 'differs'} | {row['same_start']} of {row['asked']} |"
    )


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Arguments, checked; ends with exit code 2 and a line where they cannot work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_models(parser)
    parser.add_argument("--llama-python", default=os.environ.get(PYTHON), help=f"python with xllamacpp (or {PYTHON})")
    parser.add_argument("--text", default="demo", help="a text file; its first tokens are the window")
    parser.add_argument("--calibration", default="demo")
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument(
        "--only", nargs="+", help="titles, or parts of them, like w4a16; other rows stay as the file has them"
    )
    parser.add_argument("--length", type=int, default=256, help="tokens of the window")
    parser.add_argument("--prompt", type=int, default=32, help="first tokens of the window, continued greedily")
    parser.add_argument("--tokens", type=int, default=24, help="tokens to generate")
    parser.add_argument("--top", type=int, default=4096, help="log-probabilities per token that llama.cpp gives")
    parser.add_argument("--limit", type=float, default=900, help="seconds for one file")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(words)
    try:
        if not arguments.llama_python:
            raise InputError(f"no python with xllamacpp; give --llama-python or set {PYTHON}")
        for family in arguments.random:
            one_of("family", family, FAMILIES)
        titles = [*cases(arguments.group_size), *COMMANDS]
        only = arguments.only or [""]
        arguments.titles = [t for t in titles if any(word == t if word in titles else word in t for word in only)]
        if not arguments.titles:
            raise InputError(f"no scheme has {' or '.join(arguments.only)} in its name; there are {', '.join(titles)}")
    except InputError as error:
        parser.error(str(error))
    arguments.command = asked(__file__, words)
    return arguments


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse(words)
    transformers.utils.logging.disable_progress_bar()
    print(TABLE, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        models = named_models(arguments.models, arguments.random, Path(folder))
        for name, model in models.items():
            for title in arguments.titles:
                with tempfile.TemporaryDirectory() as scratch:
                    row = row_of(name, model, title, arguments, Path(scratch))
                row |= {"command": arguments.command, "made_by": made_by()}
                print(line_of(row), flush=True)
                if arguments.json:
                    keep(arguments.json, row)


def keep(target: Path, row: dict[str, Any]) -> None:
    """Write a row in the place of an earlier one of its model and scheme; other rows stay."""
    before = read_json(target)["rows"] if target.exists() else []
    rows = {(each["model"], each["title"]): each for each in (*before, row)}
    target.parent.mkdir(parents=True, exist_ok=True)
    write_json(target, {"rows": list(rows.values())})


if __name__ == "__main__":
    main()
