"""Schemes: the formats of a layer's weight, and the rounding of its input and output."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from compress.base.errors import CheckpointError, InputError, one_of
from compress.kernels.layouts.k_quants import K_QUANTS
from compress.kernels.layouts.scale_blocks import INPUT_BLOCK, WEIGHT_BLOCK
from compress.weights.formats.codes import CodesFormat, Float8Blocks, Float8Rows, Int8Rows, Int8Table, Packed
from compress.weights.formats.levels import LEVEL_FORMATS, LevelCodes, check_global
from compress.weights.formats.registry import read_format
from compress.weights.formats.ternary import BinaryCodes
from compress.weights.grid import DEFAULT_GROUP, Grid, Quantized, grid_of, usual_group
from compress.weights.matrix import Matrix, Term, Weight
from compress.weights.number_formats import SCHEMES, WIDE, likely_scheme
from compress.weights.roles import Role
from compress.weights.rotations.hadamard import has_hadamard
from compress.weights.rounding import ActivationCodes, fixed_parts, read_fixed
from compress.weights.terms import Format, Part, StoredTerm, json_fields, named, own

SHAPE = Part((2,), (torch.int64, torch.int32), role=Role.MASKS)


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """The storage and the rounding of a layer.

    terms: the format of each term of the weight. inputs: the grid of the layer's rounded input, or None. dynamic: the
    range of inputs is fitted to every token at run time, rather than by calibration. outputs: the 8-bit grid of the
    layer's output (bias included), with a fixed range, or None. rotation: the size of the Hadamard matrices by which
    the layer multiplies its input, before that is rounded; None where it does not.
    """

    terms: tuple[Format, ...]
    inputs: Grid | None = None
    outputs: Grid | None = None
    dynamic: bool = True
    rotation: int | None = None

    def __str__(self) -> str:
        text = " + ".join(term.words(self.inputs) for term in self.terms)
        if self.rotation is not None:
            text += f", input rotated by {self.rotation}"
        if self.inputs is None:
            return text
        kinds = [("input", "dynamic" if self.dynamic else "static", self.inputs), ("output", "static", self.outputs)]
        for side, how, grid in kinds:
            if grid is not None:
                sign = "" if grid.floating else " symmetric" if grid.symmetric else " asymmetric"
                bits = f" {grid.bits}-bit" if grid.bits != WIDE else ""
                per = f" g{grid.block[1]}" if grid.block is not None else ""
                per += f" g{grid.group_size}" if grid.group_size is not None else ""
                searched = " searched" if grid.searches else ""
                text += f", {side}{bits} {how}{searched}{sign}{per}"
        return text

    @property
    def codes(self) -> CodesFormat | None:
        """The format of a layer of codes alone; None for another layer."""
        first, *others = self.terms
        return first if isinstance(first, CodesFormat) and not others else None

    @property
    def weights(self) -> Grid:
        """The grid of a layer of codes."""
        return cast(CodesFormat, self.terms[0]).grid

    @property
    def holds_inputs(self) -> bool:
        """True where numbers about the layer's input are stored: its fixed range, or its global scale."""
        return self.inputs is not None and (not self.dynamic or self.inputs.scales == "e4m3")

    @property
    def global_inputs(self) -> LevelCodes | None:
        """The format that says how the global scale of inputs is stored; None where there is none."""
        asked = self.inputs is not None and self.inputs.scales == "e4m3"
        return next((term for term in self.terms if asked and isinstance(term, LevelCodes)), None)

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        """{name: part} of the tensors that hold an [N, K] layer. `weight_shape` is among them where no tensor of the
        first term tells that shape."""
        parts: dict[str, Part] = {}
        for i, term in enumerate(self.terms):
            parts |= named(i, term.parts(rows, columns))
        if self.terms[0].needs_shape:
            parts["weight_shape"] = SHAPE
        if self.inputs is not None and not self.dynamic:
            parts |= fixed_parts("input", self.inputs)
        if (levels := self.global_inputs) is not None:
            parts[levels.of_inputs] = Part((1,), (torch.float32,), role=Role.RANGES)
        return parts if self.outputs is None else {**parts, **fixed_parts("output", self.outputs)}

    def tensors(self, rows: int, columns: int, dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """{name: (shape, dtype)} of the parts that every [N, K] layer has. dtype: of numbers, as the model stores
        them."""
        return {
            name: (part.shape, dtype if dtype in part.dtypes else part.dtypes[0])
            for name, part in self.parts(rows, columns).items()
            if not part.optional
        }

    def read(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> Weight:
        """The weight of an [N, K] layer from its tensors. Raises CheckpointError as `check` does."""
        self.check(parts, rows, columns)
        return Weight(tuple(term.read(held, rows, columns) for term, held in self._by_term(parts, rows, columns)))

    def check(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> None:
        """Raises CheckpointError, whose message begins with the name of a part, for impossible values."""
        for term, held in self._by_term(parts, rows, columns):
            term.check(held, rows, columns)
        if self.global_inputs is not None:
            check_global(parts, self.global_inputs.of_inputs)

    def _by_term(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> list[tuple[Format, dict[str, Tensor]]]:
        return [(term, own(i, parts, term, rows, columns)) for i, term in enumerate(self.terms)]

    def read_inputs(self, parts: Mapping[str, Tensor]) -> ActivationCodes | None:
        """The rounding of a layer's input; None where it is not rounded."""
        if self.inputs is not None and (levels := self.global_inputs) is not None:
            found = levels.global_scale(parts[levels.of_inputs])
            return ActivationCodes(replace(self.inputs, global_scale=found))
        if self.inputs is None or not self.holds_inputs:
            return None if self.inputs is None else ActivationCodes(self.inputs)
        return read_fixed("input", self.inputs, parts)

    def read_outputs(self, parts: Mapping[str, Tensor]) -> ActivationCodes | None:
        """The rounding of a layer's output; None where it is not rounded."""
        return None if self.outputs is None else read_fixed("output", self.outputs, parts)

    def entry(self) -> dict[str, Any]:
        """The scheme as JSON."""
        grids = {"inputs": self.inputs, "outputs": self.outputs}
        noted = {key: None if grid is None else json_fields(grid) for key, grid in grids.items()}
        turned = {} if self.rotation is None else {"rotation": self.rotation}
        return {"terms": [term.entry() for term in self.terms], **noted, "dynamic": self.dynamic, **turned}


def read_entry(entry: Mapping[str, Any], where: object) -> Scheme:
    """Inverse of `Scheme.entry`, for an entry whose own keys have been checked. Raises CheckpointError, which names
    `where`, for a format that cannot be read."""
    grids = {key: None if entry[key] is None else Grid(**entry[key]) for key in ("inputs", "outputs")}
    terms = tuple(read_format(term, where) for term in entry["terms"])
    if not terms:
        raise CheckpointError(f"{where} holds a layer without a term")
    return Scheme(terms=terms, dynamic=entry["dynamic"], rotation=entry.get("rotation"), **grids)


def format_of(weights: Grid, inputs: Grid | None, table: bool = False) -> CodesFormat:
    """The format of codes on a grid, in a layer with inputs on a grid (None: not rounded). table: of a token
    embedding."""
    if weights.signs:
        return BinaryCodes(grid=weights)
    if (kind := level_format(weights)) is not None:
        return kind(grid=replace(weights, global_scale=None))
    if inputs is None:
        assert not weights.floating, "float8 weights come with float8 inputs"
        return Int8Table(grid=weights) if table and weights.bits == WIDE else Packed(grid=weights)
    if weights.floating:
        return Float8Rows(grid=weights) if weights.block is None else Float8Blocks(grid=weights)
    whole = weights.bits == WIDE and weights.symmetric and weights.granularity in ("channel", "tensor")
    return Int8Rows(grid=weights) if whole else Packed(grid=weights)


def level_format(grid: Grid) -> type[LevelCodes] | None:
    """The format of codes on a grid of levels, or of float8 in groups; None for another grid."""

    def kind(of: Grid) -> tuple[str, int, str, str]:
        return of.type, of.bits, of.granularity, of.scales

    return next((each for each in LEVEL_FORMATS.values() if kind(each.on) == kind(grid)), None)


def scheme_on(weights: Grid, inputs: Grid | None = None, outputs: Grid | None = None, dynamic: bool = True) -> Scheme:
    """The scheme of a layer of codes on a grid."""
    return Scheme(terms=(format_of(weights, inputs),), inputs=inputs, outputs=outputs, dynamic=dynamic)


def block_scheme(kind: type[Float8Blocks]) -> Scheme:
    """The scheme of float8 weights in blocks of 128 x 128, with inputs rounded to float8 per token and 128 columns."""
    grid = Grid(bits=WIDE, type="float", granularity="block", block=WEIGHT_BLOCK)
    return Scheme(terms=(kind(grid=grid),), inputs=replace(grid, block=INPUT_BLOCK))


def terms_of(weight: Matrix, inputs: Grid | None = None, table: bool = False) -> tuple[StoredTerm, ...]:
    """The terms of a weight, each with its format. inputs: the grid of the layer's input. table: of a token
    embedding."""
    return tuple(_stored(term, inputs, table) for term in weight.terms)


def _stored(term: Term, inputs: Grid | None, table: bool) -> StoredTerm:
    """The term with its format: codes without one get that of their grid."""
    if isinstance(term, StoredTerm):
        return term
    assert isinstance(term, Quantized), f"a {type(term).__name__} has no format"
    return format_of(term.grid, inputs, table).term(term)


def scheme_of(
    weight: Matrix,
    inputs: ActivationCodes | None = None,
    outputs: ActivationCodes | None = None,
    table: bool = False,
) -> Scheme:
    """The scheme that stores a weight and the rounding of its layer's input and output. table: of a token embedding."""
    assert inputs is not None or outputs is None, "rounded outputs come with rounded inputs"
    grid = None if inputs is None else replace(inputs.grid, global_scale=None)
    return Scheme(
        terms=tuple(term.format for term in terms_of(weight, grid, table)),
        inputs=grid,
        outputs=None if outputs is None else outputs.grid,
        dynamic=inputs is None or inputs.dynamic,
    )


def parts_of(
    weight: Matrix,
    inputs: ActivationCodes | None = None,
    outputs: ActivationCodes | None = None,
    table: bool = False,
) -> dict[str, Tensor]:
    """The tensors of a layer, by the names of `Scheme.parts`, on the CPU."""
    terms = terms_of(weight, None if inputs is None else inputs.grid, table)
    parts: dict[str, Tensor] = {}
    for i, term in enumerate(terms):
        parts |= named(i, term.parts())
    if terms[0].format.needs_shape:
        parts["weight_shape"] = torch.tensor(terms[0].shape)
    parts |= {} if inputs is None else inputs.parts("input")
    parts |= {} if outputs is None else outputs.parts("output")
    return {name: part.detach().cpu().contiguous() for name, part in parts.items()}


def check_parts(
    layer: str, found: Mapping[str, tuple[tuple[int, ...], torch.dtype]], scheme: Scheme, shape: tuple[int, int]
) -> None:
    """Check the shapes and dtypes of a layer's tensors against its scheme. Raises CheckpointError, which names one.

    found: {name: (shape, dtype)}; shape: (N, K).
    """
    rows, columns = shape
    problem = next((p for term in scheme.terms if (p := term.problem(rows, columns)) is not None), None)
    if problem is not None:
        raise CheckpointError(f"{layer} {problem}")
    if (turned := scheme.rotation) is not None and (not has_hadamard(turned) or columns % turned):
        raise CheckpointError(f"{layer} has {columns} inputs, which do not rotate in blocks of {turned}")
    wanted = scheme.parts(rows, columns)
    for name, part in wanted.items():
        if name not in found:
            if part.optional:
                continue
            raise CheckpointError(f"{layer}.{name} is missing from the checkpoint")
        size, dtype = found[name]
        if size != part.shape and not (part.shape == (1,) and size == ()):
            raise CheckpointError(f"{layer}.{name} has shape {size}; its layer needs {part.shape}")
        if dtype not in part.dtypes:
            allowed = ", ".join(str(d).removeprefix("torch.") for d in part.dtypes)
            raise CheckpointError(f"{layer}.{name} is {str(dtype).removeprefix('torch.')}; it must be {allowed}")
    if unknown := sorted(set(found) - set(wanted) - {"bias"}):
        kinds = " + ".join(term.kind for term in scheme.terms)
        raise CheckpointError(f"{layer}.{unknown[0]} is no part of a layer stored as {kinds}")


def shape_of(layer: str, stored: Tensor) -> tuple[int, int]:
    """(N, K) from a `weight_shape`. Raises CheckpointError where it is not two positive numbers."""
    if tuple(stored.shape) != (2,):
        raise CheckpointError(f"{layer}.weight_shape has shape {tuple(stored.shape)}; it must hold two numbers")
    rows, columns = (int(n) for n in stored)
    if rows < 1 or columns < 1:
        raise CheckpointError(f"{layer}.weight_shape says {rows} x {columns}")
    return rows, columns


def check_scheme(name: str, allowed: Iterable[str], what: str = "scheme") -> None:
    """Raises InputError for a scheme that is not allowed; the message names the likeliest allowed one."""
    names, meant = list(allowed), likely_scheme(name)
    if name.lower() in K_QUANTS:
        raise InputError(
            f"{what} {name!r}; llama.cpp's types are written by the pass k-quants, or by gptq and rtn of a recipe or "
            f"the command line; allowed here: {', '.join(names)}"
        )
    one_of(what, name, names, repr(meant) if meant in names else "")


def check_levels_group(name: str, group_size: int | None) -> None:
    """Raises InputError for a size of groups that a scheme of levels has not."""
    known = SCHEMES[name].group_size
    if group_size not in (None, known):
        raise InputError(f"{name} has groups of {known}; leave group_size out")


def scheme_named(name: str, group_size: int | None = None, columns: int = DEFAULT_GROUP) -> Scheme:
    """The scheme of a name.

    w4a16 and the like: integer weights. a8 ... a2: integer inputs of so many bits, fitted to every token. fp8: float8
    weights and inputs, fitted likewise. fp8-block: float8 with a scale per 128 x 128 weights and per 128 inputs of a
    token. group_size: inputs per scale, -1 for one scale per output (always so for w8a8 and fp8); by default the usual
    one of a layer of `columns` inputs. Raises InputError for an unknown name and for a group size that it does not
    take.
    """
    check_scheme(name, SCHEMES)
    numbers = SCHEMES[name]
    if numbers.of_levels:
        check_levels_group(name, group_size)
        return scheme_on(grid_of(numbers), grid_of(numbers) if numbers.rounds_inputs else None)
    if numbers.per == "block":
        if group_size is not None:
            raise InputError(f"{name} has one scale per 128 x 128 weights; leave group_size out")
        return block_scheme(Float8Blocks)
    whole = numbers.per == "channel"
    if whole and group_size not in (None, -1):
        raise InputError(f"{name} has one scale per output; leave group_size out")
    weights = Grid(bits=numbers.bits, type=numbers.type)
    tokens = Grid(bits=numbers.input_bits, granularity="token", type=numbers.type) if numbers.rounds_inputs else None
    size = usual_group([columns]) if group_size is None else group_size
    if size == -1 or whole:
        return scheme_on(weights, tokens)
    return scheme_on(replace(weights, granularity="group", group_size=size), tokens)
