"""Writes codes into a GGUF file that another program made of the same model: a family without a path of our own.

    compress export OUT --to dense --output DENSE
    python convert_hf_to_gguf.py DENSE --outtype bf16 --outfile TEMPLATE.gguf       # llama.cpp's own converter
    compress export OUT --to gguf --template TEMPLATE.gguf --output DIR

The template gives names, metadata, tokenizer and every tensor that is not compressed. A layer's tensor is the one that
holds the rows which its codes stand for, in whatever order: the same order is given to its blocks. A template of the
original model holds other rows, and is refused: passes also change weights that they do not compress.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compress.checkpoint.export.gguf.file import Entry
from compress.checkpoint.export.gguf.library import gguf, reader
from compress.checkpoint.export.gguf.names import FileTensor, entry_of, factors_of
from compress.checkpoint.read.source import Source
from compress.checkpoint.read.stored import stored_in, weight_of
from compress.errors import InputError, first_line
from compress.system.reading import special

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
HOW = (
    "make it from the dense weights: `compress export OUT --to dense --output DENSE`, then llama.cpp's "
    "convert_hf_to_gguf.py DENSE --outtype bf16 (or f16, f32)"
)
OF_HEADER = "GGUF."
# Keys that say how the file itself is made.
REPLACED = ("general.architecture", "general.file_type", "general.quantization_version", "general.alignment")


class Template:
    """A GGUF file, read. Raises InputError for one that cannot be read."""

    def __init__(self, path: Path) -> None:
        kind = special(path)
        if kind is not None or not path.is_file():
            raise InputError(f"template {str(path)!r} is {kind or 'no file'}; {HOW}")
        try:
            self._reader = gguf().GGUFReader(path)
            self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}
            self.family: str = self._reader.fields["general.architecture"].contents()
        except Exception as error:  # noqa: BLE001 - gguf-py raises whatever a damaged file leads it to
            raise InputError(
                f"template {str(path)!r} cannot be read by {reader()} ({first_line(error)}); {HOW}"
            ) from None

    def fill(self, writer: Any, own: Mapping[str, int]) -> None:
        """Add the template's metadata to a file, and keys of our own in the place of some."""
        for key, value in own.items():
            writer.add_uint32(key, value)
        for key, field in self._reader.fields.items():
            if not key.startswith(OF_HEADER) and key not in REPLACED:
                kinds = field.types
                writer.add_key_value(key, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)

    def values(self, name: str) -> Tensor:
        """The numbers of a tensor, float32."""
        tensor = self.tensors[name]
        return torch.from_numpy(gguf().quants.dequantize(tensor.data, tensor.tensor_type).copy())

    def copied(self, name: str) -> Entry:
        """A tensor as it lies in the template."""
        tensor = self.tensors[name]
        kind = tensor.tensor_type.name
        shape = tuple(int(size) for size in reversed(tensor.shape)) if kind in DTYPES else tensor.data.shape

        def data() -> Tensor:
            return torch.from_numpy(tensor.data.copy())

        return Entry(name, kind, tuple(shape), int(tensor.n_bytes), name, data, lambda: self.values(name))


def _rows(values: Tensor) -> list[bytes]:
    """The bytes of each row of a matrix."""
    return [row.tobytes() for row in values.contiguous().view(torch.uint8).numpy()]


def _candidates(template: Template) -> dict[tuple[str, bytes], list[str]]:
    """{(type, bytes of a first row): names} of the template's matrices, for finding a layer's. A row is among those of
    a tensor wherever it lies."""
    found: dict[tuple[str, bytes], list[str]] = {}
    for name, tensor in template.tensors.items():
        kind = tensor.tensor_type.name
        if kind in DTYPES and len(tensor.shape) == 2:
            for row in set(_rows(template.values(name).to(DTYPES[kind]))):
                found.setdefault((kind, row), []).append(name)
    return found


def matched(source: Source, template: Template) -> dict[str, tuple[str, Tensor]]:
    """{layer: (the template's tensor, the layer's row that is each row of it)}. Raises InputError, which names the
    first layer that has none."""
    candidates = _candidates(template)
    found: dict[str, tuple[str, Tensor]] = {}
    taken: set[str] = set()
    for layer, stored in stored_in(source).layers.items():
        if stored.shares is not None:
            continue
        values = weight_of(source, layer).dequantize()
        pairs = ((name, _order(values, template, name)) for name in _of(values, candidates) if name not in taken)
        match = next(((name, order) for name, order in pairs if order is not None), None)
        if match is None:
            raise InputError(
                f"the template has no tensor of the rows of {layer} that {source.name} stores; {HOW}. (Experts in one "
                "tensor, and layers whose inputs the converter reorders, cannot be exported so.)"
            )
        found[layer] = match
        taken.add(match[0])
    return found


def _of(values: Tensor, candidates: Mapping[tuple[str, bytes], list[str]]) -> Iterator[str]:
    """Names of the template's tensors that have the first row of a layer."""
    for kind, dtype in DTYPES.items():
        (row,) = _rows(values[:1].to(dtype))
        yield from candidates.get((kind, row), ())


def _order(values: Tensor, template: Template, name: str) -> Tensor | None:
    """The row of a layer that is each row of a template's tensor; None where they do not hold the same rows."""
    tensor = template.tensors[name]
    if tuple(int(size) for size in reversed(tensor.shape)) != tuple(values.shape):
        return None
    dtype = DTYPES[tensor.tensor_type.name]
    places: dict[bytes, list[int]] = {}
    for place, row in enumerate(_rows(values.to(dtype))):
        places.setdefault(row, []).append(place)
    order = []
    for row in _rows(template.values(name).to(dtype)):
        if not places.get(row):
            return None
        order.append(places[row].pop(0))
    return torch.tensor(order)


def entries_of(source: Source, template: Template) -> list[Entry]:
    """The tensors of the file, in the order of the template: the layers' in blocks, others as they are. Last, factors
    of layers with a global scale."""
    layers = {name: (layer, order) for layer, (name, order) in matched(source, template).items()}
    entries = [
        _grafted(source, name, *layers[name]) if name in layers else template.copied(name) for name in template.tensors
    ]
    factors = (factor for name, (layer, _) in layers.items() for factor in factors_of(source, layer, name))
    return [*entries, *(entry_of(factor, source) for factor in factors)]


def _grafted(source: Source, name: str, layer: str, order: Tensor) -> Entry:
    return entry_of(FileTensor(name, f"{layer}.weight", layer, order), source)
