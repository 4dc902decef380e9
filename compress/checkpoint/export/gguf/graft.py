"""Writes codes into a GGUF file that another program made of the same model: a family without a path of our own.

    compress export OUT --to dense --output DENSE
    python convert_hf_to_gguf.py DENSE --outtype bf16 --outfile TEMPLATE.gguf       # llama.cpp's own converter
    compress export OUT --to gguf --template TEMPLATE.gguf --output DIR

The template gives names, metadata, tokenizer and every tensor that is not compressed. A layer's tensor is the one that
holds the rows which its codes stand for, in whatever order: the same order is given to its blocks. Of a tensor of all
experts (`ffn_down_exps`, [E, N, K]) every matrix is one of a layer. A template of the original model holds other rows,
and is refused: passes also change weights that they do not compress.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.base.errors import CheckpointError, InputError, first_line
from compress.base.regular_files import special
from compress.checkpoint.export.gguf.file import Entry, add_all
from compress.checkpoint.export.gguf.names import FileTensor, entry_of, factors_of, stack_of
from compress.checkpoint.read.compressed_layers import stored_in, weight_of
from compress.checkpoint.read.gguf import FLOATS, GGUFFiles
from compress.checkpoint.read.pretrained import read_config
from compress.checkpoint.read.source import Source

HOW = (
    "make it from the dense weights: `compress export OUT --to dense --output DENSE`, then llama.cpp's "
    "convert_hf_to_gguf.py DENSE --outtype bf16 (or f16, f32)"
)
OF_HEADER = "GGUF."
MATRIX, STACK = 2, 3  # dimensions
# Keys that say how the file itself is made.
REPLACED = ("general.architecture", "general.file_type", "general.quantization_version", "general.alignment")


class Slot(NamedTuple):
    """A matrix of a template: a tensor, or the one of an expert in it."""

    name: str
    expert: int | None = None


class Template:
    """A GGUF file, read. Raises InputError for one that cannot be read."""

    def __init__(self, path: Path) -> None:
        kind = special(path)
        if kind is not None or not path.is_file():
            raise InputError(f"template {str(path)!r} is {kind or 'no file'}; {HOW}")
        try:
            self.files = GGUFFiles(path)
            self.family: str = self.files.metadata["general.architecture"]
        except (CheckpointError, KeyError) as error:
            raise InputError(f"template {str(path)!r} cannot be used ({first_line(error)}); {HOW}") from None

    def fill(self, writer: Any, own: Mapping[str, Any]) -> None:
        """Add the template's metadata to a file, and keys of our own in the place of some."""
        add_all(writer, own)
        for key, kinds in self.files.types.items():
            if not key.startswith(OF_HEADER) and key not in REPLACED and key not in own:
                writer.add_key_value(key, self.files.metadata[key], kinds[0], kinds[-1] if len(kinds) > 1 else None)

    def values(self, name: str, expert: int | None = None) -> Tensor:
        """The numbers of a tensor, or of an expert's matrix in it, float32."""
        return self.files.dequantized(name) if expert is None else self.files.tensor(name)[expert].float()

    def slots(self, name: str) -> list[Slot]:
        """The matrices of a tensor that holds floats; none of another."""
        shape, kind = self.files.headers[name]
        if kind not in FLOATS or len(shape) not in (MATRIX, STACK):
            return []
        return [Slot(name)] if len(shape) == MATRIX else [Slot(name, i) for i in range(shape[0])]

    def copied(self, name: str) -> Entry:
        """A tensor as it lies in the template."""
        held, kind = self.files.tensor(name), self.files.kinds[name]
        return Entry(name, kind, tuple(held.shape), held.nbytes, name, held.clone, lambda: self.values(name))


def _rows(values: Tensor) -> list[bytes]:
    return [row.tobytes() for row in values.contiguous().view(torch.uint8).numpy()]


def _candidates(template: Template) -> dict[tuple[str, int], list[Slot]]:
    """{(type, hash of a first row): matrices of the template}, for finding a layer's. A row is among those of a matrix
    wherever it lies."""
    candidates: dict[tuple[str, int], list[Slot]] = {}
    for name, kind in template.files.kinds.items():
        for slot in template.slots(name):
            for row in set(_rows(template.values(*slot).to(FLOATS[kind]))):
                candidates.setdefault((kind, hash(row)), []).append(slot)
    return candidates


def matched(source: Source, template: Template) -> dict[Slot, tuple[str, Tensor]]:
    """{matrix of the template: (layer, the row of it that is each row of the matrix)}. Raises InputError, which names
    the first layer that has none."""
    candidates = _candidates(template)
    matches: dict[Slot, tuple[str, Tensor]] = {}
    dtype = read_config(source).dtype  # of the dense export
    for layer, stored in stored_in(source).layers.items():
        if stored.shares is not None:
            continue
        values = weight_of(source, layer, dtype).dequantize(dtype)
        pairs = ((slot, _order(values, template, slot)) for slot in _of(values, candidates) if slot not in matches)
        match = next(((slot, order) for slot, order in pairs if order is not None), None)
        if match is None:
            raise InputError(
                f"the template has no tensor of the rows of {layer} that {source.name} stores; {HOW}. (Layers of which "
                "the converter joins the rows with those of others, or reorders inputs, cannot be exported so.)"
            )
        matches[match[0]] = (layer, match[1])
    return matches


def _of(values: Tensor, candidates: Mapping[tuple[str, int], list[Slot]]) -> Iterator[Slot]:
    """The matrices of the template that have the first row of a layer."""
    for kind, dtype in FLOATS.items():
        (row,) = _rows(values[:1].to(dtype))
        yield from candidates.get((kind, hash(row)), ())


def _order(values: Tensor, template: Template, slot: Slot) -> Tensor | None:
    """The row of a layer that is each row of a template's matrix; None where they do not hold the same rows."""
    shape, kind = template.files.headers[slot.name]
    if shape[-MATRIX:] != tuple(values.shape):
        return None
    dtype = FLOATS[kind]
    places: dict[bytes, list[int]] = {}
    for place, row in enumerate(_rows(values.to(dtype))):
        places.setdefault(row, []).append(place)
    order = []
    for row in _rows(template.values(*slot).to(dtype)):
        if not places.get(row):
            return None
        order.append(places[row].pop(0))
    return torch.tensor(order)


def entries_of(source: Source, template: Template) -> list[Entry]:
    """The tensors of the file, in the order of the template: the layers' in blocks, others as they are. Last, factors
    of layers with a global scale. Raises InputError for experts that do not go into one tensor."""
    layers = matched(source, template)
    names = {slot.name for slot in layers}
    entries = [
        _grafted(source, name, template, layers) if name in names else template.copied(name) for name in template.files
    ]
    factors = (factor for slot, (layer, _) in layers.items() for factor in factors_of(source, layer, slot.name))
    return [*entries, *(entry_of(factor, source) for factor in factors)]


def _grafted(source: Source, name: str, template: Template, layers: Mapping[Slot, tuple[str, Tensor]]) -> Entry:
    """A tensor of the template in blocks."""
    slots = template.slots(name)
    if lost := [slot.expert for slot in slots if slot not in layers]:
        raise InputError(f"{name} holds all experts, and number {lost[0]} is not compressed; compress all, or none")
    found = ((slot.expert, *layers[slot]) for slot in slots)
    tensors = [FileTensor(name, f"{layer}.weight", layer, order, expert=expert) for expert, layer, order in found]
    return entry_of(tensors[0], source) if slots == [Slot(name)] else stack_of(name, tensors, source)
