"""What the passes that write quantized weights share: the options of number formats and of fixed ranges."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

import torch

from compress.calibration.calibrators import OPTIONS as CALIBRATORS
from compress.calibration.calibrators import Range, calibrator, scale_and_zero_point
from compress.calibration.stats import StatisticFactory
from compress.errors import CompressError, InputError, one_of
from compress.passes.base import Aspect, Pass, Site
from compress.weights.grid import DEFAULT_GROUP, Granularity, Grid, NumberType, RangeChoice, suggest_groups, usual_group
from compress.weights.rounding import ActivationCodes

GridName = Literal["signed-scale", "symmetric", "narrow", "asymmetric"]
ActivationGrid = Literal["symmetric", "asymmetric", "unsigned"]
Activations = Literal["dynamic", "static"]
Outputs = Literal["none", "static"]
SCHEMES = {f"w{bits}a16": bits for bits in range(2, 9)} | {"w4a8": 4, "w8a8": 8, "fp8": 8}
# Weights and inputs of 8 bits, one scale per output channel, inputs dynamic or static.
WHOLE = ("w8a8", "fp8")
PERCENTILE = 99.99


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
    `moving-average`, `percentile` (see `percentile`), `mse` or `kl` (`compress.calibration.calibrators`).
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
