"""llama.cpp's types by llama.cpp's own quantizers, and by ours: KL to the original at equal bytes.

    python recipes/studies/engines/k_quants.py MODEL --calibration TEXT --text TEXT --json OUT.json [--ggml LIBRARY]
        [--schemes q4_k_m q4_0 ...] [--ways llama imatrix rtn gptq for] [--samples N] [--calibration-length N]
        [--windows N] [--length N]

    llama      `quantize_q4_K` and the like of ggml, called in LIBRARY: a shared library that exports them, as the
               extension module of the package xllamacpp does. gguf-py reads what they write.
    imatrix    the same, with the mean square of each layer's inputs over the calibration text, as llama-imatrix has it
    rtn, gptq  `compress quantize --method rtn` or `gptq` of the same scheme
    for        the passes of `compress quantize --for llama.cpp`, of its scheme alone, and of the embedding

Every way gives every layer the same type (`passes.options.k_mixes`, llama.cpp's rule; where super-blocks do not fit,
llama.cpp's own fallback), so all have the same bytes. Embedding and head stay as they are, but for `for`. All models
are evaluated as dense weights in float32, by one evaluator. Where there is an imatrix, llama-quantize gives down_proj
of the first eighth of the blocks Q4_1 in the place of Q4_0; here it has Q4_0 in every way. q5_k of sizes that are no
multiple of 256 is left out: ours is Q5_0, llama.cpp's Q5_1.
"""

import argparse
import copy
import ctypes
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import compress
from compress.cli.commands.quantize import passes_asked
from compress.data.text import load_tokens
from compress.engine.plan.candidate_layers import treatable
from compress.kernels.layouts.k_quants import BLOCK, K_QUANTS
from compress.passes.k_quants import FALLBACKS
from compress.passes.options.k_mixes import blocks_of_names, type_in
from compress.passes.protocol.recipe import make_pass
from compress.recipes.studies.figures import OF_A_ROW, flat, keep_evaluated

SCHEMES = ("q4_0", "q4_k", "q4_k_m", "q3_k_m", "q2_k", "q6_k", "iq4_xs")
WAYS = ("llama", "imatrix", "rtn", "gptq")
OF_LLAMA_CPP = WAYS[:2]
# llama.cpp's names of the schemes that stand in where super-blocks do not fit.
FALLBACK_TYPES = {"w4a16": "q4_0", "w5a16": "q5_0", "w8a16": "q8_0", "iq4_nl": "iq4_nl"}


def types_of_layers(model: nn.Module, scheme: str) -> dict[str, str]:
    """{layer: type in GGUF} of the layers that a scheme treats."""
    layers = [layer for inside in treatable(model).layers.values() for layer in inside]
    if scheme == "q4_0":
        return {layer.name: scheme for layer in layers}
    blocks = 0 if scheme in K_QUANTS else blocks_of_names(scheme, [layer.name for layer in layers])
    types = {layer.name: type_in(scheme, layer.name, blocks) for layer in layers}
    fits = {layer.name: layer.shape[1] % BLOCK == 0 for layer in layers}
    return {name: kind if fits[name] else FALLBACK_TYPES[FALLBACKS[kind]] for name, kind in types.items()}


