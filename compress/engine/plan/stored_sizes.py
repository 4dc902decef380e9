"""Tensors of the checkpoint that a plan ends in, from shapes alone: the formats say which parts a layer has.

What only the work can tell is the number of exact weights beside codes, and what a pass finds of ranks: there the
options' own share is counted, and the layer is not `exact`.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from compress.engine.plan.plan import Plan
from compress.model.layers import Layer, Table
from compress.model.tensors import stored_buffers
from compress.passes.protocol.base import Pass
from compress.passes.protocol.stages import Survey
from compress.solvers.statistics.cache_ranges import cache_names
from compress.weights.formats.codes import CodesFormat, Int8Table
from compress.weights.formats.dense import Dense
from compress.weights.formats.sparse import SparseRows
from compress.weights.formats.sparse24 import PackedSparse24, Sparse24
from compress.weights.kv_cache_codes import SCALES
from compress.weights.scheme import Scheme
from compress.weights.terms import Format

Tensors = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class WrittenLayer:
    """A layer that a run compresses, as the checkpoint will hold it. shape: (N, K). passes: that treat it. scheme: None
    where it is stored dense. tensors: {full name: (shape, dtype)} in place of its weight; empty where it is dense.
    exact: their sizes are known before the work."""

    name: str
    shape: tuple[int, int]
    passes: tuple[str, ...]
    scheme: Scheme | None
    tensors: Tensors
    exact: bool

    @property
    def bytes(self) -> int:
        return bytes_of_tensors(self.tensors)


def bytes_of_tensors(tensors: Tensors) -> int:
    """The bytes that tensors take in a file."""
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in tensors.values())


def stored_layers(plan: Plan, halved: Collection[str] = ()) -> list[WrittenLayer]:
    """Every layer and table that a plan treats. halved: names of those that are stored without the zeros of 2:4."""
    of_tables = () if plan.embeddings is None else (plan.embeddings,)
    # Ranks that a survey finds, and exact weights that a loss chooses, are not known before the work.
    surveying = [p for p in (*plan.passes, *of_tables) if p.stage(Survey)]
    found = [_written_layer(layer, plan.passes, surveying, layer.name in halved) for layer in plan.treated_layers]
    return found + [_written_layer(table, of_tables, surveying, halved=False) for table in plan.tables]


def _written_layer(layer: Layer, passes: Sequence[Pass], surveying: Sequence[Pass], halved: bool) -> WrittenLayer:
    mine = [p for p in passes if p.wants(layer.name)]
    names = tuple(p.name for p in mine)
    scheme = scheme_after(layer, mine, halved) if layer.has_format else None
    if scheme is None:
        return WrittenLayer(layer.name, layer.shape, names, None, {}, exact=True)
    exact = not any(isinstance(term, SparseRows) for term in scheme.terms) and not any(p in surveying for p in mine)
    return WrittenLayer(layer.name, layer.shape, names, scheme, _tensors(layer, scheme), exact)


def scheme_after(layer: Layer, passes: Sequence[Pass], halved: bool) -> Scheme | None:
    """The scheme of a layer after these passes; None where its weight stays plain numbers."""
    table = isinstance(layer, Table)
    rounding = [p for p in passes if p.writes == "quantized weight"]
    found = None if not rounding else rounding[-1].stored(layer.name, layer.shape, table)
    if not halved:
        return found
    return replace(found or Scheme(terms=(Dense(),)), terms=tuple(map(_sparse24, found.terms if found else (Dense(),))))


def _sparse24(term: Format) -> Format:
    return PackedSparse24(grid=term.grid) if isinstance(term, CodesFormat) else Sparse24()


def _tensors(layer: Layer, scheme: Scheme) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """The tensors of a layer, whose numbers have the dtype that the model stores. Modules that share an int8 table have
    copies of its scales (`checkpoint.write.writer`)."""
    parts = scheme.tensors(*layer.shape, layer.parameter.dtype)
    tensors = {f"{layer.name}.{name}": part for name, part in parts.items()}
    if isinstance(layer, Table) and isinstance(scheme.codes, Int8Table):
        small = {name: part for name, part in parts.items() if name != "weight"}
        tensors |= {f"{other}.{name}": part for other in layer.shared for name, part in small.items()}
    return tensors


def stored_tensors(model: nn.Module, plan: Plan, layers: Sequence[WrittenLayer]) -> Tensors:
    """{name: (shape, dtype)} of all tensors of the checkpoint. model: of any device, with the dtypes that it stores."""
    coded = {layer.name for layer in layers if layer.tensors}
    replaced = {id(layer.parameter) for layer in (*plan.all_layers, *plan.tables) if layer.name in coded}
    found = {name: (tuple(p.shape), p.dtype) for name, p in model.named_parameters() if id(p) not in replaced}
    found |= {name: (tuple(buffer.shape), buffer.dtype) for name, buffer in stored_buffers(model)}
    for layer in layers:
        found |= layer.tensors
    return {**found, **dict(_caches(model, plan))}


def _caches(model: nn.Module, plan: Plan) -> Iterator[tuple[str, tuple[tuple[int, ...], torch.dtype]]]:
    """Scales of key-value caches whose range is fixed by calibration."""
    scheme = plan.cache_scheme
    if scheme is None or scheme.dynamic:
        return
    dtype = next(p.dtype for p in model.parameters())
    config: Any = model.config
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    shape = (heads, 1, 1) if scheme.granularity == "head" else (1,)
    for name in cache_names(model, ""):
        for part in SCALES:
            yield f"{name}.{part}", (shape, dtype)
