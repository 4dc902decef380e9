"""Layers on rows of int8 or float8, with inputs that are rounded alike."""

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from compress.base.errors import InputError
from compress.inference.layers.base import QuantLinear
from compress.kernels import reference
from compress.kernels.cpu import direct
from compress.kernels.cpu.arguments import LoopWeight
from compress.kernels.layouts.scale_blocks import BLOCK, INPUT_BLOCK, WEIGHT_BLOCK, block_rows, spread
from compress.kernels.operators.fp8 import fp8_linear
from compress.kernels.operators.fp8_blocks import SHORT_SUMS, fp8_block_linear
from compress.kernels.operators.int8_rows import w8a8_linear
from compress.kernels.operators.rounding import round_output
from compress.kernels.routes import Route, fp8_block_route, fp8_route, w8a8_route
from compress.weights.formats.codes import Float8Blocks, Float8Rows
from compress.weights.number_formats import WIDE
from compress.weights.scheme import Scheme


class RowLinear(QuantLinear):
    """Rows of 8-bit codes with one scale each. The input is rounded alike, per token or by a fixed scale; the output
    may be rounded, too, by a scale that is held once per row."""

    codes: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None
    output_scale: Tensor | None
    output_zero: Tensor | None
    rounds_inputs = True
    BUFFERS: ClassVar[Mapping[str, int | None]] = {
        "codes": 0,
        "weight_scale": 0,
        "input_scale": None,
        "output_scale": 0,
        "output_zero": 0,
    }
    # Held in fp32, whatever the model is converted to: the epilogue multiplies in fp32.
    KEPT = ("weight_scale", "input_scale", "output_scale")

    @property
    def _one_scale(self) -> bool:
        return isinstance(self.scheme.codes, Float8Rows) and self.scheme.codes.one_scale

    @property
    def weight_codes(self) -> Tensor:
        """The codes [N, K] in the dtype of the checkpoint."""
        return self.codes

    def values(self) -> Tensor:
        """The values of the codes [N, K] in float32, not rounded to the dtype of the layer."""
        return self.weight_codes.to(torch.float32) * self.weight_scale.unsqueeze(-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.rounded(self.product(self._own(x)))

    def product(self, x: Tensor) -> Tensor:
        """x W^T + b with x rounded, before the output is rounded."""
        raise NotImplementedError

    def rounded(self, y: Tensor) -> Tensor:
        """The product `y`, rounded where the layer rounds its output."""
        scale = self._buffers["output_scale"]
        if scale is None:
            return y
        return round_output(y, scale, self.output_zero, self.scheme.weights.floating)

    def found(self, parts: Mapping[str, Tensor], rows: slice) -> dict[str, Tensor | None]:
        """{buffer: its value} from a checkpoint's tensors for some rows."""
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
        new = self.codes is None
        self.hold(self.found(parts, rows), rows)
        if new:
            self._dtype = parts["weight_scale"].dtype
            self._stored_dtypes = {name: parts[name].dtype for name in self.KEPT if name in parts}

    def parts(self, rows: slice) -> dict[str, Tensor]:
        scale = self.weight_scale[rows].to(self.stored_dtype("weight_scale"))
        parts = {"weight": self.weight_codes[rows]}
        parts["weight_scale"] = scale[:1] if self._one_scale else scale.unsqueeze(-1)
        if self.input_scale is not None:
            # A copy: layers that are stacked would share it, which safetensors refuses to save.
            parts["input_scale"] = self.input_scale.to(self.stored_dtype("input_scale"), copy=True)
        if self.output_scale is not None:
            parts["output_scale"] = self.output_scale[rows][:1].to(self.stored_dtype("output_scale"))
        if self.output_zero is not None:
            parts["output_zero_point"] = self.output_zero[rows][:1].to(torch.int8)
        return parts

    def _lasting(self, name: str, held: Tensor) -> torch.dtype:
        return held.dtype


class Int8Linear(RowLinear):
    """int8 rows and an int8 input, which may have a zero point."""

    BUFFERS: ClassVar[Mapping[str, int | None]] = {**RowLinear.BUFFERS, "row_sum": 0, "input_zero": None}
    row_sum: Tensor
    input_zero: Tensor | None

    @classmethod
    def route(cls, scheme: Scheme, M: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Route:
        return w8a8_route(M, *shape, dtype, device)

    @classmethod
    def why_not_batch_invariant(cls, scheme: Scheme, K: int, dtype: torch.dtype, device: torch.device) -> list[str]:
        return []  # sums of integers are exact

    def product(self, x: Tensor) -> Tensor:
        # Read from `_buffers`, as in `PackedLinear.held`.
        inputs, held = self.scheme.inputs, cast(dict[str, Any], self._buffers)
        assert inputs is not None
        given = (held["codes"], held["weight_scale"], held["row_sum"], self._parameters["bias"])
        how = (held["input_scale"], held["input_zero"], inputs.symmetric)
        return w8a8_linear(x, *given, *how)

    def step_weight(self) -> LoopWeight | None:
        inputs = self.scheme.inputs
        assert inputs is not None
        given = (self.codes, self.weight_scale, None, self.bias, WIDE, -1, None, None, self.row_sum)
        held = LoopWeight(*given, self.input_scale, self.input_zero, inputs.symmetric)
        return held if self.output_scale is None and direct.takes(held, self.in_features) else None

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
    """float8 rows and a float8 input (`kernels.operators.fp8`). Codes are held as bytes, since `model.to(dtype)` would
    convert floats."""

    @property
    def weight_codes(self) -> Tensor:
        return self.codes.view(torch.float8_e4m3fn)

    @classmethod
    def route(cls, scheme: Scheme, M: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Route:
        return fp8_route(M, *shape, dtype, device)

    def product(self, x: Tensor) -> Tensor:
        return fp8_linear(x, self.codes, self.weight_scale, self.bias, self.input_scale)

    def found(self, parts: Mapping[str, Tensor], rows: slice) -> dict[str, Tensor | None]:
        return {**super().found(parts, rows), "codes": parts["weight"].view(torch.uint8)}


class Fp8BlockLinear(Fp8Linear):
    """float8 with one scale per 128 x 128 weights, and per token and 128 columns of the input
    (`kernels.operators.fp8_blocks`). Scales stay in their stored dtype, whatever dtype the layer computes in."""

    row_unit = BLOCK

    def __init__(self, scheme: Scheme, in_features: int, out_features: int, bias: Tensor | None) -> None:
        super().__init__(scheme, in_features, out_features, bias)
        if scheme.inputs is None or scheme.inputs.block != INPUT_BLOCK:
            raise InputError(f"{scheme}: weights in blocks are multiplied by inputs in blocks of {INPUT_BLOCK}")

    @property
    def _scales(self) -> str:
        assert isinstance(self.scheme.codes, Float8Blocks)
        return self.scheme.codes.scales

    def values(self) -> Tensor:
        scale_NK = spread(self.weight_scale.to(torch.float32), self.codes.shape, WEIGHT_BLOCK)
        return self.weight_codes.to(torch.float32) * scale_NK

    @classmethod
    def route(cls, scheme: Scheme, M: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Route:
        return fp8_block_route(M, *shape, dtype, device)

    def product(self, x: Tensor) -> Tensor:
        return fp8_block_linear(x, self.codes, self.weight_scale, self.bias)

    def slack(self, x_MK: Tensor) -> Tensor | float:
        if self.device.type == "cpu":
            return 0.0
        return SHORT_SUMS * (x_MK.abs() @ self.values().to(x_MK.dtype).abs().t())

    def fill(self, parts: Mapping[str, Tensor], rows: slice) -> None:
        codes, scale = parts["weight"].view(torch.uint8), parts[self._scales]
        if self.codes is None:
            self._dtype = scale.dtype if self.bias is None else self.bias.dtype
            self.hold({"codes": codes, "weight_scale": scale}, rows)
        else:
            self.codes[rows], self.weight_scale[block_rows(rows, BLOCK)] = codes, scale

    def parts(self, rows: slice) -> dict[str, Tensor]:
        return {"weight": self.weight_codes[rows], self._scales: self.weight_scale[block_rows(rows, BLOCK)]}
