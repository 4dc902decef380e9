"""Base classes of all layers on compressed weights; `inference.layers.linear` lists the layers.

A `QuantLinear` holds the tensors that its kernels read and nothing else, on every device. Its state_dict has the
tensors of the checkpoint (`weights.scheme`), in both directions, so that a compressed model can be saved, loaded and
resumed like any other; stored tensors come back bit for bit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from compress.base.errors import CheckpointError, InputError
from compress.kernels.cpu.arguments import LoopWeight
from compress.kernels.layouts.entries import Entries
from compress.kernels.layouts.words import STRIPS_DIMENSIONS
from compress.kernels.routes import Route
from compress.model.online_rotation import rotate_input
from compress.weights.grid import Grid, Quantized, quantize
from compress.weights.matrix import Matrix
from compress.weights.rounding import ActivationCodes, Side
from compress.weights.scheme import Scheme, check_parts, parts_of, scheme_named, scheme_of, terms_of
from compress.weights.terms import Format


class OnCodes(nn.Module):
    """A layer on codes. Its text hints at `compress.lora`: peft quotes the text of a layer that it refuses."""

    def step_weight(self) -> LoopWeight | None:
        """The weight as the layer's own forward hands it to an operator of the CPU; None where it does not."""
        return None

    def __str__(self) -> str:
        return f"{self!r} (for adapters on codes call compress.lora(config) first)"


