"""An importance matrix in the GGUF form that `llama-quantize --imatrix` reads (llama.cpp, common/imatrix-loader.cpp).

    NAME.in_sum2    float32 [K]    squares of the layer's inputs, summed over tokens
    NAME.counts     float32 [1]    number of tokens

NAME is llama.cpp's name of the layer's weight. in_sum2 / counts, by which llama-quantize weighs errors, is the diagonal
of the Hessian X^T X / T that our solvers have.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from compress.checkpoint.export.gguf.architectures import FAMILIES
from compress.checkpoint.export.gguf.library import gguf, missing
from compress.checkpoint.export.gguf.names import SUFFIXES
from compress.checkpoint.files import write_whole
from compress.checkpoint.read.pretrained import read_config
from compress.checkpoint.read.source import Source

KIND = "imatrix"  # of the file, its key general.type


def why_not(model: Source) -> str | None:
    """The reason why no file can be written for a model, a whole line; None where one can."""
    if (line := missing()) is not None:
        return line
    kind = (model.config.get("architectures") or ["none"])[0]
    if kind in FAMILIES:
        return None
    known = ", ".join(name.removesuffix("ForCausalLM") for name in FAMILIES)
    return f"{model.name} is a {kind}; an imatrix has llama.cpp's names, known here for {known}"


def names_of(model: Source, layers: Sequence[str]) -> dict[str, str]:
    """{layer: llama.cpp's name of its weight} of a model against which there is no reason."""
    family = FAMILIES[model.config["architectures"][0]]
    package = gguf()
    names = package.get_tensor_name_map(package.MODEL_ARCH[family.name.upper()], read_config(model).num_hidden_layers)
    return {layer: names.get_name(f"{layer}.weight", SUFFIXES) for layer in layers}


def write_imatrix(
    path: Path, squares: Mapping[str, tuple[Tensor, int]], texts: Sequence[str], samples: int, length: int
) -> None:
    """Write or replace a file in one step. squares: {llama.cpp's name: (sums of squares [K], tokens)}. texts: names of
    what was read, in so many windows of so many tokens."""
    package = gguf()
    keys = package.Keys.IMatrix

    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / path.name
        writer = package.GGUFWriter(made, arch="")
        writer.kv_data[0].pop(package.Keys.General.ARCHITECTURE, None)  # an imatrix has none
        writer.add_type(KIND)
        writer.add_array(keys.DATASETS, list(texts))
        writer.add_uint32(keys.CHUNK_COUNT, samples)
        writer.add_uint32(keys.CHUNK_SIZE, length)
        for name, (sums_K, tokens) in sorted(squares.items()):
            writer.add_tensor(f"{name}.in_sum2", sums_K.cpu().numpy().astype(np.float32)[None])
            writer.add_tensor(f"{name}.counts", np.full((1, 1), tokens, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        write_whole(path, made.read_bytes())


def holds_imatrix(path: Path) -> bool:
    """True for a file that holds an importance matrix in this form."""
    try:
        field = gguf().GGUFReader(path).fields.get(gguf().Keys.General.TYPE)
        return field is not None and field.contents() == KIND
    except Exception:  # noqa: BLE001 - gguf-py raises whatever a file leads it to
        return False
