"""Layers on trellis codes: words as they are stored or, after `lay_in_strips` on a CPU that reads them, strips
(`kernels.layouts.trellis_strips`)."""

from collections.abc import Mapping
from typing import ClassVar, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from compress.inference.layers.base import QuantLinear
from compress.kernels import reference
from compress.kernels.layouts.trellis import TrellisWords
from compress.kernels.layouts.trellis_strips import TrellisStrips, words_by_rows
from compress.kernels.operators.devices import runs_on_cpu
from compress.kernels.operators.tiles import MANY
from compress.kernels.operators.trellis import (
    FEW,
    FEW_ON_GPU,
    lay_in_strips,
    trellis_product,
    values_by_run,
    why_not_fused,
    why_not_trellis,
)
from compress.kernels.routes import Route
from compress.weights.formats.trellis import TrellisCodes, filled
from compress.weights.scheme import Scheme


class TrellisLinear(QuantLinear):
    """Weights on trellis codes, with a scale for each output, which stays as stored."""

    stackable = False
    BUFFERS: ClassVar[Mapping[str, int | None]] = {"words": None, "before": None, "scale": None}
    STRIPS = "words"
    KEPT = ("scale",)
    words: Tensor
    before: Tensor | None  # of strips
    scale: Tensor

    @property
    def format(self) -> TrellisCodes:
        return cast(TrellisCodes, self.scheme.terms[0])

    @property
    def held(self) -> TrellisWords | TrellisStrips:
        """The weight in its present layout."""
        if self.before is None:
            return TrellisWords(self.words, self.scale, self.format.code)
        return TrellisStrips(self.words, self.before, self.scale, self.format.code)

    @property
    def beyond(self) -> int:
        """Inputs of the words that the layer has not."""
        return filled(self.in_features) - self.in_features

    def lay_in_strips(self) -> None:
        held = self.held
        found = None if isinstance(held, TrellisStrips) else lay_in_strips(held)
        if found is not None:
            self.words, self.before = found.words, found.before

    def lay_in_rows(self) -> None:
        self.words, self.before = words_by_rows(self.held).words, None

    def forward(self, x: Tensor) -> Tensor:
        x = self._own(x)
        return trellis_product(x if self.beyond == 0 else pad(x, (0, self.beyond)), self.held, self.bias)

    def values(self) -> Tensor:
        return torch.cat([values for _, values in values_by_run(self.held, self.scale.dtype)])[:, : self.in_features]

    def slack(self, x_MK: Tensor) -> Tensor | float:
        """The kernel for few tokens does not round values to the dtype of their scale."""
        return reference.weight_rounding(x_MK, self.values().double(), self.scale.dtype)

    def fill(self, parts: Mapping[str, Tensor], rows: slice) -> None:
        assert rows == self.whole(), "trellis codes are not filled by rows"
        if self.words is None:
            self._dtype = parts["weight_scale"].dtype
        self.hold({"words": parts["weight_packed"], "before": None, "scale": parts["weight_scale"]}, rows)

    def parts(self, rows: slice) -> dict[str, Tensor]:
        assert rows == self.whole(), "trellis codes are not read by rows"
        words = words_by_rows(self.held).words
        return {"weight_packed": words, "weight_scale": self.scale.to(self.stored_dtype("scale"))}

    @classmethod
    def route(cls, scheme: Scheme, M: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Route:
        code = cast(TrellisCodes, scheme.terms[0]).code
        reasons = why_not_trellis(code, dtype, device)
        if reasons:
            return Route("torch", tuple(reasons))
        if not runs_on_cpu(device):
            reasons = why_not_fused(code, shape[0], dtype)
            if M <= FEW_ON_GPU and not reasons:
                return Route("triton", ())
            return Route("dequantize", tuple(reasons) or (MANY,))
        if M <= FEW:
            return Route("cpu trellis", ())
        return Route("cpu trellis, then torch", (f"more than {FEW} tokens: codes are decoded once for all of them",))
