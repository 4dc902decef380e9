"""What a pass is: frozen configuration, the statistics it needs, and `apply`, which turns a site into decisions.

A *site* is a set of layers that read one and the same tensor (q, k and v of an attention, say): they share their
statistics. A pass sees plain tensors; whether the block lives in RAM, on disk or in FSDP shards, and how many ranks
there are, it cannot tell. To add a pass: one file beside this one, one line in `PASSES` in `compress/recipe.py`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from compress.comm import Comm
from compress.errors import InputError
from compress.grid import Granularity, Grid, Quantized, RangeChoice, suggest_groups
from compress.stats import StatisticFactory

Aspect = Literal["dense weight", "quantized weight"]
GridName = Literal["signed-scale", "symmetric", "narrow", "asymmetric"]
SCHEMES = {f"w{bits}a16": bits for bits in range(2, 9)}


@dataclass(frozen=True)
class Site:
    """Layers that read one tensor: name -> weight [N, K] in the working dtype, and the finished statistics by name.

    scale_dtypes gives the dtype in which each layer's scales are stored.
    """

    weights: Mapping[str, Tensor]
    stats: Mapping[str, Any]
    scale_dtypes: Mapping[str, torch.dtype]
    comm: Comm


@dataclass(frozen=True)
class Decision:
    """What a pass decided for one layer, as data, with the figures that its report shows."""

    weight: Quantized
    figures: Mapping[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Base of every pass. Subclasses are frozen dataclasses whose fields are the pass's options."""

    name: ClassVar[str]
    reads: ClassVar[Aspect] = "dense weight"
    writes: ClassVar[Aspect] = "dense weight"

    def wants(self, layer: str) -> bool:
        """Whether this pass treats the layer of this (full) name."""
        return True

    def needs(self) -> Mapping[str, StatisticFactory]:
        """The statistics of a layer's input to collect, by name. None: the pass needs no calibration data."""
        return {}

    @property
    def needs_reference(self) -> bool:
        """Whether statistics compare with the uncompressed model's inputs (a second forward stream)."""
        return False

    @property
    def innermost(self) -> "Pass":
        """The pass itself, without the combinators around it."""
        return self

    def check(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        """Refuse, before any work, layers ({name: (N, K)}) that this configuration cannot treat."""

    def apply(self, site: Site) -> dict[str, Decision]:
        """Decide for every layer of the site. The same decisions on every rank."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class QuantizeWeights(Pass):
    """Options shared by the passes that write quantized weights.

    scheme: w2a16 .. w8a16, the bits of a weight (activations stay 16-bit floats). group_size: consecutive inputs that
    share a scale, -1 for one scale per output channel. grid: `signed-scale` (symmetric, the scale may be negative),
    `symmetric` (as compressed-tensors rounds), `narrow` or `asymmetric`. per_tensor: one scale for the whole matrix.
    clip: shrink each range to the one of least error. Scales are stored in the model's own dtype.
    """

    reads: ClassVar[Aspect] = "dense weight"
    writes: ClassVar[Aspect] = "quantized weight"

    scheme: str = "w4a16"
    group_size: int = 128
    grid: GridName = "signed-scale"
    per_tensor: bool = False
    clip: bool = False

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise InputError(f"scheme {self.scheme!r}; allowed: {', '.join(SCHEMES)} (weight bits 2 to 8)")
        if self.grid not in get_args(GridName):
            raise InputError(f"grid {self.grid!r}; allowed: {', '.join(get_args(GridName))}")
        if self.group_size == 0 or self.group_size < -1:
            raise InputError(f"group size {self.group_size}; allowed: a positive number, or -1 for one per channel")
        if self.per_tensor and self.group_size != -1:
            raise InputError(
                f"per_tensor is one scale in all; group size {self.group_size} has no say: give -1 with it"
            )
        self.weight_grid()

    def weight_grid(self) -> Grid:
        """The grid that these options describe."""
        granularity: Granularity = "group" if self.group_size > 0 else "channel"
        if self.per_tensor:
            granularity = "tensor"
        chosen: RangeChoice = "mse" if self.clip else "minmax"
        return Grid(
            bits=SCHEMES[self.scheme],
            symmetric=self.grid != "asymmetric",
            narrow=self.grid == "narrow",
            signed_scale=self.grid == "signed-scale",
            granularity=granularity,
            group_size=self.group_size if granularity == "group" else None,
            range_choice=chosen,
        )

    def check(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        if self.per_tensor or self.group_size < 0:
            return
        bad = [name for name, (_, columns) in shapes.items() if columns % self.group_size]
        if bad:
            widths = sorted({columns for _, columns in shapes.values()})
            raise InputError(
                f"group size {self.group_size} does not divide the {shapes[bad[0]][1]} inputs of "
                f"{bad[0]} ({len(bad)} layers in all); {suggest_groups(widths)}"
            )


@dataclass(frozen=True, kw_only=True)
class Only(Pass):
    """`inner`, on the layers whose full name matches one of the shell-style `patterns` (or on none of them: `but`)."""

    name: ClassVar[str] = "only"

    inner: Pass
    patterns: tuple[str, ...]
    but: bool = False

    @property
    def reads(self) -> Aspect:  # type: ignore[override]
        return self.inner.reads

    @property
    def writes(self) -> Aspect:  # type: ignore[override]
        return self.inner.writes

    @property
    def innermost(self) -> Pass:
        return self.inner.innermost

    def wants(self, layer: str) -> bool:
        return any(fnmatchcase(layer, p) for p in self.patterns) != self.but and self.inner.wants(layer)

    def needs(self) -> Mapping[str, StatisticFactory]:
        return self.inner.needs()

    @property
    def needs_reference(self) -> bool:
        return self.inner.needs_reference

    def check(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        self.inner.check(shapes)

    def apply(self, site: Site) -> dict[str, Decision]:
        return self.inner.apply(site)


def only(inner: Pass, *patterns: str) -> Only:
    """The pass on the layers that match: `only(GPTQ(scheme="w3a16"), "*.mlp.*")`."""
    return Only(inner=inner, patterns=patterns)


def but(inner: Pass, *patterns: str) -> Only:
    """The pass on the layers that do not match: `but(RTN(), "*.down_proj")`."""
    return Only(inner=inner, patterns=patterns, but=True)


def solve_rows(comm: Comm, weight_NK: Tensor, grid: Grid, solve: Callable[[Tensor, slice], Quantized]) -> Quantized:
    """Solve a weight whose output rows are independent: each rank its share, then all of them gathered.

    `solve(rows of the weight, which rows)` returns those rows, with one scale row for each.
    """
    if not comm.active:
        return solve(weight_NK, slice(0, len(weight_NK)))
    mine = comm.rows_of(len(weight_NK))
    part = solve(weight_NK[mine], mine)
    zero_point = None if part.zero_point is None else comm.gather_rows(part.zero_point, len(weight_NK))
    codes, scale = comm.gather_rows(part.codes, len(weight_NK)), comm.gather_rows(part.scale, len(weight_NK))
    return Quantized(codes, scale, zero_point, grid)
