"""Key-value caches in few bits beside weights of 8 bits: KL to the original, and the bytes that a token keeps.

    python recipes/studies/quality/caches.py MODEL --text TEXT --json OUT.json
        [--ways "int4" ...] [--windows N] [--length N]

    int8, fp8, int4, int3   the cache alone; everything else stays as it is
    ..., plain              keys are rounded as they are, without a rotation
    ..., values turned      values are rotated, too, in the weights of v_proj and o_proj (R2)
    weights int8            no cache: weights of 8 bits, rounded to nearest, a scale per output channel

Evaluated in float32, with scales fitted to each token.
"""

import argparse
import copy
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM

import compress
from compress.model.attention import head_sizes
from compress.passes.protocol.base import Pass
from compress.recipes.studies.figures import OF_A_ROW, flat, keep_evaluated
from compress.weights.kv_cache_codes import bytes_of_token

WEIGHTS = "weights int8"
PLAIN, TURNED = ", plain", ", values turned"
KNOWN = (
    WEIGHTS,
    "int8",
    "fp8",
    *(kind + more for kind in ("int4", "int3") for more in ("", PLAIN, TURNED)),
)


def made(way: str) -> list[Pass]:
    if way == WEIGHTS:
        return [compress.RTN(scheme="w8a16", group_size=-1)]
    kind = way.partition(",")[0]
    cache = compress.KVCache(type=cast(Any, kind), rotate=not way.endswith(PLAIN))
    return [compress.Rotation(hidden=False), cache] if way.endswith(TURNED) else [cache]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--ways", nargs="+", default=KNOWN, choices=KNOWN)
    parser.add_argument("--windows", type=int, help="of the text")
    parser.add_argument("--length", type=int, help="tokens of a window")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    size = max(head_sizes(model))
    heads = model.config.num_key_value_heads * model.config.num_hidden_layers
    rows: list[dict[str, Any]] = []
    for way in arguments.ways:
        passes = made(way)
        ours = compress.quantize(copy.deepcopy(model), passes).model
        assert ours is not None
        limits = {"samples": arguments.windows, "length": arguments.length}
        found = flat(compress.evaluate(ours, reference=arguments.model, text=arguments.text, **limits))
        scheme = passes[-1].cache_scheme
        kept = 2 * heads * (2 * size if scheme is None else bytes_of_token(scheme, size))
        row = {"way": way, "bytes_per_token": kept}
        rows.append({**row, **{key: found[key] for key in OF_A_ROW}})
        error = found["standard_errors"]["kl_mean"]
        print(f"| {way} | {kept:,} | {found['perplexity']:.4f} | {found['kl_mean']:.5f} ± {error:.5f} |", flush=True)
        keep_evaluated(arguments.json, __file__, arguments.model, found, rows)


if __name__ == "__main__":
    main()
