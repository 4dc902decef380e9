"""What a pass is: frozen configuration, the statistics it needs, and `apply`, which turns a site into decisions.

A *site* is a set of layers that read one and the same tensor (q, k and v of an attention, say): they share their
statistics. A pass sees plain tensors; whether the block lives in RAM, on disk or in FSDP shards, and how many ranks
there are, it cannot tell. To add a pass: one file beside this one, one line in `PASSES` in `compress/recipe.py`.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from compress.calibrators import OPTIONS as CALIBRATORS
from compress.calibrators import Range, calibrator, scale_and_zero_point
from compress.comm import Comm
from compress.errors import CompressError, InputError, one_of
from compress.fold import Merge, reduce_scales
from compress.grid import (
    DEFAULT_GROUP,
    Granularity,
    Grid,
    NumberType,
    Quantized,
    RangeChoice,
    suggest_groups,
    usual_group,
)
from compress.scheme import ActivationCodes
from compress.stats import StatisticFactory

Aspect = Literal["dense weight", "quantized weight"]
GridName = Literal["signed-scale", "symmetric", "narrow", "asymmetric"]
ActivationGrid = Literal["symmetric", "asymmetric", "unsigned"]
Activations = Literal["dynamic", "static"]
Outputs = Literal["none", "static"]
# What a pass is about: the layers inside the blocks, the token embedding and the output head, or key-value caches.
Treats = Literal["layers", "embeddings", "caches"]
SCHEMES = {f"w{bits}a16": bits for bits in range(2, 9)} | {"w4a8": 4, "w8a8": 8, "fp8": 8}
# Weights and inputs of 8 bits, one scale per output channel, inputs dynamic or static.
WHOLE = ("w8a8", "fp8")
PERCENTILE = 99.99


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
class Reader:
    """A layer that reads a producer: its weight [N, K], the statistics of its input, and the producer's channel behind
    each of its inputs, channel_of_K (`compress.fold`)."""

    weight: Tensor
    stats: Mapping[str, Any]
    channel_of_K: Tensor
    scale_dtype: torch.dtype


@dataclass(frozen=True)
class FoldSite:
    """A producer of `channels` channels and the layers of this pass that read it."""

    readers: Mapping[str, Reader]
    channels: int
    comm: Comm

    def merged(self, value: Callable[[Reader], Tensor], how: Merge) -> Tensor:
        """[C] from a value [K] of each reader, over all inputs that come from a channel; 0 where none does."""
        values = torch.cat([value(reader) for reader in self.readers.values()])
        maps = torch.cat([reader.channel_of_K for reader in self.readers.values()])
        return reduce_scales(values, maps, self.channels, how, empty=0.0)


@dataclass(frozen=True)
class Scaling:
    """By how much each channel of a producer is divided, [C], positive and finite, and figures for the report."""

    scale_C: Tensor
    figures: Mapping[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Decision:
    """What a pass decided for one layer, as data: the codes of its weight, how its input and its output are rounded
    (None: they are not), and the figures that its report shows."""

    weight: Quantized
    figures: Mapping[str, float | int | str] = field(default_factory=dict)
    inputs: ActivationCodes | None = None
    outputs: ActivationCodes | None = None


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Base of every pass. Subclasses are frozen dataclasses whose fields are the pass's options."""

    name: ClassVar[str]
    treats: ClassVar[Treats] = "layers"
    reads: ClassVar[Aspect] = "dense weight"
    writes: ClassVar[Aspect] = "dense weight"

    def wants(self, layer: str) -> bool:
        """Whether this pass treats the layer of this (full) name."""
        return True

    def needs(self) -> Mapping[str, StatisticFactory]:
        """The statistics of a layer's input to collect, by name. None: the pass needs no calibration data."""
        return {}

    def fold_needs(self) -> Mapping[str, StatisticFactory]:
        """The statistics of layers' inputs from which `scaling` decides, by name. None: the pass folds no scales."""
        return {}

    def scaling(self, site: FoldSite) -> Scaling:
        """By how much to divide what the site's layers read, before this pass decides about them. The same on every
        rank."""
        raise NotImplementedError

    def output_needs(self) -> Mapping[str, StatisticFactory]:
        """The statistics to collect, by name, of what a layer returns once `apply` has decided about it, bias included.
        None: the output stays as it is."""
        return {}

    def output_codes(self, stats: Mapping[str, Any], scale_dtype: torch.dtype) -> ActivationCodes:
        """How a layer's output is rounded, from its finished statistics. The same on every rank."""
        raise NotImplementedError

    @property
    def rounds(self) -> bool:
        """Whether the pass decides about layers (`apply`), after it has folded scales or without."""
        return True

    @property
    def rounds_inputs(self) -> bool:
        """Whether decisions say how a layer's input is rounded, too."""
        return False

    @property
    def calibrated(self) -> bool:
        """Whether the pass needs calibration data."""
        return bool(self.needs() or self.fold_needs() or self.output_needs())

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

    def fitted(self, widths: Collection[int]) -> "Pass":
        """This pass for layers of so many inputs: with what its options leave open settled."""
        return self

    def apply(self, site: Site) -> dict[str, Decision]:
        """Decide for every layer of the site. The same decisions on every rank."""
        raise NotImplementedError


