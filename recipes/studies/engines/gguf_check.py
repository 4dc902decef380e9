"""Does llama.cpp read what `compress export --to gguf` writes, and compute the same? Model by model, scheme by scheme.

    python recipes/studies/engines/gguf_check.py demo MODEL --random qwen2 gemma3 --text TEXT \\
        --llama-python VENV/bin/python --json OUT.json

Quantizes each model (float32 ones in float16) by each scheme, exports it, lets llama.cpp give the log-probabilities of
the next token at every place of a window and continue a prompt, and holds them against `compress.load` in float32.
llama.cpp rounds the inputs of blocks to int8 itself; ours is held against it as stored and with these roundings
(`as_llama_cpp`). What is left then is roundings that fall to the other side, because sums are added in another order:
`floor` says how far that carries, between two runs of ours that differ by one part in a million.

`--random` makes models of a family with random weights. Their tokenizers have the demo's merges, after a split like the
family's, or are like SentencePiece's and trained on the demo's text. llama.cpp comes from the package xllamacpp, in an
environment of its own:

    python -m venv VENV && VENV/bin/pip install xllamacpp==2026.10.11549
"""

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import compress
from compress.checkpoint.export.gguf.splitting import LLAMA3, QWEN2
from compress.checkpoint.files import RECORD, read_json, write_json
from compress.checkpoint.read.pretrained import load_tokenizer
from compress.checkpoint.read.source import DEMO, find_source
from compress.checkpoint.read.stored import stored_in
from compress.errors import InputError, one_of
from compress.model.calls import evaluating
from compress.passes.protocol.recipe import parse_recipe
from compress.recipes.studies.engines.agreement import compared, same_start
from compress.recipes.studies.figures import asked, made_by

WORKER = Path(__file__).with_name("gguf_worker.py")
PYTHON = "COMPRESS_LLAMA_PYTHON"
# llama.cpp's int8 inputs: of most blocks (Q8_0), and of super-blocks (Q8_K), whose scales are float32.
BLOCK, SUPER_BLOCK, LARGEST = 32, 256, 127
OF_SUPER_BLOCKS = ("k-quant", "ternary")  # kinds of formats
TEXT_SHOWN = 200  # characters of the text that llama.cpp tokenizes itself
JITTER = 1e-6
SIZES: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
GEMMA = {**SIZES, "head_dim": 32}
LLAMA3_POSITIONS: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
RANDOM: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "llama3": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**SIZES, "rope_parameters": LLAMA3_POSITIONS})
    ),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, sliding_window=None)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=64)),
    "gemma": lambda: transformers.GemmaForCausalLM(transformers.GemmaConfig(**GEMMA)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**GEMMA, query_pre_attn_scalar=32, sliding_window=64)
    ),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**GEMMA, query_pre_attn_scalar=32, sliding_window=64)
    ),
}
SPLITS = {"qwen2": QWEN2, "qwen3": QWEN2, "llama3": LLAMA3}  # how tokenizers of these families split a text
PIECES = ("llama", "gemma", "gemma2", "gemma3", "mistral")  # families whose tokenizers are SentencePiece's
TABLE = (
    "| model | scheme | types | perplexity | llama.cpp | KL, as stored | KL, inputs as llama.cpp | floor | same top | "
    "tokenizer | same greedy |\n|---|---|---|---|---|---|---|---|---|---|---|"
)


def cases(group_size: int) -> dict[str, tuple[dict[str, dict[str, object]], ...]]:
    """{title: passes}; the first is the original."""

    def rtn(scheme: str, **options: object) -> dict[str, dict[str, object]]:
        return {"rtn": {"scheme": scheme, "group_size": group_size, **options}}

    gptq: dict[str, dict[str, object]] = {"gptq": {"scheme": "w4a16", "group_size": group_size}}
    return {
        "original": (),
        "w4a16 rounded": (rtn("w4a16"),),
        "w4a16 by GPTQ": (gptq,),
        "w4a16 by GPTQ, embeddings w8a16": (gptq, {"embeddings": {"scheme": "w8a16", "group_size": group_size}}),
        "w4a16 asymmetric": (rtn("w4a16", grid="asymmetric"),),
        "q4_k_m by GPTQ": ({"k-quants": {"scheme": "q4_k_m"}},),
        "w5a16": (rtn("w5a16"),),
        "w8a16": (rtn("w8a16"),),
        "ternary": ({"ternary": {"group_size": -1}},),
        "binary": ({"binary": {"group_size": 128}},),
    }


