"""Small floats in groups beside integers of the same bytes: KL to the original by rounding to nearest and by GPTQ.

    python recipes/studies/quality/small_floats.py MODEL --calibration TEXT --text TEXT --json OUT.json
        [--schemes mxfp4a16 w4a16:64 ...] [--ways rtn gptq ...] [--samples N] [--calibration-length N] [--windows N]
        [--length N] [--dtype bfloat16]

    rtn            `compress quantize --method rtn`: the whole range of each group
    rtn, clip      the range of least squared error
    gptq           the default: ranges of least error weighted by diag(H), drift correction, refit, descent
    gptq, NAME     without one of these: no clip, no drift, no polish (refit and descent), plain (none of the three)
    smoothquant    smoothquant, rounded to nearest; smoothquant, gptq: its folds alone, then gptq
    trellis        trellis codes of as many bits as the scheme has
    rotate, ...    behind a rotation of hidden state and heads; rotate 32, ...: of 32 channels at a time
    rotate online, ...     the inputs of down_proj are rotated, too, as the model runs
    ..., searched inputs   asymmetric inputs by the range of least squared error, searched for every token

w4a16:64 are integers of 4 bits in groups of 64. nvfp4, mxfp4 and w4a4:64 round the inputs of a layer, too. Embedding
and head stay as they are. All models are evaluated as dense weights in float32.
"""

import argparse
import copy
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import compress
from compress.data.text import load_tokens
from compress.passes.protocol.base import Pass
from compress.recipes.studies.figures import OF_A_ROW, flat, keep_evaluated
from compress.weights.number_formats import SCHEMES as FORMATS

# By falling bytes; integers beside the floats that have as many.
SCHEMES = ("mxfp8a16", "w8a16:64", "mxfp6a16", "w6a16:64", "nvfp4a16", "w4a16:32", "mxfp4a16", "nf4a16", "w4a16:64")
WITHOUT: dict[str, dict[str, Any]] = {
    "gptq": {},
    "gptq, no clip": {"clip": False},
    "gptq, no drift": {"drift": 0.0},
    "gptq, no polish": {"refit": 0, "sweeps": 0},
    "gptq, plain": {"clip": False, "drift": 0.0, "refit": 0, "sweeps": 0},
}
ROUNDED: dict[str, dict[str, Any]] = {
    "rtn": {},
    "rtn, clip": {"clip": True},
}
FOLDED = ("smoothquant", "smoothquant, gptq")
WAYS = ("rtn", "rtn, clip", "gptq")
TRELLIS = "trellis"
TURNED: dict[str, dict[str, Any]] = {"rotate, ": {}, **{f"rotate {n}, ": {"block": n} for n in (16, 32, 64, 128)}}
TURNED["rotate online, "] = {"online": True}
SEARCHED = ", searched inputs"
BEHIND = [start + way for start in TURNED for way in ("rtn", "gptq", *FOLDED, TRELLIS)]
KNOWN = [*ROUNDED, *WITHOUT, *FOLDED, TRELLIS, *BEHIND]
SCALE_BITS = {"e8m0": 8, "e4m3": 8, "stored": 16}


def made(scheme: str, way: str) -> list[Pass]:
    if way.endswith(SEARCHED):
        *before, last = made(scheme, way.removesuffix(SEARCHED))
        searched: dict[str, Any] = {"activation_grid": "asymmetric", "input_range": "mse"}
        return [*before, replace(last, **searched)]
    for start, how in TURNED.items():
        if way.startswith(start):
            return [compress.Rotation(**how), *made(scheme, way.removeprefix(start))]
    name, _, size = scheme.partition(":")
    if way == TRELLIS:
        return [compress.Trellis(scheme=name)]
    options: dict[str, Any] = {"scheme": name, **({"group_size": int(size)} if size else {})}
    if way == "smoothquant":
        return [compress.SmoothQuant(**options)]
    if way in FOLDED:
        return [compress.SmoothQuant(**options, rounding="none"), compress.GPTQ(**options)]
    if way in WITHOUT:
        return [compress.GPTQ(**options, **WITHOUT[way])]
    return [compress.RTN(**options, **ROUNDED[way])]


def bits_of(scheme: str) -> float:
    """Bits of a weight, scales of 16 bits or of their own kind included."""
    name, _, size = scheme.partition(":")
    numbers = FORMATS[name]
    if numbers.group_size is None:
        return int(name[1]) + SCALE_BITS["stored"] / int(size)
    return numbers.bits + SCALE_BITS[numbers.scales] / numbers.group_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--calibration", required=True, help="a .pt file of token ids [samples, length], or a text")
    parser.add_argument("--text", required=True)
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=[*KNOWN, *(way + SEARCHED for way in KNOWN)])
    parser.add_argument("--samples", type=int, help="of the calibration")
    parser.add_argument("--calibration-length", type=int, help="tokens of a window of it, where it is a text")
    parser.add_argument("--windows", type=int, help="of the text")
    parser.add_argument("--length", type=int, help="tokens of a window")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16"),
        help="of the model that is compressed; evaluations are in float32",
    )
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype)).eval()
    limits = {"samples": arguments.samples, "length": arguments.calibration_length}
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    ids = load_tokens(arguments.calibration, tokenizer, model.config, what="calibration", **limits).ids
    rows: list[dict[str, Any]] = []
    for scheme in arguments.schemes:
        for way in arguments.ways:
            begun = perf_counter()
            ours = compress.quantize(copy.deepcopy(model), made(scheme, way), calibration=ids).model
            assert ours is not None
            took = perf_counter() - begun
            limits = {"samples": arguments.windows, "length": arguments.length}
            found = flat(compress.evaluate(ours, reference=arguments.model, text=arguments.text, **limits))
            planned = compress.plan(model, made(scheme, way)[-1]).bits_per_weight if TRELLIS in way else None
            bits = bits_of(scheme) if planned is None else planned
            row = {"scheme": scheme, "way": way, "bits_per_weight": bits, "seconds": round(took, 1)}
            rows.append({**row, **{key: found[key] for key in OF_A_ROW}})
            print(
                f"| {scheme} | {way} | {row['bits_per_weight']:.2f} | {found['perplexity']:.3f} | "
                f"{found['kl_mean']:.5f} ± {found['standard_errors']['kl_mean']:.5f} | {took:.0f} s |",
                flush=True,
            )
            more = {"calibration_tokens": ids.numel(), "dtype": arguments.dtype}
            keep_evaluated(arguments.json, __file__, arguments.model, found, rows, **more)


if __name__ == "__main__":
    main()
