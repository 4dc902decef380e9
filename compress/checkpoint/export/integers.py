"""Layers that hold nothing but integer codes and scales, for layouts that store just these."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from compress.checkpoint.export.exporter import Written
from compress.checkpoint.export.limits import Limits
from compress.checkpoint.export.place import Place
from compress.checkpoint.export.read_back import summary
from compress.checkpoint.read.compressed_layers import StoredLayer, stored_in, weight_of
from compress.checkpoint.read.pretrained import embeddings_of, empty_model
from compress.checkpoint.read.source import Source
from compress.checkpoint.read.unplaced_tensors import beside, matrices
from compress.model.patterns import ignoring
from compress.weights.formats.act_order import ActOrder
from compress.weights.formats.codes import CodesFormat, Packed, WholeCodes
from compress.weights.formats.levels import LevelCodes
from compress.weights.grid import DEFAULT_GROUP, Grid, Quantized
from compress.weights.scheme import Scheme


@dataclass(frozen=True)
class Integers:
    """A weight (codes - zero) scale. codes uint8 [N, K], of so many bits; scale [N, G] as stored, and zero uint8
    [N, G], of G groups of consecutive inputs."""

    bits: int
    codes: Tensor
    scale: Tensor
    zero: Tensor


# A layer's name -> its tensors in a layout, by their names in the layer.
Pack = Callable[[str], Mapping[str, Tensor]]


def integers_of(source: Source, layer: str) -> Integers:
    """The codes of a layer against which `why_not_codes` has nothing: all of them, and the scales, exactly."""
    (codes,) = weight_of(source, layer).terms
    assert isinstance(codes, Quantized)
    return unsigned(codes)


def unsigned(codes: Quantized) -> Integers:
    """Signed integer codes with 2^(bits - 1) added to them and to their zero points."""
    grid = codes.grid
    middle = 2 ** (grid.bits - 1)
    groups = 1 if grid.group_size is None else codes.codes.shape[1] // grid.group_size
    shape = (len(codes.codes), groups)
    scale = codes.scale.expand(shape)
    zero = torch.zeros(shape, dtype=torch.int16) if codes.zero_point is None else codes.zero_point.expand(shape)
    return Integers(
        grid.bits,
        (codes.codes.to(torch.int16) + middle).to(torch.uint8),
        scale,
        (zero.to(torch.int16) + middle).to(torch.uint8),
    )


def write_layers(
    source: Source,
    place: Place,
    pack: Pack,
    parts: int | None = None,
    values_of: Callable[[str], Tensor] | None = None,
    caches: Mapping[str, Tensor] | None = None,
    stacks: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Written:
    """Write every layer, one after the other, behind the tensors that are no part of one. pack: makes so many tensors
    of a layer, by default as many as it has. values_of: makes the values that they stand for, by default those of the
    checkpoint. caches: the scales of key-value caches; None where the layout has none, which is noted. stacks: {name:
    layers whose tensors are written as one of that name, along a dimension in front}."""
    if caches is None:
        note_losses(source, place)
    layers = {name: layer for name, layer in stored_in(source).layers.items() if layer.shares is None}
    rest, values = list(names_to_copy(source)), dict[str, str]()
    stacked = {each for stack in stacks.values() for each in stack}
    single = [name for name in layers if name not in stacked]

    def packed(name: str) -> Mapping[str, Tensor]:
        values[name] = summary(values_of(name) if values_of else weight_of(source, name).dequantize())
        return pack(name)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        yield from ((name, source.weights.tensor(name)) for name in rest)
        yield from (caches or {}).items()
        for name in single:
            yield from ((f"{name}.{part}", tensor) for part, tensor in packed(name).items())
        for name, stack in stacks.items():
            held = [packed(each) for each in stack]
            yield from ((f"{name}.{part}", torch.stack([each[part] for each in held])) for part in held[0])

    firsts = (*single, *(stack[0] for stack in stacks.values()))
    count = sum(len(layers[name].parts) if parts is None else parts for name in firsts)
    place.tensors(tensors(), len(rest) + len(caches or {}) + count)
    return Written(len(layers), {"values": values})


def why_not_integers(source: Source, limits: Limits) -> list[str]:
    """Reasons why a layout of integer codes with one width and one group size cannot hold a checkpoint exactly, each
    the end of a sentence about it."""
    groups, unit = limits.groups or (), limits.inputs
    stored, reasons = stored_in(source), why_no_linear_codes(source)
    if not stored.layers:
        return reasons
    for name, layer in stored.layers.items():
        if (why := why_not_codes(layer)) is not None:
            return [*reasons, f"{name} {why}"]
    columns = {name: layer.shape[1] for name, layer in stored.layers.items()}
    if odd := [name for name in columns if columns[name] % unit]:
        left = ignoring(odd, list(columns))
        return [
            *reasons,
            f"{odd[0]} has {columns[odd[0]]} inputs; allowed: multiples of {unit}; leave that out, {left}",
        ]
    grids: dict[Grid, str] = {}
    for name, layer in stored.layers.items():
        grids.setdefault(grid_of(layer), name)
    if len({(grid.bits, grid.group_size, grid.symmetric) for grid in grids}) > 1:
        (one, first), (other, second), *_ = grids.items()
        all_fit = [size for size in groups if 0 < size <= DEFAULT_GROUP and not any(n % size for n in columns.values())]
        same = len({(grid.bits, grid.symmetric) for grid in grids}) == 1
        advice = f"--group-size {max(all_fit, default=-1)}" if same else "one scheme and grid for all"
        reasons.append(f"its layers differ ({first}: {_words(one)}, {second}: {_words(other)}); quantize with {advice}")
        return reasons
    (grid, name), *_ = grids.items()
    reasons += [f"{name} {why}" for why in why_not_grid(grid, grid.group_size or -1, limits)]
    if not reasons and not grid.symmetric and not limits.asymmetric:
        reasons.append("its codes are asymmetric; `--to awq` takes those of 4 bits")
    return reasons or why_not_float16(source)


def why_not_grid(grid: Grid, size: int, limits: Limits) -> Iterator[str]:
    """Reasons why a layout has no such codes in groups of this size, the ends of sentences about a layer."""
    if grid.bits not in limits.bits:
        bits = ", ".join(map(str, limits.bits))
        yield f"has codes of {grid.bits} bits; allowed: {bits}; quantize with --bits {max(limits.bits)}"
    if (sizes := limits.why_not_group(size)) is not None:
        yield f"has groups of {size}; allowed: {sizes}; quantize with --group-size"


def why_no_linear_codes(source: Source) -> list[str]:
    """The reason why a layout of quantized linear layers alone cannot hold a checkpoint: that it has none, or a
    compressed embedding, too."""
    if not stored_in(source).layers:
        return ["it holds no codes; quantize it first"]
    tables = sorted(embeddings_of(source) & stored_in(source).layers.keys())
    return [f"its embedding {tables[0]} is compressed; quantize without --embeddings"] if tables else []


def grid_of(layer: StoredLayer) -> Grid:
    """The grid of a layer's codes."""
    (form,) = layer.scheme.terms
    assert isinstance(form, CodesFormat)
    return form.grid