def kind_of(name: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[name.upper()]


def quantized_by(library: ctypes.CDLL, weight_NK: Tensor, kind: str, importance_K: Tensor | None) -> Tensor:
    """The values of a weight in a type, as ggml's own function quantizes it."""
    size, held = gguf.GGML_QUANT_SIZES[kind_of(kind)]
    rows, columns = weight_NK.shape
    source = np.ascontiguousarray(weight_NK.numpy(), dtype=np.float32)
    target = np.zeros((rows, columns // size * held), dtype=np.uint8)
    importance = None if importance_K is None else np.ascontiguousarray(importance_K.numpy(), dtype=np.float32)
    # `quantize_q4_K(source, target, rows, columns, importance or null)`
    call = getattr(library, f"quantize_{kind[:-1] + kind[-1].upper() if kind.endswith('k') else kind}")
    call.restype = ctypes.c_size_t
    pointers = [None if a is None else a.ctypes.data_as(ctypes.c_void_p) for a in (source, target, importance)]
    done = call(pointers[0], pointers[1], ctypes.c_int64(rows), ctypes.c_int64(columns), pointers[2])
    assert done == target.nbytes, (done, target.nbytes)
    return torch.from_numpy(gguf.dequantize(target, kind_of(kind)).copy())


def mean_squares(model: nn.Module, names: list[str], ids: Tensor) -> dict[str, Tensor]:
    """{layer: mean of the square of each input [K]} over token ids [samples, length]."""
    sums: dict[str, Tensor] = {}
    count = 0

    def seen(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, given: tuple[Tensor, ...]) -> None:
            squares = given[0].flatten(0, -2).double().square().sum(0)
            sums[name] = sums.get(name, torch.zeros_like(squares)) + squares

        return hook

    handles = [model.get_submodule(name).register_forward_pre_hook(seen(name)) for name in names]
    with torch.no_grad():
        for row in ids.split(1):
            model(row)
            count += row.numel()
    for handle in handles:
        handle.remove()
    return {name: total.float() / count for name, total in sums.items()}  # as llama-quantize divides them


def made(
    model: nn.Module, scheme: str, way: str, ids: Tensor, ggml: ctypes.CDLL | None, importance: Mapping[str, Tensor]
) -> nn.Module:
    """A copy of the model with the values that one way gives its layers."""
    if way in OF_LLAMA_CPP:
        assert ggml is not None
        found = copy.deepcopy(model)
        for name, kind in types_of_layers(model, scheme).items():
            weight = found.get_parameter(f"{name}.weight")
            weight.data = quantized_by(ggml, weight.data, kind, importance[name] if way == "imatrix" else None)
        return found
    if way == "for":
        one, _ = passes_asked("gptq", None, None, None, "llama.cpp", {}, None, None)
    elif scheme == "q4_0":
        one = (make_pass(way, {"scheme": "w4a16", "group_size": 32, "clip": True, "scales": "float16"}),)
    else:
        one = (make_pass(way, {"scheme": scheme}),)
    result = compress.quantize(copy.deepcopy(model), one, calibration=ids).model
    assert result is not None
    return result


def bits_of(model: nn.Module, types: Mapping[str, str]) -> float:
    """Bits per weight of the layers."""
    weights = {name: model.get_parameter(f"{name}.weight").numel() for name in types}
    held = {name: gguf.GGML_QUANT_SIZES[kind_of(kind)] for name, kind in types.items()}
    return sum(8 * held[n][1] / held[n][0] * count for n, count in weights.items()) / sum(weights.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--calibration", required=True, help="a .pt file of token ids [samples, length], or a text")
    parser.add_argument("--text", required=True)
    parser.add_argument(
        "--ggml", help="for llama and imatrix: a shared library that exports quantize_q4_K and the like"
    )
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--samples", type=int, help="of the calibration")
    parser.add_argument("--calibration-length", type=int, help="tokens of a window of it, where it is a text")
    parser.add_argument("--windows", type=int, help="of the text")
    parser.add_argument("--length", type=int, help="tokens of a window")
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    limits = {"samples": arguments.samples, "length": arguments.calibration_length}
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    ids = load_tokens(arguments.calibration, tokenizer, model.config, what="calibration", **limits).ids
    theirs = {*OF_LLAMA_CPP} & {*arguments.ways}
    if theirs and arguments.ggml is None:
        parser.error(f"{', '.join(theirs)} need --ggml")
    ggml = ctypes.CDLL(arguments.ggml) if theirs else None
    importance = mean_squares(model, list(types_of_layers(model, "q4_0")), ids) if theirs else {}
    rows: list[dict[str, Any]] = []
    for scheme in arguments.schemes:
        types = types_of_layers(model, scheme)
        for way in arguments.ways:
            begun = perf_counter()
            ours = made(model, scheme, way, ids, ggml, importance)
            took = perf_counter() - begun
            limits = {"samples": arguments.windows, "length": arguments.length}
            found = flat(compress.evaluate(ours, reference=arguments.model, text=arguments.text, **limits))
            row = {"scheme": scheme, "way": way, "bits_per_weight": bits_of(model, types), "seconds": round(took, 1)}
            kinds = {kind: list(types.values()).count(kind) for kind in sorted(set(types.values()))}
            rows.append({**row, "types": kinds, **{key: found[key] for key in OF_A_ROW}})
            print(
                f"| {scheme} | {way} | {row['bits_per_weight']:.2f} | {found['perplexity']:.3f} | "
                f"{found['kl_mean']:.5f} ± {found['standard_errors']['kl_mean']:.5f} | {found['same_top']:.2%} |",
                flush=True,
            )
            more = {"calibration_tokens": ids.numel(), "gguf": metadata.version("gguf")}
            more |= {"ggml": Path(arguments.ggml).name} if theirs else {}
            keep_evaluated(arguments.json, __file__, arguments.model, found, rows, **more)


if __name__ == "__main__":
    main()
