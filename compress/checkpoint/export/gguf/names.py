"""The tensors of a GGUF file: their names, types and shapes, and where each comes from.

Places are those of `checkpoint.gguf.tensor_names`. What is decided here: which block or float each tensor takes.
Matrices of all experts become one tensor (`ffn_down_exps`, [E, N, K]).
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compress.base.errors import InputError
from compress.checkpoint.export.dense import dense_names
from compress.checkpoint.export.gguf.block_types import Blocks, blocks_of
from compress.checkpoint.export.gguf.file import FLOATS, Entry
from compress.checkpoint.gguf.architectures import Architecture, rope_factors
from compress.checkpoint.gguf.tensor_names import HEAD, WIDE, file_name, place_of
from compress.checkpoint.read.compressed_layers import stored_in, weight_of
from compress.checkpoint.read.pretrained import empty_model, read_config
from compress.checkpoint.read.source import Source
from compress.checkpoint.read.unplaced_tensors import beside
from compress.checkpoint.read.weight_files import DTYPES
from compress.model.layers import transposed_weights
from compress.weights.formats.codes import Codes
from compress.weights.formats.levels import GLOBAL, without_global
from compress.weights.terms import StoredTerm

FUSED = re.compile(r"\.experts\.(gate_up|down)_proj(_\w+)?$")  # of all experts, which quantizing takes apart
# llama.cpp multiplies the product of a layer by this tensor: 1 / the global scale of NVFP4.
FACTOR = ".scale"


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the file. name: its name there. tensor: its name in the plain checkpoint. layer: the compressed layer
    whose weight it is; None for a tensor of floats. rows: the row of the checkpoint that is each row of the file; None
    for the same order. shift: what is added to its values. transposed: the plain checkpoint has it as [K, N]. expert:
    the number of the expert that it is a part of. made: values that the checkpoint lacks."""

    name: str
    tensor: str
    layer: str | None = None
    rows: Tensor | None = None
    shift: float = 0.0
    transposed: bool = False
    expert: int | None = None
    made: Tensor | None = None

    def values(self, source: Source) -> Tensor:
        """The values as the file is to hold them: of a layer those that its codes stand for, in their stored dtype; of
        others float32 where they have one dimension or llama.cpp asks for it (`WIDE`). Values of NVFP4 are those before
        the global scale divides them."""
        if self.made is not None:
            return self.made
        if self.layer is not None:
            (term,) = weight_of(source, self.layer).terms
            held = (without_global(term) if isinstance(term, Codes) else term).dequantize()
        else:
            held = source.weights.tensor(self.tensor)
            held = held.t().contiguous() if self.transposed else held
            held = held.to(torch.float32) if held.ndim == 1 or self.name.endswith(WIDE) else held
        held = held + self.shift if self.shift else held
        return held if self.rows is None else held[self.rows]

    def blocks(self, source: Source) -> Blocks:
        """The blocks of a compressed layer, their rows in the order of the file."""
        assert self.layer is not None
        (term,) = weight_of(source, self.layer).terms
        assert isinstance(term, StoredTerm)
        held = blocks_of(term)
        rows = self.rows
        return held if rows is None else Blocks(held.type, held.row, lambda: held.pack()[rows])


def unnamed(source: Source, names: Any) -> list[str]:
    """Tensors that have no name in the file once the model is quantized. names: gguf-py's map."""
    return [name for name, _ in _kept(source) if not FUSED.search(name) and file_name(name, names) is None]


def fused(source: Source) -> list[str]:
    """Tensors of all experts of a block, which no tensor of the file is."""
    return [name for name, _ in _kept(source) if FUSED.search(name)]


def planned(source: Source, family: Architecture, names: Any) -> Iterator[FileTensor]:
    """The tensors of the file, in the order of the checkpoint."""
    config = read_config(source)
    transposed = transposed_weights(empty_model(source))
    for tensor, layer in _kept(source):
        place = place_of(tensor, family, config, names)
        assert place is not None
        shape = source.headers[tensor][0] if layer is None else stored_in(source).layers[layer].shape
        turned = layer is None and tensor in transposed
        yield FileTensor(place.name, tensor, layer, place.rows(shape[0]), place.shift, turned, place.expert)
        if layer is not None:
            yield from factors_of(source, layer, place.name)
    for name, factors in rope_factors(config).items():
        yield FileTensor(name, name, made=factors)


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
    reader = partial(tensor.values, source)
    if tensor.layer is not None:
        blocks = tensor.blocks(source)
        shape = (stored_in(source).layers[tensor.layer].shape[0], blocks.row)
        pack = lambda: tensor.blocks(source).pack()  # noqa: E731 - read again then, not kept
        return Entry(tensor.name, blocks.type, shape, shape[0] * shape[1], tensor.layer, pack, reader)
    values = reader()
    return Entry(tensor.name, FLOATS[values.dtype], tuple(values.shape), values.nbytes, tensor.tensor, reader, reader)


def entries_of(tensors: Iterable[FileTensor], source: Source) -> list[Entry]:
    """Tensors as they are written, those of all experts in one. Raises InputError for experts that do not go into one
    tensor."""
    held: dict[str, list[FileTensor]] = {}
    for tensor in tensors:
        held.setdefault(tensor.name, []).append(tensor)
    return [
        entry_of(parts[0], source) if parts[0].expert is None else stack_of(name, parts, source)
        for name, parts in held.items()
    ]


def stack_of(name: str, experts: Sequence[FileTensor], source: Source) -> Entry:
    """The tensor of all experts. Raises InputError where these are not of one type, or have scales of their own."""
    ordered = sorted(experts, key=lambda each: each.expert or 0)
    dense = [str(each.expert) for each in ordered if each.layer is None]
    if dense and len(dense) < len(ordered):
        raise InputError(f"{name} holds all experts, and number {dense[0]} is not compressed; compress all, or none")
    entries = [entry_of(each, source) for each in ordered]
    if len(kinds := sorted({entry.type for entry in entries})) > 1:
        raise InputError(
            f"{name} holds all experts, and these have blocks of {' and '.join(kinds)}; give them one scheme"
        )
    if any(list(factors_of(source, each.layer, name)) for each in ordered if each.layer is not None):
        raise InputError(f"{name} holds all experts, and each has a global scale of its own; use another scheme")
    return Entry(
        name,
        entries[0].type,
        (len(entries), *entries[0].shape),
        sum(entry.nbytes for entry in entries),
        entries[0].of,
        lambda: torch.stack([entry.data() for entry in entries]),
        lambda: torch.stack([entry.values() for entry in entries]),
    )