def uncompressed(source: Source) -> list[str]:
    """Names of the linear layers that are stored as numbers, the output head and what no model has a place for among
    them."""
    layers = stored_in(source).layers
    own = [n for n, m in empty_model(source).named_modules() if isinstance(m, nn.Linear) and n not in layers]
    return [*own, *matrices(beside(source))]


def names_to_copy(source: Source) -> Iterator[str]:
    """Names of the tensors that are no part of a compressed layer or of a cache."""
    stored = stored_in(source)
    parts = {name for layer in stored.layers.values() for name in layer.parts.values()}
    scales = {} if stored.caches is None else stored.caches.scales
    parts |= {name for held in scales.values() for name, _ in held.values()}
    return (name for name in source.weights if name not in parts)


def note_losses(source: Source, place: Place) -> None:
    """Note a key-value cache, which these layouts do not describe."""
    caches = stored_in(source).caches
    if caches is not None:
        place.note(f"keys and values are rounded ({caches.scheme}); the exported model keeps them as they are")


def why_not_codes(layer: StoredLayer) -> str | None:
    """The reason why a layer is no integer codes alone, the end of a sentence about it; None where it is."""
    scheme = layer.scheme
    if (why := why_not_integer(scheme)) is None and scheme.inputs is not None:
        return f"rounds its input ({scheme}); quantize weights alone, like --scheme w{grid_of(layer).bits}a16"
    return why


def why_not_integer(scheme: Scheme) -> str | None:
    """The reason why weights of a scheme are not integer codes, the end of a sentence about their layer."""
    if (why := why_not_one_in_order(scheme)) is not None:
        return why
    (form,) = scheme.terms
    if not isinstance(form, Packed | WholeCodes) or form.grid.type != "int" or not form.grid.signed:
        return f"is stored as {scheme}, not as integers; `--to dense` takes it"
    return None


def why_not_one_in_order(scheme: Scheme) -> str | None:
    """The reason why weights of a scheme are not one term whose inputs lie group by group, the end of a sentence about
    their layer."""
    if len(scheme.terms) > 1:
        return f"is a sum ({' + '.join(term.kind for term in scheme.terms)}); `--to dense` takes it"
    if isinstance(scheme.terms[0], ActOrder):
        return "has inputs that belong to groups in any order; `--to dense` takes it"
    return None


def why_not_float16(source: Source) -> list[str]:
    """The first layer whose scales are no numbers of float16, the end of a sentence about a checkpoint. Those of
    super-blocks always are."""
    for name, layer in stored_in(source).layers.items():
        if isinstance(layer.scheme.codes, LevelCodes):
            continue  # scales of a kind of their own
        part = next((layer.parts[part] for part in ("scales", "weight_scale") if part in layer.parts), None)
        scale = None if part is None else source.weights.tensor(part)
        if scale is not None and not torch.equal(scale.to(torch.float16).to(scale.dtype), scale):
            known = f"scales of {name} are {scale.dtype} values that float16 has not"
            return [f"{known}; quantize with scales=float16, or with --for, which sets it"]
    return []


def _words(grid: Grid) -> str:
    kind = "symmetric" if grid.symmetric else "asymmetric"
    return f"{grid.bits} bits in groups of {grid.group_size or -1}, {kind}"
