"""Layers that compute on packed codes: what a compressed model is made of while it runs.

A `QuantLinear` holds what the kernels read and nothing else, on every device: planar words of 4 or 8 bits (2 and 3 bits
ride in 4, 5 to 7 in 8), or rows of int8 or float8 where the input is quantized too. Its state_dict is the checkpoint's
(`scheme`), in both directions, so a compressed model can be saved, loaded and resumed like any other; the codes come
back bit for bit.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compress.errors import CheckpointError, InputError
from compress.kernels import ops, reference
from compress.kernels.fp8 import fp8_linear
from compress.kernels.pack import (
    Planar,
    pack_planar,
    pack_rows,
    planar_from_rows,
    planar_weight,
    rows_from_planar,
    unpack_planar,
    unpack_rows,
)
from compress.kernels.rounding import round_output
from compress.weights.codes import check_parts, tensors_of
from compress.weights.grid import Quantized, quantize
from compress.weights.scheme import NARROW, WIDE, Scheme, scheme_named


class QuantLinear(nn.Module):
    """y = x W^T + b on packed codes. x [..., in_features] in the dtype of the layer, y [..., out_features] in the same.

    Make one with `from_linear`, `from_quantized` or `from_parts`. Weights take no gradient; x does.
    """

    bias: nn.Parameter | None

    def __init__(self, scheme: Scheme, in_features: int, out_features: int, bias: Tensor | None) -> None:
        super().__init__()
        self.scheme, self.in_features, self.out_features = scheme, in_features, out_features
        # Set where another module speaks for this one's tensors (`FusedLinear`).
        self.spoken_for = False
        if bias is not None and not isinstance(bias, nn.Parameter):
            bias = nn.Parameter(bias, requires_grad=False)
        self.register_parameter("bias", bias)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, scheme: str | Scheme = "w4a16", group_size: int | None = None
    ) -> "QuantLinear":
        """Round a linear layer to the nearest codes, in groups of 128 inputs or the largest below that divides them.
        Raises InputError for a scheme or a group that does not fit."""
        if not isinstance(linear, nn.Linear):
            raise InputError(f"a {type(linear).__name__} is no torch.nn.Linear: its weight may lie the other way round")
        found = scheme_named(scheme, group_size, linear.in_features) if isinstance(scheme, str) else scheme
        return cls.from_quantized(quantize(linear.weight.detach(), found.weights), linear.bias, found)

    @classmethod
    def from_quantized(
        cls, weight: Quantized, bias: Tensor | None = None, scheme: Scheme | None = None
    ) -> "QuantLinear":
        """A layer of codes that a method has found; `scheme` where the input is quantized too, to every token."""
        scheme = Scheme(weights=weight.grid) if scheme is None else scheme
        if scheme.inputs is not None and not scheme.dynamic:
            raise InputError("a static input has a scale of its own; give it with the others to QuantLinear.from_parts")
        if scheme.outputs is not None:
            raise InputError("an output has a scale of its own; give it with the others to QuantLinear.from_parts")
        if scheme.layout == "pack-quantized":
            parts = {name.removeprefix("."): part for name, part in tensors_of("", weight).items()}
        else:
            scale = weight.scale[:1, 0] if scheme.one_scale else weight.scale.expand(len(weight.codes), -1)
            parts = {"weight": weight.codes, "weight_scale": scale}
        return cls.from_parts(
            {k: v.to(weight.codes.device) for k, v in parts.items()}, scheme, weight.codes.shape, bias
        )

    @staticmethod
    def from_parts(
        parts: Mapping[str, Tensor], scheme: Scheme, shape: Sequence[int], bias: Tensor | None = None
    ) -> "QuantLinear":
        """The layer that a checkpoint's tensors stand for, on their device, in the dtype of their scale."""
        rows, columns = shape
        kind = KINDS[scheme.layout] if scheme.inputs is not None else PackedLinear
        layer = kind(scheme, columns, rows, bias)
        layer.fill(parts, slice(0, rows))
        return layer

    @property
    def dtype(self) -> torch.dtype:
        """Of x and y."""
        raise NotImplementedError

    def fill(self, parts: Mapping[str, Tensor], rows: slice) -> None:
        """Take over a checkpoint's tensors for some rows; all of them when the layer is new."""
        raise NotImplementedError

    def parts(self, rows: slice) -> dict[str, Tensor]:
        """Inverse of `fill`."""
        raise NotImplementedError

    def dequantize(self) -> Tensor:
        """[N, K] the values that the codes stand for."""
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:
        """`dequantize()`, for code that looks at the weight of a linear layer; made anew each time."""
        return self.dequantize()

    def whole(self) -> slice:
        return slice(0, self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.scheme}"

    def _own(self, x: Tensor) -> Tensor:
        """x in the dtype of the layer: cast under autocast, whose dtype the layer does not follow; else it must be."""
        if x.dtype == self.dtype:
            return x
        if torch.is_autocast_enabled(x.device.type):
            return x.to(self.dtype)
        raise InputError(f"x is {x.dtype}, the layer computes in {self.dtype}; convert the model with .to(dtype)")

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if not self.spoken_for:
            self.save_rows(self.whole(), destination, prefix)

    def save_rows(self, rows: slice, destination: dict[str, Any], prefix: str) -> None:
        """Write a part of the layer into a state_dict."""
        for name, part in self.parts(rows).items():
            destination[prefix + name] = part
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias.detach()[rows]

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if not self.spoken_for:
            self.load_rows(self.whole(), state_dict, prefix, missing_keys, unexpected_keys, error_msgs)

    def load_rows(
        self,
        rows: slice,
        state_dict: Mapping[str, Any],
        prefix: str,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Read a part of the layer from a state_dict, the way `nn.Module` reports what does not fit."""
        shape = (rows.stop - rows.start, self.in_features)
        wanted = self.scheme.parts(*shape)
        given = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        needed = {name for name, part in wanted.items() if not part.optional} | (
            {"bias"} if self.bias is not None else set()
        )
        missing = sorted(needed - set(given))
        missing_keys += [prefix + name for name in missing]
        unexpected_keys += [prefix + name for name in sorted(set(given) - needed - set(wanted))]
        if missing:
            return
        parts = {name: given[name] for name in wanted if name in given}
        try:
            check_parts(
                prefix.removesuffix("."), {k: (tuple(v.shape), v.dtype) for k, v in parts.items()}, self.scheme, shape
            )
        except CheckpointError as error:
            error_msgs.append(str(error))
            return
        self.fill({name: part.to(self.device) for name, part in parts.items()}, rows)
        if self.bias is not None:
            self.bias.data[rows] = given["bias"].to(self.bias)

    @property
    def device(self) -> torch.device:
        return next(self.buffers()).device


class PackedLinear(QuantLinear):
    """Weights of 2 to 8 bits in planar words (`kernels.pack.Planar`), stored packed or as rows of int8; the input as it
    is, or int8 per token.

    input_group: None multiplies x as it is. -1 rounds every token of x to int8 first, with one scale; a number, with
    one scale per so many inputs: faster on a CPU, at a small error (`kernels.ops`).
    """

    words: Tensor
    scale: Tensor
    zero: Tensor | None

    def __init__(self, scheme: Scheme, in_features: int, out_features: int, bias: Tensor | None) -> None:
        super().__init__(scheme, in_features, out_features, bias)
        self.container = NARROW if scheme.weights.bits <= NARROW else WIDE
        self.input_group = None if scheme.inputs is None else -1
        for name in ("words", "scale", "zero"):
            self.register_buffer(name, None)

    @property
    def dtype(self) -> torch.dtype:
        return self.scale.dtype

    @property
    def planar(self) -> Planar:
        return Planar(self.words, self.scale, self.zero, self.scheme.weights.group_size or -1, self.container)

    def forward(self, x: Tensor) -> Tensor:
        x = self._own(x)
        group = self.scheme.weights.group_size or -1
        weight = (self.words, self.scale, self.zero, self.bias, self.container, group)
        if self.input_group is None:
            return ops.weight_only_linear(x, *weight)
        return ops.int8_activation_linear(x, *weight, self.input_group)

    def dequantize(self) -> Tensor:
        return planar_weight(self.planar, self.in_features)

    def fill(self, parts: Mapping[str, Tensor], rows: slice) -> None:
        bits = self.scheme.weights.bits
        scale_GN = parts["weight_scale"].t().contiguous()
        given_GN = None if self.scheme.weights.symmetric else parts["weight_zero_point"].t().contiguous()
        zero_GN = None
        if self.scheme.layout == "pack-quantized":
            words = planar_from_rows(parts["weight_packed"], bits, self.in_features, self.container)
            if given_GN is not None:
                zero_GN = unpack_rows(given_GN, bits, rows.stop - rows.start, signed=False) + self._lift
        else:
            words = pack_planar(_from_signed(parts["weight"]), bits)
            zero_GN = None if given_GN is None else _from_signed(given_GN)
        if self.words is None:
            self.words, self.scale, self.zero = words, scale_GN, zero_GN
            return
        self.words[rows] = words
        self.scale[:, rows] = scale_GN
        if zero_GN is not None:
            assert self.zero is not None
            self.zero[:, rows] = zero_GN

    @property
    def _lift(self) -> int:
        """What is added to unsigned codes of the scheme's bits so that the middle stays the middle."""
        return int(2 ** (self.container - 1) - 2 ** (self.scheme.weights.bits - 1))

    def parts(self, rows: slice) -> dict[str, Tensor]:
        bits, words = self.scheme.weights.bits, self.words[rows]
        zero_GN = None if self.zero is None else self.zero[:, rows]
        parts = {"weight_scale": self.scale[:, rows].t().contiguous()}
        if self.scheme.layout != "pack-quantized":
            parts["weight"] = _to_signed(unpack_planar(words, bits, self.in_features))
            if zero_GN is not None:
                parts["weight_zero_point"] = _to_signed(zero_GN).t().contiguous()
            return parts
        parts["weight_packed"] = rows_from_planar(words, bits, self.in_features, self.container)
        parts["weight_shape"] = torch.tensor([rows.stop - rows.start, self.in_features], device=words.device)
        if zero_GN is not None:
            parts["weight_zero_point"] = pack_rows(zero_GN - self._lift, bits, signed=False).t().contiguous()
        return parts


def _from_signed(codes: Tensor) -> Tensor:
    """int8 codes as unsigned ones, the middle at 128."""
    return codes.contiguous().view(torch.uint8) ^ 128


def _to_signed(codes: Tensor) -> Tensor:
    """Inverse of `_from_signed`."""
    return (codes ^ 128).view(torch.int8)


class RowLinear(QuantLinear):
    """Rows of 8-bit codes, one scale each; the input rounded alike, per token or by a fixed scale, and perhaps the
    output, by a scale that is held once per row."""

    codes: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None
    output_scale: Tensor | None
    output_zero: Tensor | None
    # fp32, whatever the model is converted to: the epilogue multiplies in it.
    SCALES = ("weight_scale", "input_scale", "output_scale")

    def __init__(self, scheme: Scheme, in_features: int, out_features: int, bias: Tensor | None) -> None:
        super().__init__(scheme, in_features, out_features, bias)
        self._dtype = torch.float32
        for name in ("codes", "weight_scale", "input_scale", "output_scale", "output_zero"):
            self.register_buffer(name, None)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def weight_codes(self) -> Tensor:
        """[N, K] in the dtype of the checkpoint."""
        return self.codes

    def dequantize(self) -> Tensor:
        return (self.weight_codes.to(torch.float32) * self.weight_scale.unsqueeze(-1)).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.rounded(self.product(self._own(x)))

    def product(self, x: Tensor) -> Tensor:
        """x W^T + b of the rounded x, before the output is rounded."""
        raise NotImplementedError

    def rounded(self, y: Tensor) -> Tensor:
        """What the layer returns of its product."""
        if self.output_scale is None:
            return y
        return round_output(y, self.output_scale, self.output_zero, self.scheme.weights.floating)

    def found(self, parts: Mapping[str, Tensor], rows: slice) -> dict[str, Tensor | None]:
        """What the layer holds of a checkpoint's tensors, by name."""
        count = rows.stop - rows.start
        fixed, returned, zero = (parts.get(part) for part in ("input_scale", "output_scale", "output_zero_point"))
        return {
            "codes": parts["weight"],
            "weight_scale": parts["weight_scale"].flatten().to(torch.float32).expand(count),
            "input_scale": None if fixed is None else fixed.reshape(1).to(torch.float32),
            "output_scale": None if returned is None else returned.reshape(1).to(torch.float32).expand(count),
            "output_zero": None if zero is None else zero.reshape(1).to(torch.int32).expand(count),
        }

    def fill(self, parts: Mapping[str, Tensor], rows: slice) -> None:
        found = self.found(parts, rows)
        if self.codes is None:
            self._dtype = parts["weight_scale"].dtype
            for name, tensor in found.items():
                setattr(self, name, None if tensor is None else tensor.contiguous())
            return
        for name, tensor in found.items():
            target = getattr(self, name)
            if tensor is not None and target is not None:
                target[rows if len(target) == self.out_features and not name.startswith("input") else slice(None)] = (
                    tensor
                )

    def parts(self, rows: slice) -> dict[str, Tensor]:
        scale = self.weight_scale[rows].to(self.dtype)
        parts = {"weight": self.weight_codes[rows]}
        parts["weight_scale"] = scale[:1] if self.scheme.one_scale else scale.unsqueeze(-1)
        if self.input_scale is not None:
            # A copy: layers that are stacked would share it, which safetensors refuses to save.
            parts["input_scale"] = self.input_scale.to(self.dtype, copy=True)
        if self.output_scale is not None:
            parts["output_scale"] = self.output_scale[rows][:1].to(self.dtype)
        if self.output_zero is not None:
            parts["output_zero_point"] = self.output_zero[rows][:1].to(torch.int8)
        return parts

    def _apply(self, fn: Any, recurse: bool = True) -> "RowLinear":
        kept = {name: getattr(self, name) for name in self.SCALES}
        super()._apply(fn, recurse)
        for name, tensor in kept.items():
            if tensor is not None:
                setattr(self, name, tensor.to(getattr(self, name).device))
        self._dtype = fn(torch.empty(0, dtype=self._dtype)).dtype
        return self


class Int8Linear(RowLinear):
    """int8 rows and an int8 input, which may have a zero point."""

    row_sum: Tensor
    input_zero: Tensor | None

    def __init__(self, scheme: Scheme, in_features: int, out_features: int, bias: Tensor | None) -> None:
        super().__init__(scheme, in_features, out_features, bias)
        for name in ("row_sum", "input_zero"):
            self.register_buffer(name, None)

    def product(self, x: Tensor) -> Tensor:
        inputs = self.scheme.inputs
        assert inputs is not None
        scales = (self.input_scale, self.input_zero, inputs.symmetric)
        return ops.w8a8_linear(x, self.codes, self.weight_scale, self.row_sum, self.bias, *scales)

    def found(self, parts: Mapping[str, Tensor], rows: slice) -> dict[str, Tensor | None]:
        zero = parts.get("input_zero_point") if "input_scale" in parts else None
        return {
            **super().found(parts, rows),
            "row_sum": reference.row_sums(parts["weight"]),
            "input_zero": None if zero is None else zero.reshape(1).to(torch.int32),
        }

    def parts(self, rows: slice) -> dict[str, Tensor]:
        parts = super().parts(rows)
        if self.input_zero is not None:
            parts["input_zero_point"] = self.input_zero.to(torch.int8)
        return parts


class Fp8Linear(RowLinear):
    """float8 rows and a float8 input (`kernels.fp8`). Codes are held as bytes: `model.to(dtype)` converts floats."""

    @property
    def weight_codes(self) -> Tensor:
        return self.codes.view(torch.float8_e4m3fn)

    def product(self, x: Tensor) -> Tensor:
        return fp8_linear(x, self.codes, self.weight_scale, self.bias, self.input_scale)

    def found(self, parts: Mapping[str, Tensor], rows: slice) -> dict[str, Tensor | None]:
        return {**super().found(parts, rows), "codes": parts["weight"].view(torch.uint8)}


KINDS: Mapping[str, type[QuantLinear]] = {
    "pack-quantized": PackedLinear,
    "int-quantized": Int8Linear,
    "float-quantized": Fp8Linear,
}