class InStrips(OnCodes):
    """A layer whose weight may be laid out in strips on a CPU. STRIPS: the buffer that has three dimensions in strips
    and two in rows; None for a layer without strips."""

    STRIPS: ClassVar[str | None] = None
    # Float buffers that define the weight: converting the layer to another dtype does not round them.
    KEPT: ClassVar[Sequence[str]] = ()

    @property
    def device(self) -> torch.device:
        return next(self.buffers()).device

    @property
    def in_strips(self) -> bool:
        """True where the weight is laid out in strips (`kernels.layouts.strips`)."""
        held: Tensor | None = None if self.STRIPS is None else getattr(self, self.STRIPS)
        return held is not None and held.dim() == STRIPS_DIMENSIONS

    def lay_in_strips(self) -> None:
        """Lay the weight out in strips where this CPU reads them, else in rows."""

    def lay_in_rows(self) -> None:
        """Inverse of `lay_in_strips`."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        kept = {name: held for name in self.KEPT if (held := self._buffers.get(name)) is not None}
        super()._apply(fn, recurse)
        self._restore(kept, fn)
        if self.in_strips and self.device.type != "cpu":
            self.lay_in_rows()
        return self

    def _restore(self, kept: Mapping[str, Tensor], fn: Callable[[Tensor], Tensor]) -> None:
        """Restore buffers that converting the layer by `fn` has rounded. kept: their values before."""


class StoredRows(InStrips):
    """A layer whose state_dict holds the tensors of a checkpoint, not the buffers that its kernels read."""

    scheme: Scheme
    in_features: int
    out_features: int
    bias: nn.Parameter | None
    spoken_for: bool  # another module saves and loads this one's tensors (`FusedLinear`, `SumLinear`)

    def fill(self, parts: Mapping[str, Tensor], rows: slice) -> None:
        """Take a checkpoint's tensors for some rows; a new layer must get all rows."""
        raise NotImplementedError

    def parts(self, rows: slice) -> dict[str, Tensor]:
        """Inverse of `fill`."""
        raise NotImplementedError

    def whole(self) -> slice:
        return slice(0, self.out_features)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if not self.spoken_for:
            self.save_rows(self.whole(), destination, prefix)

    def save_rows(self, rows: slice, destination: dict[str, Any], prefix: str) -> None:
        """Write a part of the layer into a state_dict."""
        for name, part in self.parts(rows).items():
            destination[prefix + name] = part
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias.detach()[rows]

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        # rest: metadata, strict, then the lists that `load_rows` takes, as `nn.Module` gives them.
        if not self.spoken_for:
            self.load_rows(self.whole(), state_dict, prefix, *rest[2:])

    def load_rows(
        self,
        rows: slice,
        state_dict: Mapping[str, Any],
        prefix: str,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Read a part of the layer from a state_dict; errors are reported in the lists, as `nn.Module` does."""
        shape = (rows.stop - rows.start, self.in_features)
        wanted = self.scheme.parts(*shape)
        tensors = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        own: set[str] = set() if self.bias is None else {"bias"}
        needed = own | {name for name, part in wanted.items() if not part.optional}
        missing = sorted(needed - set(tensors))
        missing_keys += [prefix + name for name in missing]
        unexpected_keys += [prefix + name for name in sorted(set(tensors) - needed - set(wanted))]
        if missing:
            return
        parts = {name: tensors[name] for name in wanted if name in tensors}
        problem = _problem(prefix, parts, self.scheme, shape)
        if problem is not None:
            error_msgs.append(problem)
            return
        self.fill({name: part.to(self.device) for name, part in parts.items()}, rows)
        if self.bias is not None:
            self.bias.data[rows] = tensors["bias"].to(self.bias)


class QuantLinear(StoredRows):
    """y = x W^T + b on packed codes. x [..., in_features] in the dtype of the layer, y [..., out_features] in the same.

    Make one with `from_linear`, `from_quantized` or `from_parts`. Weights take no gradient; x does.
    """

    stackable: ClassVar[bool] = True  # rows of several such layers can be one product (`FusedLinear`)
    row_unit: ClassVar[int] = 1  # rows that share a scale: in a stack, all layers but the last have a multiple of them
    rounds_inputs: ClassVar[bool] = False  # only for layers that round their input
    # It multiplies by the codes of a rounded input. If False, `SumLinear` rounds the input and this layer multiplies.
    takes_codes: ClassVar[bool] = True
    takes_ranges: ClassVar[bool] = True  # like takes_codes, for an input of a fixed range
    # Its kernels add sparse rows to its weight (`with_entries`).
    adds_entries: ClassVar[bool] = False
    # {buffer that the kernels read: its dimension along the rows of the layer, or None}.
    BUFFERS: ClassVar[Mapping[str, int | None]] = {}

    def __init__(self, scheme: Scheme, in_features: int, out_features: int, bias: Tensor | None) -> None:
        super().__init__()
        self.scheme, self.in_features, self.out_features = scheme, in_features, out_features
        self.spoken_for = False
        # A token's result must not depend on how many tokens share the product (`kernels.operators.words`).
        self.batch_invariant = False
        # The dtype of x and y, and the stored dtypes of KEPT buffers.
        self._dtype = torch.get_default_dtype()
        self._stored_dtypes: dict[str, torch.dtype] = {}
        if bias is not None and not isinstance(bias, nn.Parameter):
            bias = nn.Parameter(bias, requires_grad=False)
        self.register_parameter("bias", bias)
        for name in self.BUFFERS:
            self.register_buffer(name, None)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, scheme: str | Scheme = "w4a16", group_size: int | None = None
    ) -> "QuantLinear":
        """Round a linear layer to the nearest codes. group_size: inputs per scale; by default the largest of 128, 64
        and 32 that divides the inputs, or one scale per output. Raises InputError for a scheme or a group size that
        does not fit."""
        if not isinstance(linear, nn.Linear):
            raise InputError(f"a {type(linear).__name__} is no torch.nn.Linear: its weight may lie the other way round")
        found = scheme_named(scheme, group_size, linear.in_features) if isinstance(scheme, str) else scheme
        layer = cls.from_quantized(quantize(linear.weight.detach(), found.weights), linear.bias, found)
        # Scales of a kind of their own do not tell the dtype.
        return layer if layer.dtype == linear.weight.dtype else layer.to(linear.weight.dtype)

    @classmethod
    def from_quantized(cls, weight: Matrix, bias: Tensor | None = None, scheme: Scheme | None = None) -> "QuantLinear":
        """The layer of a quantized weight. scheme: needed where the input is rounded, too, to every token. Raises
        InputError for fixed ranges, whose scales only `from_parts` takes."""
        scheme = scheme_of(weight) if scheme is None else scheme
        if scheme.holds_inputs:
            raise InputError("a static input has a scale of its own; give it with the others to QuantLinear.from_parts")
        if scheme.outputs is not None:
            raise InputError("an output has a scale of its own; give it with the others to QuantLinear.from_parts")
        if isinstance(weight, Quantized) and scheme.codes is not None:
            weight = scheme.codes.term(weight)
        terms = terms_of(weight, scheme.inputs)
        device = terms[0].dequantize().device
        rounding = None if scheme.inputs is None else ActivationCodes(scheme.inputs)
        parts = {name: part.to(device) for name, part in parts_of(weight, rounding).items()}
        return cls.from_parts(parts, scheme, terms[0].shape, bias)

    @staticmethod
    def from_parts(
        parts: Mapping[str, Tensor], scheme: Scheme, shape: Sequence[int], bias: Tensor | None = None
    ) -> "QuantLinear":
        """The layer of a checkpoint's tensors (`Scheme.parts`), on their device and in their dtype. shape: (N, K)."""
        rows, columns = shape
        layer = run_of(scheme)(scheme, columns, rows, bias)
        layer.fill(parts, slice(0, rows))
        if scheme.rotation is not None:
            rotate_input(layer, scheme.rotation)
        return layer

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of x and y."""
        return self._dtype

    def stored_dtype(self, name: str) -> torch.dtype:
        """The dtype in which a KEPT buffer is saved: its stored dtype, or the layer's where that is wider."""
        return torch.promote_types(self._stored_dtypes[name], self._dtype)

    def _lasting(self, name: str, held: Tensor) -> torch.dtype:
        """The dtype in which a KEPT buffer is held after the layer was converted."""
        return self.stored_dtype(name)

    def _restore(self, kept: Mapping[str, Tensor], fn: Callable[[Tensor], Tensor]) -> None:
        self._dtype = fn(torch.empty(0, dtype=self._dtype)).dtype
        for name, held in kept.items():
            now, dtype = getattr(self, name), self._lasting(name, held)
            if now.dtype != dtype:
                setattr(self, name, held.to(now.device, dtype))

    def hold(self, found: Mapping[str, Tensor | None], rows: slice) -> None:
        """Set buffers by name: as a whole in a new layer, else the given rows of them."""
        again = self.in_strips
        self.lay_in_rows()
        new = all(getattr(self, name) is None for name in self.BUFFERS)
        if new:
            self._stored_dtypes = {name: tensor.dtype for name in self.KEPT if (tensor := found.get(name)) is not None}
        for name, tensor in found.items():
            buffer, along = getattr(self, name), self.BUFFERS[name]
            if new:
                setattr(self, name, None if tensor is None else tensor.contiguous())
            elif buffer is not None and tensor is not None:
                buffer[... if along is None else (slice(None),) * along + (rows,)] = tensor
        if again:
            self.lay_in_strips()

    def values(self) -> Tensor:
        """The values [N, K] of the stored weight, not rounded to a narrower dtype of the layer."""
        raise NotImplementedError

    def dequantize(self) -> Tensor:
        """`values()` in the dtype of the layer."""
        return self.values().to(self.dtype)

    def slack(self, x_MK: Tensor) -> Tensor | float:
        """[M, N]: the error that a product may have beyond its roundings (`inference.check.dense_twin`), where the
        kernel is inexact on purpose. x in float64."""
        return 0.0

    def with_entries(self, x: Tensor, entries: Entries, bias: Tensor | None) -> Tensor:
        """x (W + entries)^T + bias, for layers with `adds_entries`."""
        raise NotImplementedError

    @classmethod
    def route(cls, scheme: Scheme, M: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Route:
        """The kernel for M tokens in a layer of shape (N, K), and the reasons against faster ones."""
        raise NotImplementedError

    @classmethod
    def why_not_batch_invariant(cls, scheme: Scheme, K: int, dtype: torch.dtype, device: torch.device) -> list[str]:
        """The reasons why a layer of this scheme cannot be `batch_invariant`; empty when it can."""
        kinds = " + ".join(term.kind for term in scheme.terms)
        return [f"{kinds} has no kernel that sums every token alike"]

    def rounding(self, side: Side) -> ActivationCodes | None:
        """The rounding of the layer's input or output; None where it is not rounded."""
        grid = self.scheme.inputs if side == "input" else self.scheme.outputs
        if grid is None:
            return None
        divisor: Tensor | None = getattr(self, f"{side}_global", None)
        if divisor is not None and self.scheme.global_inputs is not None:
            grid = replace(grid, global_scale=self.scheme.global_inputs.global_scale(divisor))
        fixed = (getattr(self, f"{side}_{part}", None) for part in ("scale", "zero"))
        return ActivationCodes(grid, *(None if value is None else value.reshape(1, -1) for value in fixed))

    @property
    def weight(self) -> Tensor:
        """`dequantize()`, for code that reads the weight of a linear layer; computed at each access."""
        return self.dequantize()

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.scheme}"

    def _own(self, x: Tensor) -> Tensor:
        """x in the dtype of the layer. Under autocast x is cast, since the layer does not follow autocast's dtype.
        Raises InputError for another dtype otherwise."""
        if x.dtype == self.dtype:
            return x
        if torch.is_autocast_enabled(x.device.type):
            return x.to(self.dtype)
        raise InputError(f"x is {x.dtype}, the layer computes in {self.dtype}; convert the model with .to(dtype)")


def _problem(prefix: str, parts: Mapping[str, Tensor], scheme: Scheme, shape: tuple[int, int]) -> str | None:
    """The message for wrong tensors of some rows, with the name of the layer; None where nothing is wrong."""
    headers = {name: (tuple(part.shape), part.dtype) for name, part in parts.items()}
    try:
        check_parts(prefix.removesuffix("."), headers, scheme, shape)
    except CheckpointError as error:
        return str(error)
    try:
        scheme.check(parts, *shape)
    except CheckpointError as error:
        return f"{prefix}{error}"
    return None


# {format of a term: the layer that computes on it}, filled by `inference.layers.linear`.
RUNS: dict[type[Format] | None, type[QuantLinear]] = {}


def kernel_of(term: Format, inputs: Grid | None = None) -> type[QuantLinear] | None:
    """The layer class with a kernel for a term, given the grid of the input; None where there is none."""
    kind = RUNS.get(type(term))
    return None if kind is None or (kind.rounds_inputs and inputs is None) else kind


def run_of(scheme: Scheme) -> type[QuantLinear]:
    """The layer class for a scheme: that of its format, or RUNS[None] for sums and for formats without a kernel."""
    kernel = kernel_of(scheme.terms[0], scheme.inputs) if len(scheme.terms) == 1 else None
    if kernel is None or scheme.inputs is None:
        return kernel or RUNS[None]
    return kernel if kernel.takes_codes and (scheme.dynamic or kernel.takes_ranges) else RUNS[None]
