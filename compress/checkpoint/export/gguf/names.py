"""The tensors of a GGUF file: their names, types and shapes, and where each comes from.

gguf-py maps names of transformers to those of llama.cpp. What is decided here: which block or float each tensor takes,
and in which order its rows are written.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.export.dense import dense_names
from compress.checkpoint.export.gguf.architectures import Architecture, rope_factors, rotated_rows
from compress.checkpoint.export.gguf.block_types import Blocks, blocks_of
from compress.checkpoint.export.gguf.file import FLOATS, Entry
from compress.checkpoint.read.compressed_layers import stored_in, weight_of
from compress.checkpoint.read.pretrained import read_config
from compress.checkpoint.read.source import Source
from compress.checkpoint.read.unplaced_tensors import beside
from compress.checkpoint.read.weight_files import DTYPES
from compress.weights.formats.codes import Codes
from compress.weights.formats.levels import GLOBAL, without_global
from compress.weights.terms import StoredTerm

SUFFIXES = (".weight", ".bias")
HEAD, FACTORS = "lm_head.weight", "rope_freqs.weight"
# llama.cpp multiplies the product of a layer by this tensor: 1 / the global scale of NVFP4.
FACTOR = ".scale"


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the file. name: its name there. tensor: its name in the plain checkpoint. layer: the compressed layer
    whose weight it is; None for a tensor of floats. rows: the row of the checkpoint that is each row of the file; None
    for the same order. shift: what is added to its values. made: values that the checkpoint lacks."""

    name: str
    tensor: str
    layer: str | None = None
    rows: Tensor | None = None
    shift: float = 0.0
    made: Tensor | None = None

    def values(self, source: Source) -> Tensor:
        """The values as the file is to hold them: of a layer those that its codes stand for, in their stored dtype; of
        others float32 where they have one dimension. Values of NVFP4 are those before the global scale divides them."""
        if self.made is not None:
            return self.made
        if self.layer is not None:
            (term,) = weight_of(source, self.layer).terms
            found = (without_global(term) if isinstance(term, Codes) else term).dequantize()
        else:
            found = source.weights.tensor(self.tensor)
            found = found.to(torch.float32) if found.ndim == 1 else found
        found = found + self.shift if self.shift else found
        return found if self.rows is None else found[self.rows]

    def blocks(self, source: Source) -> Blocks:
        """The blocks of a compressed layer, their rows in the order of the file."""
        assert self.layer is not None
        (term,) = weight_of(source, self.layer).terms
        assert isinstance(term, StoredTerm)
        held = blocks_of(term)
        rows = self.rows
        return held if rows is None else Blocks(held.type, held.row, lambda: held.pack()[rows])


def unnamed(source: Source, names: Any) -> list[str]:
    """Tensors of a checkpoint that have no name in the file. names: gguf-py's map."""
    return [name for name, _ in _kept(source) if names.get_name(name, SUFFIXES) is None]


def planned(source: Source, family: Architecture, names: Any) -> Iterator[FileTensor]:
    """The tensors of the file, in the order of the checkpoint."""
    config = read_config(source)
    heads = {
        "q_proj": config.num_attention_heads,
        "k_proj": config.num_key_value_heads or config.num_attention_heads,
    }
    for tensor, layer in _kept(source):
        name = names.get_name(tensor, SUFFIXES)
        module = tensor.rpartition(".")[0].rpartition(".")[2]
        count = heads.get(module) if family.rotated else None
        shape = source.headers[tensor][0] if layer is None else stored_in(source).layers[layer].shape
        rows = None if count is None else rotated_rows(shape[0], count)
        shift = 1.0 if family.shifted and tensor.endswith("norm.weight") else 0.0
        yield FileTensor(name, tensor, layer, rows, shift)
        if layer is not None:
            yield from factors_of(source, layer, name)
    if (factors := rope_factors(config)) is not None:
        yield FileTensor(FACTORS, FACTORS, made=factors)


def factors_of(source: Source, layer: str, name: str) -> Iterator[FileTensor]:
    """The tensor with the factor of a layer's weight, of that name in the file, where it has a global scale."""
    held = stored_in(source).layers[layer].parts.get(GLOBAL)
    if held is not None:
        factor = 1 / source.weights.tensor(held).reshape(1)
        yield FileTensor(name.removesuffix(".weight") + FACTOR, held, made=factor)


def _kept(source: Source) -> Iterator[tuple[str, str | None]]:
    """(Tensor, compressed layer or None) of the plain checkpoint, without a head that is the embedding, and without
    what the model has no place for."""
    without = {*beside(source), *([HEAD] if read_config(source).tie_word_embeddings else [])}
    return ((name, layer) for name, layer in dense_names(source) if name not in without)


def floats_why_not(source: Source) -> str | None:
    """The reason why a tensor of floats cannot be written, the end of a sentence about the model."""
    for name, layer in _kept(source):
        if layer is None and DTYPES.get(source.headers[name][1]) not in FLOATS:
            return f"{name} has the dtype {source.headers[name][1]}; written: float32, float16, bfloat16"
    return None


def entry_of(tensor: FileTensor, source: Source) -> Entry:
    """A tensor as it is written: a layer in blocks, others as numbers."""
    if tensor.layer is not None:
        blocks = tensor.blocks(source)
        rows = stored_in(source).layers[tensor.layer].shape[0]
        shape, pack = (rows, blocks.row), partial(_packed, tensor, source)
        return Entry(
            tensor.name, blocks.type, shape, rows * blocks.row, tensor.layer, pack, partial(tensor.values, source)
        )
    values = tensor.values(source)
    made = partial(tensor.values, source)
    return Entry(tensor.name, FLOATS[values.dtype], tuple(values.shape), values.nbytes, tensor.tensor, made, made)


def _packed(tensor: FileTensor, source: Source) -> Tensor:
    return tensor.blocks(source).pack()
