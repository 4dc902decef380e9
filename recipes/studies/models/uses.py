"""The cost of quantization by use: positions in long texts, the original's own answers, facts to recall, tool calls.

    python recipes/studies/models/uses.py MODEL --calibration DATA ... --text TEXT ... --json OUT.json
        [--ways "w4a16" ...] [--length N] [--windows N] [--answers N] [--recall N]

    w8a16             rounded to nearest, a scale per output channel
    w4a16 ... w2a16   GPTQ, groups of 64, on 32 x 512 tokens of each DATA
    cache int4, int3  weights as they are, keys and values in few bits
    rotary x 0.9      damaged: the base of the rotary embedding is changed by 10 %

DATA: a text, self (what the model writes), code (every second module of Python's standard library), or a blend:
24:self,8:code. TEXT: a text, or code (the other modules). Evaluated in float32. Rows are added to those of the file,
which a way that is named again on the same data replaces.
"""

import argparse
import json
import sysconfig
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import compress
from compress.data.text import load_tokens
from compress.evaluation.document import Evaluation
from compress.jobs.model_source import find_model
from compress.jobs.own_text import OWN, own_tokens
from compress.recipes.studies.figures import asked, made_by, stored

DAMAGED = "rotary x 0.9"
BY_GPTQ = ("w4a16", "w3a16", "w2a16")
CODE = "code"
SAMPLES, LENGTH = 32, 512  # of calibration data
WAYS = ("w8a16", *BY_GPTQ, "cache int4", "cache int3", DAMAGED)
OF_A_TEXT = ("kl_mean", "perplexity", "reference_perplexity", "log_perplexity_ratio", "same_top")
PARTS = ("role", "windows", "length", "tokens", "by_position", "by_part", "agreement")


def code(folder: str, first: int) -> str:
    """A text file of every second module of Python's standard library."""
    modules = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[first::2]
    target = Path(folder) / CODE
    target.write_text("\n\n".join(module.read_text(encoding="utf-8") for module in modules), encoding="utf-8")
    return str(target)


def calibration_data(data: str, model: str) -> Tensor:
    """Token ids [32, 512] of the calibration data named in an argument."""
    tokenizer, config = AutoTokenizer.from_pretrained(model), AutoConfig.from_pretrained(model)
    parts = []
    for part in data.split(","):
        count, colon, source = part.partition(":")
        samples, source = (int(count), source) if colon else (SAMPLES, part)
        if source == OWN:
            parts.append(own_tokens(find_model(model, None, False), SAMPLES, LENGTH, None).ids[:samples])
            continue
        with TemporaryDirectory() as folder:
            text = code(folder, 0) if source == CODE else source
            parts.append(load_tokens(text, tokenizer, config, what="calibration", length=LENGTH, samples=samples).ids)
    return torch.cat(parts)


def named(part: str) -> str:
    """A part of calibration data, its file by its name alone."""
    count, colon, source = part.rpartition(":")
    return f"{count}{colon}{Path(source).name}"


def made(way: str, model: Any, calibration: Tensor | None) -> Any:
    """The model, changed in that way."""
    if way == DAMAGED:
        config = model.config
        config.rope_parameters = {**config.rope_parameters, "rope_theta": 0.9 * config.rope_parameters["rope_theta"]}
        return type(model)(config).eval().to(torch.float32).requires_grad_(False)
    if way.startswith("cache"):
        passes: list[Any] = [compress.KVCache(type=cast(Any, way.split()[1]))]
    elif way in BY_GPTQ:
        passes = [compress.GPTQ(scheme=cast(Any, way), group_size=64)]
    else:
        passes = [compress.RTN(scheme=cast(Any, way), group_size=-1)]
    return compress.quantize(model, passes, calibration=calibration).model


def row_of(way: str, found: Evaluation) -> dict[str, Any]:
    """The stored part of an evaluation."""
    texts = []
    for text in found.texts:
        whole = asdict(text)
        texts.append({name: whole[name] for name in PARTS} | {name: whole["figures"][name] for name in OF_A_TEXT})
    return {"way": way, "texts": texts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--calibration", nargs="+", required=True)
    parser.add_argument("--text", nargs="+", required=True)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--windows", type=int, default=4, help="of the text")
    parser.add_argument("--answers", type=int, default=100)
    parser.add_argument("--answer-tokens", type=int, default=64)
    parser.add_argument("--recall", type=int, default=2, help="windows of each kind")
    parser.add_argument("--no-tools", action="store_true")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    asks = {"answers": arguments.answers, "answer_tokens": arguments.answer_tokens, "recall": arguments.recall}
    probes = compress.Probes(**asks, tools=not arguments.no_tools)
    ways = [(way, data) for way in arguments.ways for data in (arguments.calibration if way in BY_GPTQ else [None])]
    for way, data in ways:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
        weights = model.state_dict()
        ours = made(way, model, None if data is None else calibration_data(data, arguments.model))
        if way == DAMAGED:
            ours.load_state_dict(weights)
        with TemporaryDirectory() as folder:
            found = compress.evaluate(
                ours,
                reference=arguments.model,
                text=[code(folder, 1) if text == CODE else text for text in arguments.text],
                length=arguments.length,
                samples=arguments.windows,
                probes=probes,
                tokenizer=tokenizer,
            )
        name = data and ",".join(named(part) for part in data.split(","))
        rows = [row for row in stored(arguments.json) if (row["way"], row.get("calibration")) != (way, name)]
        made_with = {"commit": made_by()["commit"], "command": asked(__file__)}
        rows.append({"calibration": name, **row_of(way, found), **made_with})
        rows.sort(key=lambda row: WAYS.index(row["way"]))
        about = {"model": Path(arguments.model).name, **made_by()}
        arguments.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
        print(f"| {way} {name} | " + " | ".join(f"{t.figures['kl_mean'].value:.5f}" for t in found.texts), flush=True)


if __name__ == "__main__":
    main()
