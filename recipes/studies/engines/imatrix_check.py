"""Does ggml read the imatrix that `compress.imatrix` writes, and round by it as by one of its own making?

    python recipes/studies/engines/imatrix_check.py MODEL ... --calibration IDS.pt --ggml LIBRARY --json OUT.json

Per model: the file's values as ggml's own reader has them, in LIBRARY (a shared library that exports
`gguf_init_from_file` and the quantizers, as the extension module of the package xllamacpp does), beside mean squares
that hooks on the model sum (`k_quants.mean_squares`). Then each layer by ggml's quantizer of each type, with the one
and with the other: how many of its blocks of 32 differ.
"""

import argparse
import ctypes
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import compress
from compress.checkpoint.export.gguf.imatrix import names_of
from compress.checkpoint.files import write_json
from compress.checkpoint.read.source import find_source
from compress.data.documents import read_tokens
from compress.recipes.studies.engines.k_quants import mean_squares, quantized_by, types_of_layers
from compress.recipes.studies.figures import asked, made_by

SCHEMES = ("q4_0", "q4_k_m", "q3_k_m", "q2_k")
BLOCK = 32


class _ReaderOptions(ctypes.Structure):
    """`gguf_init_params` of gguf.h."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.POINTER(ctypes.c_void_p)))


def by_ggml(library: ctypes.CDLL, path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """{tensor: its numbers} of a GGUF file of float32, as ggml's reader has them."""
    context = ctypes.c_void_p()
    for name, given, returned in (
        ("gguf_init_from_file", [ctypes.c_char_p, _ReaderOptions], ctypes.c_void_p),
        ("ggml_get_first_tensor", [ctypes.c_void_p], ctypes.c_void_p),
        ("ggml_get_next_tensor", [ctypes.c_void_p, ctypes.c_void_p], ctypes.c_void_p),
        ("ggml_get_name", [ctypes.c_void_p], ctypes.c_char_p),
        ("ggml_nelements", [ctypes.c_void_p], ctypes.c_int64),
        ("ggml_get_data_f32", [ctypes.c_void_p], ctypes.POINTER(ctypes.c_float)),
    ):
        call = getattr(library, name)
        call.argtypes, call.restype = given, returned
    opened = library.gguf_init_from_file(str(path).encode(), _ReaderOptions(False, ctypes.pointer(context)))
    assert opened, f"ggml does not read {path}"
    found = {}
    tensor = library.ggml_get_first_tensor(context)
    while tensor:
        name = library.ggml_get_name(tensor).decode()
        if name:  # the file's data as a whole has none
            numbers = np.ctypeslib.as_array(library.ggml_get_data_f32(tensor), (library.ggml_nelements(tensor),))
            found[name] = numbers.copy()
        tensor = library.ggml_get_next_tensor(context, tensor)
    return found


def importance_of(library: ctypes.CDLL, path: Path) -> dict[str, Tensor]:
    """{llama.cpp's name: mean squares [K]} of an imatrix, divided as llama-quantize does it."""
    found = by_ggml(library, path)
    names = [name.removesuffix(".counts") for name in found if name.endswith(".counts")]
    return {name: torch.from_numpy(found[f"{name}.in_sum2"] / found[f"{name}.counts"]) for name in names}


def row_of(model: str, ids: Tensor, library: ctypes.CDLL) -> dict[str, Any]:
    """The figures of one model."""
    with tempfile.TemporaryDirectory() as folder:
        written = compress.imatrix(model, Path(folder) / "imatrix.gguf", ids)
        read = importance_of(library, written.output)
    loaded = AutoModelForCausalLM.from_pretrained(find_source(model).path, dtype=torch.float32).eval()
    layers = list(types_of_layers(loaded, "q4_0"))
    names = names_of(find_source(model), layers)
    seen = mean_squares(loaded, layers, ids)
    off = max(float((read[names[n]] / seen[n] - 1).abs().nan_to_num().max()) for n in layers)
    differ: dict[str, list[int]] = {}
    for scheme in SCHEMES:
        counts = [0, 0]
        for layer, kind in types_of_layers(loaded, scheme).items():
            weight = loaded.get_parameter(f"{layer}.weight").data
            one, other = (quantized_by(library, weight, kind, x) for x in (read[names[layer]], seen[layer]))
            counts[0] += int((one != other).unflatten(1, (-1, BLOCK)).any(-1).sum())
            counts[1] += one.numel() // BLOCK
        differ[scheme] = counts
    return {
        "model": Path(model).name,
        "layers": written.layers,
        "tokens": written.tokens,
        "missing": sorted(set(names.values()) ^ read.keys()),
        "largest_relative_difference": off,
        "blocks_that_differ": {scheme: {"differ": n, "of": total} for scheme, (n, total) in differ.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--calibration", nargs="+", required=True, help="files of token ids, one for each model")
    parser.add_argument("--samples", type=int, default=16, help="of each file")
    parser.add_argument("--ggml", required=True)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    library = ctypes.CDLL(arguments.ggml)
    rows = []
    for model, tokens in zip(arguments.models, arguments.calibration, strict=True):
        rows.append(row_of(model, read_tokens(tokens)[: arguments.samples], library))
        print(rows[-1], flush=True)
        write_json(arguments.json, {"command": asked(__file__), **made_by(), "rows": rows})


if __name__ == "__main__":
    main()
