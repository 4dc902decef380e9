"""Layers whose weight is a sum of terms, or a term of a format without a kernel.

Codes and sparse rows are multiplied by one call (`with_entries`): the first term whose kernels add entries, and the
first term of entries. Every other term has a product of its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from compress.inference.layers.base import QuantLinear, kernel_of
from compress.inference.layers.sparse import SparseLinear
from compress.kernels import reference
from compress.kernels.routes import Route, with_entries
from compress.weights.grid import straight_through
from compress.weights.matrix import summed
from compress.weights.scale_numbers import FLOAT8
from compress.weights.scheme import Scheme
from compress.weights.terms import FLOATS, Format, named, own

# {part of a fixed range in a checkpoint: the buffer that holds it}.
FIXED = {
    "input_scale": "input_scale",
    "input_zero_point": "input_zero",
    "output_scale": "output_scale",
    "output_zero_point": "output_zero",
}


class HeldTerm(nn.Module):
    """A term of a format without a kernel: its tensors, and the product by `Format.product`."""

    def __init__(self, format_: Format, in_features: int, out_features: int) -> None:
        super().__init__()
        self.format, self.in_features, self.out_features = format_, in_features, out_features
        self.bytes: dict[str, torch.dtype] = {}

    def fill(self, parts: Mapping[str, Tensor], rows: slice) -> None:
        """Take all of a term's tensors from a checkpoint; existing buffers take their values."""
        if self._buffers:
            for name, part in parts.items():
                self.get_buffer(name).copy_(part.view(torch.uint8) if name in self.bytes else part)
            return
        kept = self.format.as_bytes
        self.bytes = {name: part.dtype for name, part in parts.items() if part.dtype == FLOAT8 or name in kept}
        for name, part in parts.items():
            # Held as bytes: `model.to(dtype)` would convert floats.
            self.register_buffer(name, part.view(torch.uint8) if name in self.bytes else part)

    def parts(self, rows: slice) -> dict[str, Tensor]:
        """Inverse of `fill`."""
        return self.held

    @property
    def held(self) -> dict[str, Tensor]:
        """{name: tensor} of the term, in the stored dtypes."""
        named = self.named_buffers(recurse=False)
        return {name: part.view(self.bytes[name]) if name in self.bytes else part for name, part in named}

    @property
    def dtype(self) -> torch.dtype | None:
        """The stored dtype of its numbers; None for a term of codes alone."""
        kept = self.format.as_bytes
        return next((t.dtype for name, t in self.held.items() if t.dtype in FLOATS and name not in kept), None)

    def dequantize(self) -> Tensor:
        """The values [N, K] of the term."""
        return self.format.read(self.held, self.out_features, self.in_features).dequantize()

    def forward(self, x: Tensor) -> Tensor:
        return self.format.product(x, self.held)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Does nothing: the layer saves its terms."""

    def _load_from_state_dict(self, *_: Any) -> None:
        """Does nothing: the layer loads its terms."""


class SumLinear(QuantLinear):
    """y = sum over the terms of x W_i^T, + b. Every term multiplies the layer's input (after its rounding, if any), by
    its own kernel where its format has one."""

    stackable: ClassVar[bool] = False
    input_scale: Tensor | None
    input_zero: Tensor | None
    input_global: Tensor | None
    KEPT = ("input_global",)
    output_scale: Tensor | None
    output_zero: Tensor | None

    def __init__(self, scheme: Scheme, in_features: int, out_features: int, bias: Tensor | None) -> None:
        super().__init__(scheme, in_features, out_features, bias)
        self.summands = nn.ModuleList(_summand(term, in_features, out_features) for term in scheme.terms)
        self._together = _together(scheme.terms)
        levels = scheme.global_inputs
        self.fixed = FIXED if levels is None else {levels.of_inputs: "input_global"}
        for name in (*FIXED.values(), "input_global"):
            self.register_buffer(name, None)

    @property
    def dtype(self) -> torch.dtype:
        first: Any = self.summands[0]
        found: torch.dtype | None = first.dtype
        return self._dtype if found is None else found

    def fill(self, parts: Mapping[str, Tensor], rows: slice) -> None:
        assert rows == self.whole(), "sums are not filled by rows"
        for i, (term, summand) in enumerate(zip(self.scheme.terms, self.summands, strict=True)):
            held = own(i, parts, term, self.out_features, self.in_features)
            summand.fill(held, rows)  # type: ignore[operator]
        for part, name in self.fixed.items():
            held = getattr(self, name)
            if part in parts and held is not None:
                held.copy_(parts[part].reshape(1))
            elif part in parts:
                setattr(self, name, parts[part].reshape(1).clone())
            if part in parts and name in self.KEPT:
                self._stored_dtypes[name] = parts[part].dtype

    def parts(self, rows: slice) -> dict[str, Tensor]:
        assert rows == self.whole(), "sums are not read by rows"
        parts: dict[str, Tensor] = {}
        for i, (term, summand) in enumerate(zip(self.scheme.terms, self.summands, strict=True)):
            known = term.parts(self.out_features, self.in_features)
            held: dict[str, Tensor] = summand.parts(rows)  # type: ignore[operator]
            parts |= named(i, {name: part for name, part in held.items() if name in known})
        if self.scheme.terms[0].needs_shape:
            parts["weight_shape"] = torch.tensor([self.out_features, self.in_features], device=self.device)
        fixed = {part: getattr(self, name) for part, name in self.fixed.items()}
        return parts | {part: value for part, value in fixed.items() if value is not None}

    def values(self) -> Tensor:
        return summed(_values(summand) for summand in self.summands)

    def forward(self, x: Tensor) -> Tensor:
        return self.rounded(self.product(self._own(x)))

    def product(self, x: Tensor) -> Tensor:
        """x W^T + b with x rounded, before the output is rounded."""
        inputs = self.rounding("input")
        if inputs is not None:
            x = straight_through(x, inputs.fake_quantize(x.detach()))
        rest, bias = dict(enumerate(self.summands)), self.bias
        products = []
        if self._together is not None:
            codes, sparse = (cast(QuantLinear, rest.pop(i)) for i in self._together)
            products.append(codes.with_entries(x, cast(SparseLinear, sparse).entries, bias))
            bias = None
        products += [summand(x) for summand in rest.values()]
        y = sum(products[1:], start=products[0])
        return y if bias is None else y + bias

    def rounded(self, y: Tensor) -> Tensor:
        """The product `y`, rounded where the layer rounds its output."""
        outputs = self.rounding("output")
        return y if outputs is None else straight_through(y, outputs.fake_quantize(y.detach()))

    def slack(self, x_MK: Tensor) -> Tensor | float:
        """The bound adds up the rounding of every term, and the `Format.slack` of terms without a kernel."""
        slack = x_MK.new_zeros(())
        for summand in self.summands:
            weight_NK = _values(summand).double()
            slack = slack + reference.tolerance(x_MK, weight_NK, x_MK @ weight_NK.t(), self.dtype)
            if isinstance(summand, HeldTerm):
                slack = slack + summand.format.slack(x_MK, weight_NK, summand.held, self.dtype)
        return slack

    @classmethod
    def route(cls, scheme: Scheme, M: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Route:
        kernels, reasons = [], []
        together = _together(scheme.terms) or ()
        for i, term in enumerate(scheme.terms):
            kind = kernel_of(term)
            if i in together[1:]:
                continue
            if kind is None:
                kernels.append(term.kind)
                reasons.append(f"{term.kind} has no kernel: it is multiplied as the format knows")
            else:
                one = kind.route(Scheme(terms=(term,)), M, shape, dtype, device)
                one = with_entries(one, M) if i in together else one
                kernels.append(one.kernel)
                reasons += one.why_not
        return Route(" + ".join(kernels), tuple(reasons))

    @classmethod
    def why_not_batch_invariant(cls, scheme: Scheme, K: int, dtype: torch.dtype, device: torch.device) -> list[str]:
        reasons = []
        for term in scheme.terms:
            alone = Scheme(terms=(term,))
            reasons += (kernel_of(term) or QuantLinear).why_not_batch_invariant(alone, K, dtype, device)
        return reasons


def _together(terms: Sequence[Format]) -> tuple[int, int] | None:
    """Indices (codes, entries) of the two terms that one call multiplies; None where there are none."""
    kinds = [kernel_of(term) for term in terms]
    codes = next((i for i, kind in enumerate(kinds) if kind is not None and kind.adds_entries), None)
    entries = next((i for i, kind in enumerate(kinds) if kind is SparseLinear), None)
    return None if codes is None or entries is None else (codes, entries)


def _values(summand: nn.Module) -> Tensor:
    if isinstance(summand, QuantLinear):
        return summand.values()
    return cast(HeldTerm, summand).dequantize()


def _summand(term: Format, in_features: int, out_features: int) -> nn.Module:
    """The module that computes on one term of a sum."""
    kind = kernel_of(term)
    if kind is None:
        return HeldTerm(term, in_features, out_features)
    layer = kind(Scheme(terms=(term,)), in_features, out_features, None)
    layer.spoken_for = True
    return layer