def check_calibrator(name: str, percentile: float) -> None:
    """Raises InputError for a calibrator that is not known, and a percentile beside another one."""
    one_of("calibrator", name, CALIBRATORS)
    if name != "percentile" and percentile != PERCENTILE:
        raise InputError(f"percentile is of the calibrator 'percentile', not of {name!r}; leave it out")


def calibrated_range(grid: Grid, name: str, percentile: float, histograms: bool) -> StatisticFactory:
    """The statistic that finds a fixed range, from the options of a pass."""
    options = {"percentile": percentile} if name == "percentile" else {}
    return calibrator(name, grid, keep_histogram=histograms, **options)


@dataclass(frozen=True, kw_only=True)
class QuantizeWeights(Pass):
    """Options shared by the passes that write quantized weights.

    scheme: w2a16 .. w8a16, the bits of a weight beside 16-bit floats; w4a8 and w8a8 round what a layer multiplies to
    int8, too; fp8 rounds both to float8 (e4m3). group_size: consecutive inputs that share a scale, -1 for one scale per
    output channel, 0 for what the scheme usually has: -1 of w8a8 and fp8, otherwise 128 or, where that does not divide
    the inputs of all layers of the pass, 64, 32 (kernels know these) or the largest size below 128 that does: one size,
    because not every reader takes several. Where none from 16 up divides them all (a CNN whose first layer has 27
    inputs), each layer has the usual size of its own, or one scale per output channel. grid: `signed-scale` (symmetric,
    the scale may be negative), `symmetric` (as compressed-tensors rounds), `narrow` or `asymmetric`. per_tensor: one
    scale for the whole matrix.
    clip: shrink each range to the one of least error (fp8: widen it). Scales are stored in the model's own dtype.
    activations: 8-bit inputs are fitted to every token (of a convolution: every sample) as it comes (`dynamic`) or by
    calibration (`static`).
    activation_grid: `symmetric`; static only: `asymmetric`, or `unsigned` for inputs that are never negative (after a
    ReLU; a negative one is an error), whose 256 codes begin at 0. calibrator: how a static range is chosen: `minmax`,
    `moving-average`, `percentile` (see `percentile`), `mse` or `kl` (`compress.calibrators`).
    outputs: `static` also rounds what a layer returns, bias included, to 8 bits by a fixed range per tensor, found by
    the calibrator; as activation_grid says, but asymmetric where that is unsigned.
    per_channel_inputs: a fixed range for each input channel instead of one per tensor. For research: no format and no
    kernel holds it, so the model stays in memory.
    histograms: keep a histogram of what each static range was chosen from, for `compress inspect OUT --calibration`.
    """

    reads: ClassVar[Aspect] = "dense weight"
    writes: ClassVar[Aspect] = "quantized weight"

    scheme: str = "w4a16"
    group_size: int = 0
    grid: GridName = "signed-scale"
    per_tensor: bool = False
    clip: bool = False
    activations: Activations = "dynamic"
    activation_grid: ActivationGrid = "symmetric"
    outputs: Outputs = "none"
    per_channel_inputs: bool = False
    calibrator: str = "minmax"
    percentile: float = PERCENTILE
    histograms: bool = False

    def __post_init__(self) -> None:
        if self.scheme not in SCHEMES:
            raise InputError(f"scheme {self.scheme!r}; allowed: {', '.join(SCHEMES)} (weight bits 2 to 8)")
        if self.grid not in get_args(GridName):
            raise InputError(f"grid {self.grid!r}; allowed: {', '.join(get_args(GridName))}")
        if self.group_size < -1:
            raise InputError(f"group size {self.group_size}; allowed: a positive number, or -1 for one per channel")
        if self.per_tensor and self.group_size > 0:
            raise InputError(
                f"per_tensor is one scale in all; group size {self.group_size} has no say: give -1 with it"
            )
        if self.group_size == 0 and (self.per_tensor or self.scheme in WHOLE):
            object.__setattr__(self, "group_size", -1)
        if self.scheme == "fp8" and self.grid == "signed-scale":
            # The default of integers; a float's largest code is the same on both sides, so there is nothing to choose.
            object.__setattr__(self, "grid", "symmetric")
        self._check_activations()
        self._check_calibrator()
        self.weight_grid()

    def _check_activations(self) -> None:
        for option, allowed in (
            ("activations", Activations),
            ("activation_grid", ActivationGrid),
            ("outputs", Outputs),
        ):
            if getattr(self, option) not in get_args(allowed):
                raise InputError(f"{option} {getattr(self, option)!r}; allowed: {', '.join(get_args(allowed))}")
        if self.scheme == "fp8" and (self.grid in ("asymmetric", "narrow") or self.activation_grid != "symmetric"):
            raise InputError("fp8 is symmetric: a float has no zero point; leave grid and activation_grid out")
        if self.scheme in WHOLE:
            if self.group_size != -1 or self.grid == "asymmetric":
                raise InputError(
                    f"{self.scheme} has symmetric weights and one scale per output channel: 8-bit products know no "
                    "groups; leave group_size and grid out"
                )
            if self.activations == "dynamic" and self.activation_grid != "symmetric":
                raise InputError(
                    "activations fitted to every token are symmetric; give activations=static with "
                    f"{self.activation_grid}"
                )
            if self.activations == "dynamic" and self.per_channel_inputs:
                raise InputError(
                    "per_channel_inputs are fixed ranges, and activations are fitted to every token; give "
                    "activations=static with it"
                )
            return
        asked = self.activations != "dynamic" or self.outputs != "none" or self.per_channel_inputs
        if asked or self.activation_grid != "symmetric":
            hint = "its inputs are dynamic and symmetric" if self.scheme == "w4a8" else "its inputs are not rounded"
            raise InputError(
                "activations, activation_grid, outputs and per_channel_inputs are for "
                f"{' and '.join(WHOLE)}; {self.scheme}: {hint}"
            )

    def _check_calibrator(self) -> None:
        check_calibrator(self.calibrator, self.percentile)
        if self.activations == "static" or self.outputs == "static":
            self._calibrator(self._activation_grid("tensor"))
        elif self.calibrator != "minmax":
            raise InputError(f"calibrator {self.calibrator!r} is for fixed ranges; give activations=static with it")
        elif self.histograms:
            raise InputError("histograms are of fixed ranges; give activations=static or outputs=static with them")

    def _calibrator(self, grid: Grid) -> StatisticFactory:
        return calibrated_range(grid, self.calibrator, self.percentile, self.histograms)

    def input_grid(self) -> Grid | None:
        """The 8-bit grid of a layer's input; None where it stays as it is. Unsigned codes u are stored as u - 128: an
        asymmetric grid whose zero point is -128."""
        if self.scheme.endswith("a16"):
            return None
        granularity: Granularity = "channel" if self.per_channel_inputs else "tensor"
        return self._activation_grid("token" if self.activations == "dynamic" else granularity)

    def output_grid(self) -> Grid | None:
        """The 8-bit grid of a layer's output; None where it stays as it is."""
        return self._activation_grid("tensor") if self.outputs == "static" else None

    def _activation_grid(self, granularity: Granularity) -> Grid:
        symmetric = self.activation_grid == "symmetric"
        return Grid(bits=8, symmetric=symmetric, granularity=granularity, type=self._number_type)

    @property
    def _number_type(self) -> NumberType:
        return "float" if self.scheme == "fp8" else "int"

    @property
    def rounds_inputs(self) -> bool:
        return self.rounds and self.input_grid() is not None

    def needs(self) -> Mapping[str, StatisticFactory]:
        grid = self.input_grid()
        if grid is None or self.activations == "dynamic":
            return {}
        unsigned = self.activation_grid == "unsigned"
        return {"range": self._calibrator(replace(grid, symmetric=True, signed=False) if unsigned else grid)}

    def output_needs(self) -> Mapping[str, StatisticFactory]:
        grid = self.output_grid() if self.rounds else None
        return {} if grid is None else {"range": self._calibrator(grid)}

    def output_codes(self, stats: Mapping[str, Any], scale_dtype: torch.dtype) -> ActivationCodes:
        grid = self.output_grid()
        assert grid is not None
        return fixed_codes(stats["range"], grid, scale_dtype)

    def input_codes(self, site: Site) -> dict[str, ActivationCodes]:
        """{layer: how its input is rounded}; empty where it is not. Layers of one site have one input, so one scale.

        Raises CompressError for negative inputs where they are to be unsigned.
        """
        grid = self.input_grid()
        if grid is None:
            return {}
        if self.activations == "dynamic":
            return dict.fromkeys(site.weights, ActivationCodes(grid))
        found: Range = site.stats["range"]
        if self.activation_grid == "unsigned" and bool((found.lowest < 0).any()):
            raise CompressError(
                f"the input of {next(iter(site.weights))} goes down to {float(found.lowest.amin()):.4g}, and unsigned "
                "codes begin at 0; give activation_grid=asymmetric, or this pass only to layers behind a ReLU (`only`)"
            )
        return {name: fixed_codes(found, grid, dtype) for name, dtype in site.scale_dtypes.items()}

    def weight_grid(self) -> Grid:
        """The grid that these options describe; of groups of 128 while the size is left open (see `fitted`)."""
        granularity: Granularity = "channel" if self.group_size == -1 else "group"
        if self.per_tensor:
            granularity = "tensor"
        chosen: RangeChoice = "mse" if self.clip else "minmax"
        return Grid(
            bits=SCHEMES[self.scheme],
            symmetric=self.grid != "asymmetric",
            narrow=self.grid == "narrow",
            signed_scale=self.grid == "signed-scale",
            granularity=granularity,
            group_size=(self.group_size or DEFAULT_GROUP) if granularity == "group" else None,
            range_choice=chosen,
            type=self._number_type,
        )

    def check(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        if self.per_tensor or self.group_size <= 0:
            return
        bad = [name for name, (_, columns) in shapes.items() if columns % self.group_size]
        if bad:
            widths = {columns for _, columns in shapes.values()}
            raise InputError(
                f"group size {self.group_size} does not divide the {shapes[bad[0]][1]} inputs of "
                f"{bad[0]} ({len(bad)} layers in all); {suggest_groups(widths)}"
            )

    def fitted(self, widths: Collection[int]) -> Pass:
        return self if self.group_size else replace(self, group_size=usual_group(widths))


def fixed_codes(found: Range, grid: Grid, scale_dtype: torch.dtype) -> ActivationCodes:
    """How values are rounded by a range that calibration has found, one per tensor or per channel."""
    scale, zero_point = (t.reshape(1, -1) for t in scale_and_zero_point(found, grid, scale_dtype))
    return ActivationCodes(grid, scale.to(scale_dtype), None if grid.symmetric else zero_point.to(torch.int8))


@dataclass(frozen=True, kw_only=True)
class FoldThenRound(QuantizeWeights):
    """A method that folds scales and then rounds. rounding: `nearest`, or `none` to leave it to a later pass."""

    rounding: Literal["nearest", "none"] = "nearest"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounding not in ("nearest", "none"):
            raise InputError(f"rounding {self.rounding!r}; allowed: nearest, none")
        if self.histograms and not self.rounds:
            raise InputError("histograms are of ranges that a pass fixes as it rounds; give them to the pass that does")
        if not self.rounds and self.outputs != "none":
            raise InputError("rounding=none leaves outputs to the pass that rounds; give outputs there")

    @property
    def writes(self) -> Aspect:  # type: ignore[override]
        return "quantized weight" if self.rounds else "dense weight"

    @property
    def rounds(self) -> bool:
        return self.rounding == "nearest"


@dataclass(frozen=True, kw_only=True)
class Only(Pass):
    """`inner`, on the layers whose full name matches one of the shell-style `patterns` (or on none of them: `but`)."""

    name: ClassVar[str] = "only"

    inner: Pass
    patterns: tuple[str, ...]
    but: bool = False

    @property
    def treats(self) -> Treats:  # type: ignore[override]
        return self.inner.treats

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

    def fold_needs(self) -> Mapping[str, StatisticFactory]:
        return self.inner.fold_needs()

    def scaling(self, site: FoldSite) -> Scaling:
        return self.inner.scaling(site)

    def output_needs(self) -> Mapping[str, StatisticFactory]:
        return self.inner.output_needs()

    def output_codes(self, stats: Mapping[str, Any], scale_dtype: torch.dtype) -> ActivationCodes:
        return self.inner.output_codes(stats, scale_dtype)

    @property
    def rounds(self) -> bool:
        return self.inner.rounds

    @property
    def rounds_inputs(self) -> bool:
        return self.inner.rounds_inputs

    @property
    def needs_reference(self) -> bool:
        return self.inner.needs_reference

    def check(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        self.inner.check(shapes)

    def fitted(self, widths: Collection[int]) -> Pass:
        return replace(self, inner=self.inner.fitted(widths))

    def apply(self, site: Site) -> dict[str, Decision]:
        return self.inner.apply(site)


def only(inner: Pass, *patterns: str) -> Only:
    """The pass on the layers that match: `only(GPTQ(scheme="w3a16"), "*.mlp.*")`."""
    return Only(inner=inner, patterns=patterns)


def but(inner: Pass, *patterns: str) -> Only:
    """The pass on the layers that do not match: `but(RTN(), "*.down_proj")`."""
    return Only(inner=inner, patterns=patterns, but=True)


def quadratic(comm: Comm, error_NK: Tensor, hessian_KK: Tensor) -> float:
    """tr(E H E^T), each rank computing its share of the rows."""
    mine = error_NK[comm.rows_of(len(error_NK))]
    return float(comm.all_reduce(((mine @ hessian_KK) * mine).sum()))


def solve_rows(comm: Comm, weight_NK: Tensor, grid: Grid, solve: Callable[[Tensor, slice], Quantized]) -> Quantized:
    """Solve a weight whose output rows are independent: each rank its share, then all of them gathered.

    `solve(rows of the weight, which rows)` returns those rows, with one scale row for each.
    """
    if not comm.active or len(weight_NK) < comm.world:  # a share without rows has no shape to solve
        return solve(weight_NK, slice(0, len(weight_NK)))
    mine = comm.rows_of(len(weight_NK))
    part = solve(weight_NK[mine], mine)
    zero_point = None if part.zero_point is None else comm.gather_rows(part.zero_point, len(weight_NK))
    # As bytes: collectives know no float8.
    codes = comm.gather_rows(part.codes.view(torch.uint8), len(weight_NK)).view(part.codes.dtype)
    return Quantized(codes, comm.gather_rows(part.scale, len(weight_NK)), zero_point, grid)