def made(family: str, folder: Path) -> Path:
    """A model of a family with random weights, norms and biases among them, float16, with a tokenizer."""
    torch.manual_seed(0)
    model: Any = RANDOM[family]()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight) * 0.1)
    model.half().save_pretrained(folder)
    if family in PIECES:
        pieces(folder)
        return folder
    held = read_json(DEMO / "tokenizer.json")
    words = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": SPLITS[family]}, "behavior": "Isolated", "invert": False}
    held["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, words]}
    write_json(folder / "tokenizer.json", held)
    shutil.copyfile(DEMO / "tokenizer_config.json", folder / "tokenizer_config.json")
    return folder


def halved(model: Path, folder: Path) -> Path:
    """A model in float16 where it is stored in float32: blocks have float16 scales. Others are left where they are."""
    if find_source(str(model)).config.get("dtype", "float32") != "float32":
        return model
    transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float16).save_pretrained(folder)
    for path in model.glob("tokenizer*"):
        shutil.copyfile(path, folder / path.name)
    return folder


def pieces(folder: Path) -> None:
    """Write a tokenizer like SentencePiece's, trained on the demo's text: pieces, and a token for each byte."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    special = ["<unk>", "<s>", "</s>"]
    single = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=SIZES["vocab_size"], special_tokens=[*special, *single], max_token_length=8, show_progress=False
    )
    lines = (DEMO / "calibration.txt").read_text(encoding="utf-8").splitlines()
    # Words one by one: a piece of SentencePiece does not reach from one word into the next.
    tokenizer.train_from_iterator((word for line in lines for word in line.split(" ") if word), trainer)
    held = json.loads(tokenizer.to_str())
    held["added_tokens"] = [each for each in held["added_tokens"] if each["content"] in special]
    tokenizer = Tokenizer.from_str(json.dumps(held))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    words = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **words})


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


def as_llama_cpp(model: nn.Module, kinds: Mapping[str, str], sign: float = 0.0) -> list[Any]:
    """Let linear layers round their inputs as llama.cpp does: those in blocks to int8, the others to float16. Returns
    the hooks. kinds: {layer in blocks: the kind of its format}. sign: of a change of one part in a million."""

    def super_blocks(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (rounded_whole(given[0], sign), *given[1:])

    def int8(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (rounded(given[0], sign), *given[1:])

    def half(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (given[0].half().float(), *given[1:])

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


def row_of(name: str, model: Path, title: str, arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The row of one model and scheme."""
    row: dict[str, Any] = {"model": name, "title": title, "passes": list(cases(arguments.group_size)[title])}
    checkpoint = model
    try:
        if row["passes"]:
            checkpoint = scratch / "checkpoint"
            passes = parse_recipe({"passes": row["passes"]}, title)
            needed = any(each.calibrated for each in passes)
            windows: dict[str, Any] = {"samples": 16, "length": 128} if needed else {}
            text = arguments.calibration if needed else None
            options: dict[str, Any] = {"output": checkpoint, "overwrite": True, "verify": False}
            compress.quantize(str(model), passes, calibration=text, **windows, **options)
        made = compress.export(checkpoint, scratch / "gguf", "gguf", overwrite=True, verify=False)
        read_back = compress.verify(made.output)
    except compress.CompressError as error:
        return {**row, "refused": str(error).replace(f"{checkpoint} ", "")}
    record = read_json(made.output / RECORD)
    row |= {
        "types": dict(Counter(each["type"] for each in record["gguf"]["tensors"].values())),
        "bytes": made.bytes,
        "notes": list(made.lost),
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
        "file": str(made.output / record["gguf"]["file"]),
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
            hooks = as_llama_cpp(model, kinds, sign)
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
    parser.add_argument("models", nargs="*", help="directories, or 'demo'")
    parser.add_argument("--random", nargs="+", default=[], help=f"families: {', '.join(RANDOM)}")
    parser.add_argument("--llama-python", default=os.environ.get(PYTHON), help=f"python with xllamacpp (or {PYTHON})")
    parser.add_argument("--text", default="demo", help="a text file; its first tokens are the window")
    parser.add_argument("--calibration", default="demo")
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--only", nargs="+", help="words of titles, like w4a16; other rows stay as the file has them")
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
            one_of("family", family, RANDOM)
        titles = list(cases(arguments.group_size))
        arguments.titles = [t for t in titles if not arguments.only or any(word in t for word in arguments.only)]
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
        models = {
            Path(name).name: halved(find_source(name).path, Path(folder) / f"half-{i}")
            for i, name in enumerate(arguments.models)
        }
        models |= {f"random {family}": made(family, Path(folder) / family) for family in arguments.random}
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
