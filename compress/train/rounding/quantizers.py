"""Quantizers of a layer's weight, input and output during training, started from a pass's decision.

A scale is learned as a factor exp(t) on its initial value: a step of an optimizer changes it by a share of its size,
and it keeps its sign (LSQ learns the scale itself). Scales are float32, or float64 in a model that is.
"""

import copy
from contextlib import suppress
from typing import Literal

import torch
from torch import Tensor, nn

from compress.base.errors import InputError
from compress.model.convolution import Geometry, on_channels, on_samples
from compress.train.rounding.straight_through import rescale, round_by_range, round_with_gradient, whole_zero_point
from compress.weights.decision import Decision
from compress.weights.formats.codes import Codes
from compress.weights.formats.dense import dense
from compress.weights.grid import (
    Grid,
    Quantized,
    encode,
    fit_matrix,
    grouped,
    stored_scale,
    straight_through,
    to_quantized,
    ungrouped,
)
from compress.weights.matrix import Matrix, added, summed
from compress.weights.rounding import ActivationCodes
from compress.weights.terms import StoredTerm

Scales = Literal["learned", "anchored", "fixed", "fitted"]
LEARNED = ("learned", "anchored")
FAR = 4.0  # times the squared error of fitted scales


def learned_scale_and_zero(
    start: Tensor, log_factor: Tensor, zero_point: Tensor, grid: Grid, stored: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The scale start * exp(log_factor) as it will be stored, and a whole zero point, with their gradients."""
    scale = start * log_factor.exp()
    zero = zero_point if grid.symmetric else whole_zero_point(zero_point, grid)
    return straight_through(scale, stored_scale(scale.detach(), grid, stored)), zero


class WeightQuantizer(nn.Module):
    """Rounds a weight [N, K] to codes, with exact zeros where it is pruned.

    scales: `learned` (LSQ; zero points, too), `anchored` (learned, while the initial scales choose the codes:
    `straight_through.rescale`), `fixed` as given, or `fitted` to the current weight at every step (min-max, or the
    range search of the grid). decided: codes to begin with, and other terms, which do not change. kept: bool
    [N, K] or None.
    """

    start: Tensor
    kept: Tensor | None
    zero_point: Tensor

    def __init__(self, decided: Matrix, scales: Scales, kept: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        first, *others = decided.terms
        assert isinstance(first, Quantized)
        self.grid, self.scales, self.scale_dtype, self.dtype = first.grid, scales, first.scale.dtype, dtype
        self.format = first.format if isinstance(first, Codes) else None
        self.others = tuple(others)
        for i, term in enumerate(others):
            self.register_buffer(f"other{i}", term.dequantize())
        start = first.scale.to(dtype)
        zero = torch.zeros_like(start) if first.zero_point is None else first.zero_point.to(dtype)
        self.register_buffer("start", start)
        self.register_buffer("kept", kept)
        learns = scales in LEARNED
        # A binary scale of 0 stays 0: exp(t) changes nothing.
        self.log_factor = nn.Parameter(torch.zeros_like(start), requires_grad=learns)
        if first.zero_point is None:
            self.register_buffer("zero_point", zero)
        else:
            self.zero_point = nn.Parameter(zero, requires_grad=scales == "learned")

    def scale_and_zero(self, weight_NK: Tensor) -> tuple[Tensor, Tensor]:
        """[N, G], or [1, 1] per tensor: the scale as it will be stored and a whole zero point, with their gradients."""
        if self.scales == "fitted":
            return fit_matrix(weight_NK.detach(), self.grid, self.scale_dtype)
        return learned_scale_and_zero(self.start, self.log_factor, self.zero_point, self.grid, self.scale_dtype)

    def in_groups(self, weight_NK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(The numbers to round [..., G, g], scale and zero point [..., G, 1]) of a weight."""
        weight_NK = self.masked(self.without_others(weight_NK))
        scale, zero = self.scale_and_zero(weight_NK)
        groups = grouped(weight_NK, self.grid)
        return groups, scale.reshape(*groups.shape[:-1], 1), zero.reshape(*groups.shape[:-1], 1)

    def forward(self, weight: Tensor) -> Tensor:
        """Values of a weight [N, ...], of its shape and in its dtype. Raises InputError for one of 16 bits."""
        if weight.dtype != self.dtype:
            raise InputError(
                f"a weight is {weight.dtype}, and is rounded as it was prepared, in {self.dtype}; compute in 16 "
                "bits under torch.autocast, without model.to(...) or a param_dtype of MixedPrecisionPolicy"
            )
        weight_NK = weight.flatten(1)
        groups, scale, zero = self.in_groups(weight_NK)
        anchor = self.placed_by(scale)
        if anchor is scale:
            values = round_with_gradient(groups, scale, zero, self.grid, self.scale_dtype)
        else:
            values = rescale(groups, anchor, scale, zero, self.grid, self.scale_dtype)
        values = ungrouped(values, weight_NK.shape, self.grid)
        if self.others:
            total = summed([values.detach().to(self.scale_dtype), *self.constants()])
            values = straight_through(values, total.to(values.dtype))
        return values.reshape(weight.shape)

    def placed_by(self, scale: Tensor) -> Tensor:
        """[..., G, 1] the scale that chooses codes; scale: from `in_groups`."""
        return self.start.reshape(scale.shape) if self.scales == "anchored" else scale

    def constants(self) -> list[Tensor]:
        """[N, K] each: the values of the other terms."""
        return [self.get_buffer(f"other{i}") for i in range(len(self.others))]

    def without_others(self, weight_NK: Tensor) -> Tensor:
        """A weight less the contributions of the other terms: the numbers that codes stand for."""
        for constant in self.constants():
            weight_NK = weight_NK - constant
        return weight_NK

    def masked(self, weight_NK: Tensor) -> Tensor:
        """A weight with exact zeros where it is pruned, through which these get no gradient."""
        return weight_NK if self.kept is None else torch.where(self.kept, weight_NK, 0.0)

    @torch.no_grad()
    def fit(self, weight_NK: Tensor) -> None:
        """Replace the scales by scales fitted to a weight."""
        wanted = self.masked(self.without_others(weight_NK))
        scale, zero = fit_matrix(wanted, self.grid, self.scale_dtype)
        self.start.copy_(scale)
        self.log_factor.zero_()
        self.zero_point.copy_(zero)

    @torch.no_grad()
    def clips(self, weight_NK: Tensor) -> bool:
        """True for scales that were to be learned, never moved, and no longer suit a weight that has changed since:
        fitted ones would have less than a quarter of the squared error."""
        if self.scales not in LEARNED or bool(self.log_factor.any()):
            return False
        fitted = copy.deepcopy(self)
        fitted.fit(weight_NK)
        own, least = (float((each(weight_NK) - weight_NK).square().sum()) for each in (self, fitted))
        return own > FAR * least

    @torch.no_grad()
    def decision(self, weight_NK: Tensor, stored: torch.dtype) -> Decision:
        """The decision to store the codes of `forward` for a weight. stored: the dtype of weights without codes."""
        groups, scale, zero = self.in_groups(weight_NK)
        codes = ungrouped(encode(groups, self.placed_by(scale), zero, self.grid), weight_NK.shape, self.grid)
        scale, zero = scale.squeeze(-1), zero.squeeze(-1)
        made = to_quantized(codes, scale, zero, self.grid, self.scale_dtype)
        first = made if self.format is None else self.format.term(made)
        return Decision(added(first, *self.others), kept=self.kept)

    def extra_repr(self) -> str:
        return f"{self.grid.bits} bits, {self.grid.granularity}, scales {self.scales}"


class FixedScales(WeightQuantizer):
    """Rounds a weight by the scales of a stored term, as K-quants have them. Scales stay, codes change."""

    def __init__(self, term: StoredTerm, codes: Matrix, dtype: torch.dtype) -> None:
        super().__init__(codes, "fixed", None, dtype)
        self.term = term

    @property
    def why_fixed(self) -> str:
        """The words of refusals."""
        return f"scales of {self.term.format.words(None)} stay as they are"

    def scale_and_zero(self, weight_NK: Tensor) -> tuple[Tensor, Tensor]:
        """[N, G]: the scale as the term has it, and the zero point."""
        return self.start, self.zero_point

    def placed_by(self, scale: Tensor) -> Tensor:
        """[..., G, 1] the scale that chooses codes; any where it is 0."""
        return torch.where(scale == 0, 1.0, scale)

    def fit(self, weight_NK: Tensor) -> None:
        """Raises InputError: the scales stay."""
        raise InputError(f"{self.why_fixed}; give another scheme to fit them")

    @torch.no_grad()
    def decision(self, weight_NK: Tensor, stored: torch.dtype) -> Decision:
        """The decision to store the codes of `forward` for a weight."""
        codes = super().decision(weight_NK, stored).weight.terms[0]
        assert isinstance(codes, Quantized)
        return Decision(self.term.recoded(codes.codes))


class MaskedWeight(nn.Module):
    """A weight without codes, with exact zeros where it is pruned."""

    kept: Tensor

    def __init__(self, kept: Tensor) -> None:
        super().__init__()
        self.register_buffer("kept", kept)

    def forward(self, weight: Tensor) -> Tensor:
        """The weight [N, ...] with pruned weights set to zero, which get no gradient."""
        return torch.where(self.kept.reshape(weight.shape), weight, 0.0)

    @torch.no_grad()
    def decision(self, weight_NK: Tensor, stored: torch.dtype) -> Decision:
        """The decision to store the masked weight, in dtype `stored`."""
        return Decision(dense(self.forward(weight_NK).to(stored)), kept=self.kept)


class ScaledCodes(nn.Module):
    """The values of codes that stay as they were decided, like those of a trellis, times a learned factor for each
    output. The layer's own weight has no say. Raises ValueError for a term whose outputs have no scale."""

    values: Tensor

    def __init__(self, term: StoredTerm, scales: Scales, dtype: torch.dtype) -> None:
        super().__init__()
        self.term = term
        self.register_buffer("values", term.dequantize(dtype), persistent=False)
        self.log_factor = nn.Parameter(self.values.new_zeros(len(self.values), 1), requires_grad=scales in LEARNED)
        if term.scaled(self.log_factor.detach().flatten().exp()) is None:
            raise ValueError

    @property
    def now(self) -> StoredTerm:
        """The term with the scales that were learned."""
        found = self.term.scaled(self.log_factor.detach().flatten().exp())
        assert found is not None
        return found

    def forward(self, weight: Tensor) -> Tensor:
        """Values in the shape of a weight [N, ...], as they will be stored, with the gradient of the factors."""
        values = self.values * self.log_factor.exp()
        return straight_through(values, self.now.dequantize().to(values)).reshape(weight.shape)

    @torch.no_grad()
    def decision(self, weight_NK: Tensor, stored: torch.dtype) -> Decision:
        """The decision to store the codes of `forward`."""
        return Decision(added(self.now))


class ActivationQuantizer(nn.Module):
    """Rounds a layer's input or output, as `codes` say.

    The scale of a fixed range per tensor is learned (LSQ, LSQ+) where `scales` says so. Ranges fitted to every token
    have no parameters to learn; their gradient passes through the range, which layers before this one can make smaller.
    """

    start: Tensor

    def __init__(self, codes: ActivationCodes, scales: Scales, geometry: Geometry | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.codes, self.geometry = codes, geometry
        self.learned = codes.scale is not None and scales in LEARNED
        if codes.scale is None:
            return
        start = codes.scale.to(dtype)
        zero = torch.zeros_like(start) if codes.zero_point is None else codes.zero_point.to(dtype)
        self.register_buffer("start", start)
        self.log_factor = nn.Parameter(torch.zeros_like(start), requires_grad=self.learned)
        self.zero_point = nn.Parameter(zero, requires_grad=self.learned and codes.zero_point is not None)

    def forward(self, x: Tensor) -> Tensor:
        """x rounded, in its dtype."""
        if self.codes.scale is None:
            return on_samples(x, self.geometry, lambda rows: round_by_range(rows, self.codes.grid))
        scale, zero = self.scale_and_zero()  # one in all, or one per channel
        return on_channels(x, self.geometry, lambda x: self.fixed(x, scale, zero))

    def scale_and_zero(self) -> tuple[Tensor, Tensor]:
        """[1] or [K]: the scale as it will be stored and a whole zero point, with their gradients."""
        grid = self.codes.grid
        assert self.codes.scale is not None
        scale, zero = learned_scale_and_zero(self.start, self.log_factor, self.zero_point, grid, self.codes.scale.dtype)
        return scale.flatten(), zero.flatten()

    def fixed(self, x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """x [..., K] rounded by a fixed range."""
        work = x.to(scale.dtype)
        return round_with_gradient(work, scale, zero, self.codes.grid, torch.float32).to(x.dtype)

    @torch.no_grad()
    def decided(self) -> ActivationCodes:
        """The codes by which the stored layer rounds its input or output, as `forward` does."""
        if self.codes.scale is None:
            return self.codes
        scale, zero = (t.reshape(1, -1) for t in self.scale_and_zero())
        codes = None if self.codes.zero_point is None else zero.to(torch.int8)
        return ActivationCodes(self.codes.grid, scale.to(self.codes.scale.dtype), codes)

    def extra_repr(self) -> str:
        how = "as it comes" if self.codes.dynamic else "learned" if self.learned else "fixed"
        return f"{self.codes.grid.bits} bits, {how}"


class Shared(nn.Module):
    """The quantizer of another module with the same weight, which has its parameters."""

    def __init__(self, quantizer: nn.Module) -> None:
        super().__init__()
        self.__dict__["quantizer"] = quantizer  # no child, or state dicts had its scales under two names

    def forward(self, weight: Tensor) -> Tensor:
        """Values of the weight, as the other module has them."""
        rounded: Tensor = self.__dict__["quantizer"](weight)
        return rounded


Quantizer = WeightQuantizer | MaskedWeight | ScaledCodes


def weight_quantizer(decision: Decision, scales: Scales, dtype: torch.dtype) -> Quantizer | None:
    """The quantizer of a layer's weight, as was decided; None for a dense weight without a mask. Raises ValueError,
    with the reason, for a weight that cannot be trained."""
    if isinstance(decision.weight.terms[0], Quantized):
        return WeightQuantizer(decision.weight, scales, decision.kept, dtype)
    if decision.dense:
        return None if decision.kept is None else MaskedWeight(decision.kept)
    first, *others = decision.weight.terms
    stored_as = " + ".join(term.words(None) for term in decision.scheme().terms)
    if isinstance(first, StoredTerm) and not others:
        if decision.kept is not None:
            raise ValueError(f"is stored as {stored_as}, in which zeros would not stay zero")
        codes = first.on_grid()
        if codes is not None:
            return FixedScales(first, codes, dtype)
        with suppress(ValueError):
            return ScaledCodes(first, scales, dtype)
    raise ValueError(f"is stored as {stored_as}, of which nothing is trained")
