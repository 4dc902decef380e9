"""What rounds a weight, an input and an output while they are trained, started from what a pass has decided.

A scale is learned as a factor exp(t) on what it was at the beginning: a step of an optimizer changes it by a share of
itself, whatever its size, and it keeps its sign (LSQ learns the scale itself). Scales are float32, or float64 in a
model that is.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from compress.model.convolution import Geometry, samples
from compress.train.learned import rounded, whole
from compress.weights.decision import Decision
from compress.weights.dense import dense
from compress.weights.grid import (
    Quantized,
    encode,
    fit_matrix,
    grouped,
    stored_scale,
    straight_through,
    to_quantized,
)
from compress.weights.rounding import ActivationCodes

Scales = Literal["learned", "fixed", "fitted"]


class WeightQuantizer(nn.Module):
    """Rounds a weight [N, K] to codes, with exact zeros where it is pruned.

    scales: `learned` (LSQ; zero points, too), `fixed` as they were found, or `fitted` to the weight as it is at every
    step (min-max, or what the grid's range search finds). decided: codes to begin with. kept: bool [N, K] or None.
    """

    start: Tensor
    kept: Tensor | None
    zero_point: Tensor

    def __init__(self, decided: Quantized, scales: Scales, kept: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.grid, self.scales, self.scale_dtype = decided.grid, scales, decided.scale.dtype
        start = decided.scale.to(dtype)
        zero = torch.zeros_like(start) if decided.zero_point is None else decided.zero_point.to(dtype)
        self.register_buffer("start", start)
        self.register_buffer("kept", kept)
        learned = scales == "learned"
        # A binary scale of 0 stays 0: exp(t) changes nothing.
        self.log_factor = nn.Parameter(torch.zeros_like(start), requires_grad=learned)
        if decided.zero_point is None:
            self.register_buffer("zero_point", zero)
        else:
            self.zero_point = nn.Parameter(zero, requires_grad=learned)

    def scale_and_zero(self, weight_NK: Tensor) -> tuple[Tensor, Tensor]:
        """[N, G], or [1, 1] per tensor: the scale as it will be stored and a whole zero point, with their gradients."""
        if self.scales == "fitted":
            return fit_matrix(weight_NK.detach(), self.grid, self.scale_dtype)
        scale = self.start * self.log_factor.exp()
        stored = stored_scale(scale.detach(), self.grid, self.scale_dtype)
        zero = self.zero_point if self.grid.symmetric else whole(self.zero_point, self.grid)
        return straight_through(scale, stored), zero

    def forward(self, weight: Tensor) -> Tensor:
        """Values of a weight [N, ...], of its shape and in its dtype."""
        weight_NK = self.masked(weight.flatten(1))
        scale, zero = self.scale_and_zero(weight_NK)
        groups = grouped(weight_NK, self.grid)
        scale, zero = (t.reshape(*groups.shape[:-1], 1) for t in (scale, zero))
        return rounded(groups, scale, zero, self.grid, self.scale_dtype).reshape(weight.shape)

    def masked(self, weight_NK: Tensor) -> Tensor:
        """A weight with exact zeros where it is pruned, through which these get no gradient."""
        return weight_NK if self.kept is None else torch.where(self.kept, weight_NK, 0.0)

    @torch.no_grad()
    def decision(self, weight_NK: Tensor, stored: torch.dtype) -> Decision:
        """What a weight is stored as: the codes of `forward`. stored: of weights that are no codes."""
        weight_NK = self.masked(weight_NK)
        scale, zero = self.scale_and_zero(weight_NK)
        groups = grouped(weight_NK, self.grid)
        codes = encode(
            groups, scale.reshape(*groups.shape[:-1], 1), zero.reshape(*groups.shape[:-1], 1), self.grid
        ).reshape(weight_NK.shape)
        return Decision(to_quantized(codes, scale, zero, self.grid, self.scale_dtype), kept=self.kept)

    def extra_repr(self) -> str:
        return f"{self.grid.bits} bits, {self.grid.granularity}, scales {self.scales}"


class MaskedWeight(nn.Module):
    """A weight that is no codes, with exact zeros where it is pruned."""

    kept: Tensor

    def __init__(self, kept: Tensor) -> None:
        super().__init__()
        self.register_buffer("kept", kept)

    def forward(self, weight: Tensor) -> Tensor:
        """The weight [N, ...] without what is pruned, which gets no gradient."""
        return torch.where(self.kept.reshape(weight.shape), weight, 0.0)

    @torch.no_grad()
    def decision(self, weight_NK: Tensor, stored: torch.dtype) -> Decision:
        """What a weight is stored as, in that dtype."""
        return Decision(dense(self.forward(weight_NK).to(stored)), kept=self.kept)


class ActivationQuantizer(nn.Module):
    """Rounds what a layer is given or returns, as `codes` say.

    Of a fixed range per tensor the scale is learned (LSQ, LSQ+) where `scales` says so. What is fitted to every token
    anew has nothing to learn; its gradient is that of the identity, since nothing lies outside of its range.
    """

    start: Tensor

    def __init__(self, codes: ActivationCodes, scales: Scales, geometry: Geometry | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.codes, self.geometry = codes, geometry
        self.learned = codes.scale is not None and scales == "learned"
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
            return straight_through(x, self.as_it_comes(x.detach()))
        scale, zero = self.scale_and_zero()
        if self.geometry is not None:  # one scale in all, or one per channel
            channel = -1 - len(self.geometry.kernel)
            return self.fixed(x.movedim(channel, -1), scale, zero).movedim(-1, channel)
        return self.fixed(x, scale, zero)

    def as_it_comes(self, x: Tensor) -> Tensor:
        """Fitted to every token, of a convolution to every sample."""
        if self.geometry is None:
            return self.codes.fake_quantize(x)
        return self.codes.fake_quantize(samples(x, self.geometry).flatten(1)).reshape(x.shape)

    def scale_and_zero(self) -> tuple[Tensor, Tensor]:
        """[1] or [K]: the scale as it will be stored and a whole zero point, with their gradients."""
        grid = self.codes.grid
        assert self.codes.scale is not None
        scale = self.start * self.log_factor.exp()
        stored = stored_scale(scale.detach(), grid, self.codes.scale.dtype)
        zero = self.zero_point if grid.symmetric else whole(self.zero_point, grid)
        return straight_through(scale, stored).flatten(), zero.flatten()

    def fixed(self, x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """By a fixed range. x: [..., K]."""
        work = x.to(scale.dtype)
        return rounded(work, scale, zero, self.codes.grid, torch.float32).to(x.dtype)

    @torch.no_grad()
    def decided(self) -> ActivationCodes:
        """How the layer's input or output is stored to be rounded: as `forward` rounds it."""
        if self.codes.scale is None:
            return self.codes
        scale, zero = (t.reshape(1, -1) for t in self.scale_and_zero())
        codes = None if self.codes.zero_point is None else zero.to(torch.int8)
        return ActivationCodes(self.codes.grid, scale.to(self.codes.scale.dtype), codes)

    def extra_repr(self) -> str:
        how = "as it comes" if self.codes.dynamic else "learned" if self.learned else "fixed"
        return f"{self.codes.grid.bits} bits, {how}"


Quantizer = WeightQuantizer | MaskedWeight


def weight_quantizer(decision: Decision, scales: Scales, dtype: torch.dtype) -> Quantizer | None:
    """What rounds a layer's weight as was decided; None where the weight is only numbers. Raises ValueError, with the
    reason, for a weight that is not trained so."""
    first, *others = decision.sum.terms
    if isinstance(first, Quantized) and not others:
        return WeightQuantizer(first, scales, decision.kept, dtype)
    if decision.dense:
        return None if decision.kept is None else MaskedWeight(decision.kept)
    said = " + ".join(term.words(None) for term in decision.scheme().terms)
    raise ValueError(f"is stored as {said}, of which nothing is trained")
