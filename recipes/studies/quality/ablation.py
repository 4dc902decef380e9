"""Measures the value of each option of GPTQ and of SpQR, on your model and your data: perplexity and KL on held-out
text.

    python recipes/studies/quality/ablation.py MODEL --calibration TEXT --text TEXT \\
        --group-size 32 [--bits 4 3 2] --json OUT.json

Uses the Python API only: each configuration quantizes a fresh copy of the model in memory.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import compress
from compress.checkpoint.read.pretrained import load_tokenizer
from compress.checkpoint.read.source import find_source
from compress.data.text import load_tokens
from compress.recipes.studies.figures import flat, made_by, stored

PLAIN = {"drift": 0.0, "clip": False, "refit": 0, "sweeps": 0, "shrink": False}
POLISH = {"refit": 2, "sweeps": 2}
FULL = {"drift": 1.0, "clip": True, **POLISH, "shrink": True}
# SpQR as it was published; after that with the same share of outliers in every row. Groups are of 16 in all of them.
PUBLISHED = {**PLAIN, "group_size": 16, "threshold": 0.2, "damp": 1.0, "act_order": "none", "search": False}
del PUBLISHED["clip"]
SHARED = {**PUBLISHED, "threshold": 0.0, "outliers": 0.01}
SEARCHED = {**SHARED, "damp": 0.01, "search": True, "act_order": "group"}
VARIANTS: dict[str, tuple[type[compress.Pass], dict[str, Any]]] = {
    "rtn symmetric": (compress.RTN, {"grid": "symmetric"}),
    "rtn narrow": (compress.RTN, {"grid": "narrow"}),
    "rtn signed-scale": (compress.RTN, {}),
    "rtn asymmetric": (compress.RTN, {"grid": "asymmetric"}),
    "gptq symmetric": (compress.GPTQ, {**PLAIN, "grid": "symmetric"}),
    "gptq signed-scale": (compress.GPTQ, PLAIN),
    "+ act_order static": (compress.GPTQ, {**PLAIN, "act_order": "static"}),
    "+ act_order group": (compress.GPTQ, {**PLAIN, "act_order": "group"}),
    "+ drift 0.5": (compress.GPTQ, {**PLAIN, "drift": 0.5}),
    "+ drift": (compress.GPTQ, {**PLAIN, "drift": 1.0}),
    "+ drift, damp 0.05": (compress.GPTQ, {**PLAIN, "drift": 1.0, "damp": 0.05}),
    "+ drift, clip": (compress.GPTQ, {**PLAIN, "drift": 1.0, "clip": True}),
    "+ drift, polish": (compress.GPTQ, {**PLAIN, "drift": 1.0, **POLISH}),
    "+ drift, clip, polish": (compress.GPTQ, {**PLAIN, "drift": 1.0, "clip": True, **POLISH}),
    "+ drift 0.5, clip, polish": (compress.GPTQ, {**PLAIN, "drift": 0.5, "clip": True, **POLISH}),
    "+ drift, clip, polish, group": (
        compress.GPTQ,
        {**PLAIN, "drift": 1.0, "clip": True, **POLISH, "act_order": "group"},
    ),
    "+ drift, clip, polish, shrink": (compress.GPTQ, FULL),
    "asymmetric plain": (compress.GPTQ, {**PLAIN, "grid": "asymmetric"}),
    "asymmetric + drift": (compress.GPTQ, {**PLAIN, "drift": 1.0, "grid": "asymmetric"}),
    "asymmetric + drift, clip, polish": (
        compress.GPTQ,
        {**PLAIN, "drift": 1.0, "clip": True, **POLISH, "grid": "asymmetric"},
    ),
    "asymmetric + drift, clip, polish, shrink": (compress.GPTQ, {**FULL, "grid": "asymmetric"}),
    "gptq, outliers 1%": (compress.GPTQ, {**FULL, "outliers": 0.01}),
    "spqr as published": (compress.SpQR, PUBLISHED),
    "spqr, outliers of least cost": (compress.SpQR, SHARED),
    "+ damp 0.01": (compress.SpQR, {**SHARED, "damp": 0.01}),
    "+ damp 0.01, search": (compress.SpQR, {**SHARED, "damp": 0.01, "search": True}),
    "+ damp 0.01, search, group": (compress.SpQR, SEARCHED),
    "+ ... drift, shrink": (compress.SpQR, {**SEARCHED, "drift": 1.0, "shrink": True}),
    "+ ... drift, shrink, sweeps": (compress.SpQR, {**SEARCHED, "drift": 1.0, "shrink": True, "sweeps": 2}),
    "spqr": (compress.SpQR, {"group_size": 16}),
    "spqr, no outliers": (compress.SpQR, {"group_size": 16, "outliers": 0.0}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--text", required=True)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--bits", type=int, nargs="+", default=[4, 3, 2])
    parser.add_argument("--calibration-samples", type=int, help="the first so many rows of the calibration tokens")
    parser.add_argument("--samples", type=int, help="evaluation windows at most")
    parser.add_argument("--only", nargs="+", help="names of rows; the others stay as the file has them")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    original = compress.load(arguments.model, torch.float32)
    # Text needs the tokenizer that only a path has: windows are made once, here.
    source = find_source(arguments.model)

    def tokenizer() -> Any:
        return load_tokenizer(source)

    is_tokens = arguments.calibration.endswith((".pt", ".npy"))
    calibration = load_tokens(
        arguments.calibration, tokenizer, original.config, what="calibration", samples=None if is_tokens else 128
    ).ids[: arguments.calibration_samples]
    held_out = load_tokens(arguments.text, tokenizer, original.config, what="held-out", samples=arguments.samples).ids
    before = {(row["bits"], row["variant"]): row for row in stored(arguments.json)} if arguments.json else {}
    rows = []
    for bits in arguments.bits:
        for name, (kind, options) in VARIANTS.items():
            if arguments.only and name not in arguments.only:
                rows += [before[bits, name]] if (bits, name) in before else []
                continue
            model = compress.load(arguments.model)
            made: Any = kind
            configured = made(**{"scheme": f"w{bits}a16", "group_size": arguments.group_size, **options})
            started = time.perf_counter()
            compress.quantize(model, configured, calibration=calibration if configured.needs() else None)
            seconds = time.perf_counter() - started
            found = compress.evaluate(model.float(), reference=original, text=held_out)
            rows.append({"bits": bits, "variant": name, "seconds": round(seconds, 2), **flat(found)})
            print(
                f"W{bits} {name:34} ppl {found.perplexity:8.4f}  KL {found.kl_mean:.5f}  {seconds:6.1f} s", flush=True
            )
    record = {
        "model": Path(arguments.model).name,
        "group_size": arguments.group_size,
        "calibration": f"{Path(arguments.calibration).name} {list(calibration.shape)}",
        "text": f"{Path(arguments.text).name} {list(held_out.shape)}",
        **made_by(),
        "rows": rows,
    }
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
