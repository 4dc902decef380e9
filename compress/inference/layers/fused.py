"""Layers that read one tensor (q, k, v; gate, up) as one product of stacked rows: fewer launches, wider matrices.

The first layer to be called multiplies for all; the others take their rows of its product. Modules keep their names
and their places, and the state_dict stays that of the single layers.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from compress.base.errors import InputError
from compress.inference.layers.base import OnCodes
from compress.inference.layers.linear import PackedLinear, QuantLinear, RowLinear
from compress.weights.scheme import Scheme

_Moment = tuple[int, bool]


def _moment(x: Tensor) -> _Moment:
    """(The version of a tensor, which changes when it is written to, or 0 where it is not tracked; gradients are
    recorded)."""
    hidden = torch.compiler.is_compiling() or x.is_inference()
    return 0 if hidden else x._version, torch.is_grad_enabled()


class FusedLinear(OnCodes):
    """One of several layers that read the same tensor: rows [start, stop) of `stacked`, which multiplies once for all.

    The first layer owns `stacked` and always multiplies. The others take their rows of its product if it is of the same
    tensor object in the same version, with the same setting of gradients. Otherwise they multiply again: correct, and
    as slow as without fusing.
    """

    def __init__(
        self, first: "FusedLinear | None", stacked: QuantLinear | None, start: int, stop: int, last: bool
    ) -> None:
        super().__init__()
        self.rows, self.last = slice(start, stop), last
        # In a tuple, so that the first layer is no child of this module: it has its own place in the model.
        self._first = () if first is None else (first,)
        self.stacked = stacked
        self.pending: tuple[Tensor, _Moment, Tensor] | None = None

    @staticmethod
    def fuse(layers: Sequence[QuantLinear]) -> "list[FusedLinear]":
        """Layers that share their input, as one product. Raises InputError where their schemes or dtypes differ."""
        stacked = stack(layers)
        fused: list[FusedLinear] = []
        start = 0
        for layer in layers:
            first = fused[0] if fused else None
            stop = start + layer.out_features
            fused.append(FusedLinear(first, stacked if first is None else None, start, stop, layer is layers[-1]))
            start = stop
        return fused

    @property
    def owner(self) -> "FusedLinear":
        return self._first[0] if self._first else self

    @property
    def whole(self) -> QuantLinear:
        """The stacked layer."""
        found = self.owner.stacked
        assert found is not None
        return found

    @property
    def in_features(self) -> int:
        return self.whole.in_features

    @property
    def out_features(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @property
    def scheme(self) -> Scheme:
        return self.whole.scheme

    @property
    def weight(self) -> Tensor:
        """The values of this layer's rows, computed at each access."""
        return self.whole.dequantize()[self.rows]

    def forward(self, x: Tensor) -> Tensor:
        owner = self.owner
        known, now = owner.pending, _moment(x)
        usable = owner is not self and known is not None and known[0] is x and known[1] == now
        out = known[2] if usable and known is not None else self.whole(x)
        owner.pending = None if self.last else (x, now, out)
        return out[..., self.rows]

    def __getstate__(self) -> dict[str, Any]:
        # A pending product is no state: copies and pickles leave it out.
        return {**self.__dict__, "pending": None}

    def extra_repr(self) -> str:
        return f"rows {self.rows.start} to {self.rows.stop} of {self.whole.out_features}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.whole.save_rows(self.rows, destination, prefix)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        self.owner.pending = None
        self.whole.load_rows(self.rows, state_dict, prefix, *rest[2:])


def why_not_fuse(layers: Sequence[QuantLinear]) -> list[str]:
    """The reasons why layers cannot be one product; empty when they can."""
    reasons = []
    first = layers[0]
    reasons += [f"{layer.scheme} is not one product of stacked rows" for layer in layers if not layer.stackable]
    reasons += [
        f"{layer.out_features} outputs; each {first.row_unit} share a scale"
        for layer in layers[:-1]
        if layer.out_features % layer.row_unit
    ]
    reasons += [f"{layer.scheme}: each rotates its own input" for layer in layers if layer.scheme.rotation is not None]
    for layer in layers[1:]:
        if type(layer) is not type(first) or layer.scheme != first.scheme:
            reasons.append(f"schemes differ: {first.scheme}; {layer.scheme}")
        if layer.in_features != first.in_features:
            reasons.append(f"inputs differ: {first.in_features}, {layer.in_features}")
        if (layer.bias is None) != (first.bias is None):
            reasons.append("only some have a bias")
        if layer.batch_invariant != first.batch_invariant:
            reasons.append("only some are batch-invariant")
        if layer.dtype != first.dtype:
            reasons.append(f"dtypes differ: {first.dtype}, {layer.dtype}")
        if layer._stored_dtypes != first._stored_dtypes:
            reasons.append("scales are stored in dtypes that differ")
        if isinstance(layer, RowLinear) and isinstance(first, RowLinear) and layer.input_scale is not None:
            same = first.input_scale is not None and torch.equal(layer.input_scale, first.input_scale)
            given = (getattr(layer, "input_zero", None), getattr(first, "input_zero", None))
            zeros = [torch.zeros(1) if z is None else z.cpu() for z in given]
            if not same or not torch.equal(zeros[0].int(), zeros[1].int()):
                reasons.append("scales of the input differ")
        if (getattr(layer, "output_zero", None) is None) != (getattr(first, "output_zero", None) is None):
            reasons.append("only some have a zero point of the output")
    return reasons


def stack(layers: Sequence[QuantLinear]) -> QuantLinear:
    """One layer with the rows of several. Raises InputError where they cannot be one product (`why_not_fuse`)."""
    reasons = why_not_fuse(layers)
    if reasons:
        raise InputError(f"layers cannot be fused: {'; '.join(reasons)}")
    first = layers[0]
    for layer in layers:
        layer.lay_in_rows()
    rows = sum(layer.out_features for layer in layers)
    bias = None
    if first.bias is not None:
        bias = torch.cat([cast(Tensor, layer.bias).detach() for layer in layers])
    stacked = type(first)(first.scheme, first.in_features, rows, bias)
    stacked.spoken_for, stacked.batch_invariant = True, first.batch_invariant
    for name, buffer in first.named_buffers(recurse=False):
        across = [getattr(layer, name) for layer in layers]
        along = {"scale": 1, "zero": 1}.get(name, 0)
        setattr(stacked, name, buffer if name.startswith("input") else torch.cat(across, along))
    stacked._dtype, stacked._stored_dtypes = first._dtype, first._stored_dtypes
    if isinstance(first, PackedLinear):
        cast(PackedLinear, stacked).input_group = first.input_group
    return stacked
