"""Formats: the storage of the terms of a weight (`weights.matrix`).

    Format        the storage of a term: numbers and words, JSON both ways
    StoredTerm    a term with its format, and the tensors that hold it

A format names the tensors (`parts`) of an [N, K] term and makes the term from them again (`read`). All code that
writes, checks, resumes, loads, counts or shows checkpoints uses only this interface. `weights.formats.registry` lists
the formats.

The tensors of the first term have the names that its format gives them, those of a further one are `term1_NAME`,
`term2_NAME` and so on. N outputs, K inputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, ClassVar, NamedTuple, Self, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from compress.base.errors import CheckpointError, CompressError
from compress.weights.grid import Grid
from compress.weights.matrix import Matrix, Term, Weight  # noqa: F401 - formats of others import Weight from here
from compress.weights.roles import Role

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Part(NamedTuple):
    """A tensor that something is stored as: its shape, the dtypes it may have, whether it may be absent, and whether
    its first axis is the outputs' (`Tensors` cuts it then). role: what its bytes are counted as (None: as themselves,
    under the names of the format and the part)."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    optional: bool = False
    by_row: bool = False
    role: Role | None = None


@dataclass(frozen=True, kw_only=True)
class Format:
    """The storage of a term. Subclasses are frozen dataclasses whose fields are JSON: numbers, words, other
    dataclasses.

    kind: the format's name in `FORMATS` and on disk. whole: the part, if any, that has the shape [N, K] of the term;
    telling: one from whose shape that follows (`size`). Without either, a layer's shape is stored beside it. as_bytes:
    floats that keep their dtype when a layer is converted to another. trains: whether its codes or scales are trained,
    where it is the first of a weight.
    """

    kind: ClassVar[str]
    whole: ClassVar[str | None] = None
    telling: ClassVar[str | None] = None
    as_bytes: ClassVar[frozenset[str]] = frozenset()
    trains: ClassVar[bool] = False

    @property
    def needs_shape(self) -> bool:
        """True where a layer's shape is stored beside its tensors."""
        return self.whole is None and self.telling is None

    def size(self, first: int, second: int) -> tuple[int, int]:
        """(N, K) from the shape of the part that is `whole` or `telling`."""
        return first, second

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        """The tensors that hold an [N, K] term, by name."""
        raise NotImplementedError

    def read(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> "StoredTerm":
        """The term of these tensors, which have been checked."""
        return Tensors(self, parts, rows, columns)

    def values(self, parts: Mapping[str, Tensor]) -> Tensor:
        """The values [N, K] of a term's tensors, in the stored dtype."""
        raise NotImplementedError

    def product(self, x: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        """x [..., K] times the transposed term, [..., N]. The product of formats without a kernel."""
        return nn.functional.linear(x, self.values(parts).to(x.dtype))

    def slack(self, x_MK: Tensor, weight_NK: Tensor, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """[M, N]: the allowed error of `product` in this dtype, beyond the rounding of its result
        (`inference.check.dense_twin`); x and weight, the values of the term, in float64. By default eps |x| |w|: a
        format may round intermediate values of that size, even where the result is small."""
        return torch.finfo(dtype).eps * x_MK.norm(dim=-1, keepdim=True) * weight_NK.norm(dim=-1)

    def check(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> None:
        """Check the values of an [N, K] term's tensors, whose names, shapes and dtypes are right.

        Raises CheckpointError, whose message begins with the name of a part, for impossible values: by default, floats
        that are not finite.
        """
        check_finite(parts, *(name for name, part in parts.items() if part.dtype in FLOATS))

    def problem(self, rows: int, columns: int) -> str | None:
        """The reason why a term of this size cannot have this format; None where it can."""
        return None

    def words(self, inputs: Grid | None) -> str:
        """Words for a person, about a layer with inputs on this grid (None: not rounded)."""
        values = ", ".join(f"{key} {value}" for key, value in asdict(self).items())
        return f"{self.kind} {values}".rstrip()

    def entry(self) -> dict[str, Any]:
        """The format as JSON."""
        return {"kind": self.kind, **json_fields(self)}

    @classmethod
    def from_entry(cls, fields: Mapping[str, Any]) -> Self:
        """Inverse of `entry`, without the kind; the types of the fields have been checked."""
        hints = get_type_hints(cls)
        return cls(**{key: _restored(value, hints[key]) for key, value in fields.items()})


def json_fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass as JSON, with lists in the place of tuples."""
    return asdict(value, dict_factory=lambda pairs: {k: list(v) if isinstance(v, tuple) else v for k, v in pairs})


def _restored(value: Any, kind: Any) -> Any:
    """The value of a field of this type from JSON."""
    if is_dataclass(kind) and isinstance(value, Mapping):
        return kind(**value)  # type: ignore[operator]
    return tuple(value) if get_origin(kind) is tuple else value


class StoredTerm(Term):
    """A term that knows its format."""

    format: Format

    def parts(self) -> dict[str, Tensor]:
        """The tensors that `format.parts` names."""
        raise NotImplementedError

    def scaled(self, factor_N: Tensor) -> "StoredTerm | None":
        """The same codes, with the scale of each output times a factor; None where outputs have no scale of their
        own."""
        return None

    def on_grid(self) -> Matrix | None:
        """The same values as codes on a grid, and what is added to them, where training may change the codes
        (`recoded`); None where it may not."""
        return None

    def recoded(self, codes_NK: Tensor) -> "StoredTerm":
        """The term with other codes of `on_grid`, and the same scales."""
        raise NotImplementedError


@dataclass(frozen=True)
class Tensors(StoredTerm):
    """A term that only holds the tensors of its format; the format computes everything from them."""

    format: Format
    held: Mapping[str, Tensor]
    outputs: int
    inputs: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.outputs, self.inputs

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        values = self.format.values(self.held)
        return values if dtype is None else values.to(dtype)

    def parts(self) -> dict[str, Tensor]:
        return dict(self.held)

    def rows(self, part: slice) -> "Tensors":
        known = self.format.parts(*self.shape)
        held = {name: tensor[part] if known[name].by_row else tensor for name, tensor in self.held.items()}
        return Tensors(self.format, held, len(range(*part.indices(self.outputs))), self.inputs)

    @classmethod
    def stacked(cls, terms: Sequence["Tensors"]) -> "Tensors":
        first = terms[0]
        known = first.format.parts(*first.shape)
        across = {name: [term.held[name] for term in terms] for name in first.held}
        for name, each in across.items():
            if not known[name].by_row and any(not torch.equal(each[0], other) for other in each[1:]):
                raise CompressError(
                    f"parts of a layer that were decided one by one differ in {name} of {first.format.kind}, which "
                    "all rows share; leave that layer to another pass"
                )
        held = {name: torch.cat(each) if known[name].by_row else each[0] for name, each in across.items()}
        return cls(first.format, held, sum(term.outputs for term in terms), first.inputs)


def named(index: int, parts: Mapping[str, Any]) -> dict[str, Any]:
    """A term's parts under their names in the layer. index: of the term."""
    return dict(parts) if index == 0 else {f"term{index}_{name}": part for name, part in parts.items()}


def own(index: int, parts: Mapping[str, Any], format_: Format, rows: int, columns: int) -> dict[str, Any]:
    """Inverse of `named`, out of the parts of a whole layer."""
    known = format_.parts(rows, columns)
    return {name: parts[full] for name, full in zip(known, named(index, known), strict=True) if full in parts}


def check_finite(parts: Mapping[str, Tensor], *names: str) -> None:
    """Raises CheckpointError, which names the part, for a part whose values are not all finite."""
    for name in names:
        if name in parts and not bool(torch.isfinite(parts[name]).all()):
            raise CheckpointError(f"{name} holds values that are not finite numbers")
