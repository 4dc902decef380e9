"""The common part of passes that round weights and, where the scheme says so, layers' inputs and outputs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from compress.base.errors import CompressError, InputError, one_of
from compress.passes.options.activation_format import ActivationFormat
from compress.passes.options.fixed_ranges import FixedRanges
from compress.passes.protocol.base import Aspect
from compress.passes.protocol.sites import Site
from compress.passes.protocol.stages import Decide, Fix, Rewrite, Stage
from compress.solvers.outliers import check_share
from compress.solvers.statistics.calibrators import Range, scale_and_zero_point
from compress.solvers.statistics.input_statistics import StatisticFactory
from compress.weights.formats.sparse import SparseRows
from compress.weights.grid import Grid
from compress.weights.number_formats import WITHOUT_GROUPS
from compress.weights.rounding import ActivationCodes
from compress.weights.scheme import Scheme


@dataclass(frozen=True, kw_only=True)
class QuantizeWeights(FixedRanges, ActivationFormat):
    """A pass that rounds weights, inputs and outputs. Its options are those of the formats and of the fixed ranges."""

    outliers: float = 0.0
    """0 to 0.25: share of the weights that stay exact, those worth it most; 32 bits for each of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self.outliers)
        if self.outliers and (self.per_tensor or self.scheme in WITHOUT_GROUPS):
            given = "per_tensor" if self.per_tensor else f"scheme {self.scheme}"
            raise InputError(
                f"outliers go beside codes in groups or channels, not with {' or '.join(WITHOUT_GROUPS)}; drop {given}"
            )
        if self.activations == "static" or self.outputs == "static":
            self.fixed_range(self.activation_grid_of("tensor"))
        elif self.calibrator != "minmax":
            raise InputError(f"calibrator {self.calibrator!r} is for fixed ranges; give activations=static with it")
        elif self.histograms:
            raise InputError("histograms are of fixed ranges; give activations=static or outputs=static with them")

    def stored(self, layer: str, shape: tuple[int, int], table: bool = False) -> Scheme | None:
        found = super().stored(layer, shape, table)
        assert found is not None
        return beside_outliers(found, self.outliers, shape)

    def needs(self) -> Mapping[str, StatisticFactory]:
        grid = self.input_grid()
        if grid is not None and grid.global_scales:
            return {"range": self.fixed_range(self.activation_grid_of("tensor"))}
        if grid is None or self.activations == "dynamic":
            return {}
        unsigned = self.activation_grid == "unsigned"
        return {"range": self.fixed_range(replace(grid, symmetric=True, signed=False) if unsigned else grid)}

    @property
    def decide_stage(self) -> Decide:
        """The stage that rounds weights and inputs."""
        return replace(super().decide_stage, rounds_inputs=self.input_grid() is not None)

    @property
    def stages(self) -> tuple[Stage, ...]:
        grid = self.output_grid()
        if grid is None:
            return (self.decide_stage,)
        return self.decide_stage, Fix({"range": self.fixed_range(grid)}, self.output_codes)

    def output_codes(self, stats: Mapping[str, Any], scale_dtype: torch.dtype) -> ActivationCodes:
        """The rounding of a layer's output, from its finished statistics."""
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
        if grid.global_scales:
            largest: Range = site.stats["range"]
            grid = grid.reaching(float(torch.maximum(-largest.lowest, largest.highest).max()))
        if self.activations == "dynamic":
            return dict.fromkeys(site.weights, ActivationCodes(grid))
        limits: Range = site.stats["range"]
        if self.activation_grid == "unsigned" and bool((limits.lowest < 0).any()):
            raise CompressError(
                f"the input of {next(iter(site.weights))} goes down to {float(limits.lowest.amin()):.4g}, and unsigned "
                "codes begin at 0; give activation_grid=asymmetric, or this pass only to layers behind a ReLU (`only`)"
            )
        return {name: fixed_codes(limits, grid, dtype) for name, dtype in site.scale_dtypes.items()}


def beside_outliers(scheme: Scheme, share: float, shape: tuple[int, int]) -> Scheme:
    """The scheme with such a share of a layer's weights exact beside its other terms."""
    if not share:
        return scheme
    return replace(scheme, terms=(*scheme.terms, SparseRows(entries=round(share * shape[0] * shape[1]))))


def fixed_codes(found: Range, grid: Grid, scale_dtype: torch.dtype) -> ActivationCodes:
    """The rounding of values by a range that calibration has found, one per tensor or per channel."""
    scale, zero_point = (t.reshape(1, -1) for t in scale_and_zero_point(found, grid, scale_dtype))
    return ActivationCodes(grid, scale.to(scale_dtype), None if grid.symmetric else zero_point.to(torch.int8))


@dataclass(frozen=True, kw_only=True)
class FoldThenRound(QuantizeWeights):
    """A method that folds scales and then rounds."""

    rounding: Literal["nearest", "none"] = "nearest"
    """Rounding once the pass has folded; none leaves that to a later pass (gptq, say)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("rounding", self.rounding, ("nearest", "none"))
        if self.histograms and not self.rounds:
            raise InputError("histograms are of ranges that a pass fixes as it rounds; give them to the pass that does")
        if not self.rounds and self.outputs != "none":
            raise InputError("rounding=none leaves outputs to the pass that rounds; give outputs there")

    @property
    def writes(self) -> Aspect:  # type: ignore[override]
        return "quantized weight" if self.rounds else "dense weight"

    @property
    def rounds(self) -> bool:
        """True if the pass rounds once it has folded."""
        return self.rounding == "nearest"

    @property
    def rewrite_stage(self) -> Rewrite:
        """The stage that finds the scales of a fold."""
        raise NotImplementedError

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (self.rewrite_stage, *(super().stages if self.rounds else ()))
