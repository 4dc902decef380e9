"""Codes on a grid as a term of a weight, and the ways to store them.

N outputs, K inputs, G groups, n bits. Names and layouts are those of compressed-tensors:

    Packed       weight_packed      int32 [N, ceil(K n / 32)]    codes as a bit stream
    (`compress.kernels.layouts.words`)
                 weight_scale       model dtype [N, G]
                 weight_zero_point  int32 [ceil(N n / 32), G]    asymmetric only, packed along N
    Int8Rows     weight             int8 [N, K]                  symmetric, for layers with an int8 input
                 weight_scale       model dtype [N, 1]
    Int8Table    weight             int8 [N, K]                  token embeddings of 8 bits
                 weight_scale       model dtype [N, G]
                 weight_zero_point  int8 [N, G]                  asymmetric only
    Float8Rows   weight             float8 e4m3 [N, K]           symmetric, for layers with a float8 input
                 weight_scale       model dtype [N, 1] or [1]    per channel or per tensor
    Float8Blocks weight             float8 e4m3 [N, K]           symmetric, for layers with a float8 input
                 weight_scale       any float [N / 128, K / 128]    one per block, rounded up

and of transformers' `fp8`, in which DeepSeek-V3 and later models are published:

    FineGrained  weight             float8 e4m3 [N, K]           as Float8Blocks
                 weight_scale_inv   any float [N / 128, K / 128]    the factor of a code, like weight_scale
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from compress.base.errors import CheckpointError
from compress.kernels.layouts.scale_blocks import WEIGHT_BLOCK, blocks_of
from compress.kernels.layouts.words import pack_rows, unpack_rows, words_of
from compress.weights.grid import Grid, Quantized
from compress.weights.roles import Role
from compress.weights.scale_numbers import FLOAT8, FLOAT8_NAN
from compress.weights.terms import FLOATS, Format, Part, StoredTerm, check_finite

Layout = Literal[
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp6-pack-quantized",
    "mxfp8-quantized",
]
# Dtypes of scales that stay as stored; other scales are read in the model's dtype.
STORED_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class CodesFormat(Format):
    """Codes on a grid. layout: the format's name in compressed-tensors; None for one that it lacks."""

    layout: ClassVar[Layout | None] = None
    trains: ClassVar[bool] = True

    grid: Grid

    @property
    def code_bits(self) -> float:
        """Bits of information in a code, independent of its storage."""
        return self.grid.bits

    def groups(self, columns: int) -> int:
        """Scales per row."""
        return 1 if self.grid.group_size is None else columns // self.grid.group_size

    def problem(self, rows: int, columns: int) -> str | None:
        group = self.grid.group_size
        return f"has {columns} inputs; groups of {group} do not fit" if group and columns % group else None

    def words(self, inputs: Grid | None) -> str:
        group = "channel" if self.grid.group_size is None else f"g{self.grid.group_size}"
        kind = "symmetric" if self.grid.symmetric else "asymmetric"
        beside = "16" if inputs is None else f"{'fp' if inputs.floating else ''}{inputs.bits}"
        return f"w{self.grid.bits}a{beside} {group} {kind}"

    def check(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> None:
        check_finite(parts, "weight_scale")
        codes = parts.get("weight")
        if codes is not None and codes.dtype == FLOAT8 and FLOAT8_NAN in (codes.view(torch.uint8) & FLOAT8_NAN):
            raise CheckpointError("weight holds codes that are not numbers")

    def term(self, quantized: Quantized) -> "Codes":
        """The term of a quantized matrix in this format."""
        return Codes(quantized.codes, quantized.scale, quantized.zero_point, quantized.grid, self)

    def tensors(self, quantized: Quantized) -> dict[str, Tensor]:
        """The tensors that hold a quantized matrix."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Packed(CodesFormat):
    """Codes of 2 to 8 bits as a bit stream."""

    kind: ClassVar[str] = "pack-quantized"
    layout: ClassVar[Layout | None] = "pack-quantized"

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        bits, groups = self.grid.bits, self.groups(columns)
        parts = {
            "weight_scale": Part((rows, groups), FLOATS, role=Role.SCALES),
            "weight_packed": Part((rows, words_of(columns, bits)), (torch.int32,), role=Role.CODES),
        }
        if not self.grid.symmetric:
            parts["weight_zero_point"] = Part((words_of(rows, bits), groups), (torch.int32,), role=Role.ZEROS)
        return parts

    def tensors(self, quantized: Quantized) -> dict[str, Tensor]:
        bits, scale = self.grid.bits, scales_by_row(quantized)
        tensors = {"weight_scale": scale, "weight_packed": pack_rows(quantized.codes, bits)}
        if quantized.zero_point is not None:
            zero_point = quantized.zero_point.expand(scale.shape)
            tensors["weight_zero_point"] = pack_rows(zero_point.t().contiguous(), bits).t()
        return tensors

    def read(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> "Codes":
        codes = unpack_rows(parts["weight_packed"], self.grid.bits, columns)
        return self.term(Quantized(codes, parts["weight_scale"], packed_zeros(parts, self.grid, rows), self.grid))


def packed_zeros(parts: Mapping[str, Tensor], grid: Grid, rows: int) -> Tensor | None:
    """The zero points [N, G], unpacked along the rows; None for a symmetric grid."""
    if grid.symmetric:
        return None
    return unpack_rows(parts["weight_zero_point"].t().contiguous(), grid.bits, rows).t().contiguous()


@dataclass(frozen=True, kw_only=True)
class WholeCodes(CodesFormat):
    """Codes of 8 bits, each in a byte of its own."""

    whole: ClassVar[str | None] = "weight"

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        parts = {
            "weight_scale": Part((rows, self.groups(columns)), FLOATS, role=Role.SCALES),
            "weight": Part((rows, columns), (self.grid.storage,), role=Role.CODES),
        }
        if not self.grid.symmetric:
            parts["weight_zero_point"] = Part((rows, self.groups(columns)), (torch.int8,), role=Role.ZEROS)
        return parts

    def tensors(self, quantized: Quantized) -> dict[str, Tensor]:
        scale = scales_by_row(quantized)
        tensors = {"weight_scale": scale, "weight": quantized.codes}
        if quantized.zero_point is not None:
            tensors["weight_zero_point"] = quantized.zero_point.expand(scale.shape)
        return tensors

    def read(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> "Codes":
        return self.term(Quantized(parts["weight"], parts["weight_scale"], parts.get("weight_zero_point"), self.grid))

    def values(self, parts: Mapping[str, Tensor]) -> Tensor:
        rows, columns = parts["weight"].shape
        return self.read(parts, rows, columns).dequantize()


@dataclass(frozen=True, kw_only=True)
class Int8Rows(WholeCodes):
    """int8 rows of a layer whose input is rounded to int8, too."""

    kind: ClassVar[str] = "int-quantized"
    layout: ClassVar[Layout | None] = "int-quantized"


@dataclass(frozen=True, kw_only=True)
class Int8Table(WholeCodes):
    """int8 rows with inputs that are not rounded: a token embedding, which transformers loads by default only under the
    name `weight`, and the output head tied to it, which stores scales and no codes of its own."""

    kind: ClassVar[str] = "int-table"
    layout: ClassVar[Layout | None] = "int-quantized"


@dataclass(frozen=True, kw_only=True)
class Float8Rows(WholeCodes):
    """float8 rows of a layer whose input is rounded to float8, too."""

    kind: ClassVar[str] = "float-quantized"
    layout: ClassVar[Layout | None] = "float-quantized"

    @property
    def one_scale(self) -> bool:
        """True where a layer stores a single weight scale. (Integers store it once per channel even so.)"""
        return self.grid.granularity == "tensor"

    def words(self, inputs: Grid | None) -> str:
        return f"fp8 {self.grid.granularity}"

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        parts = super().parts(rows, columns)
        return {**parts, "weight_scale": Part((1,), FLOATS, role=Role.SCALES)} if self.one_scale else parts

    def tensors(self, quantized: Quantized) -> dict[str, Tensor]:
        tensors = super().tensors(quantized)
        return {**tensors, "weight_scale": tensors["weight_scale"][:1, 0]} if self.one_scale else tensors

    def read(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> "Codes":
        if self.one_scale:
            parts = {**parts, "weight_scale": parts["weight_scale"].reshape(1, 1)}
        return super().read(parts, rows, columns)


@dataclass(frozen=True, kw_only=True)
class Float8Blocks(WholeCodes):
    """float8 with one scale per block, for a layer whose input is rounded likewise. Scales stay in their stored dtype,
    whatever dtype the model computes in."""

    kind: ClassVar[str] = "float-quantized-block"
    layout: ClassVar[Layout | None] = "float-quantized"
    scales: ClassVar[str] = "weight_scale"

    def problem(self, rows: int, columns: int) -> str | None:
        return None if self.grid.block == WEIGHT_BLOCK else f"has blocks of {self.grid.block}; readable: {WEIGHT_BLOCK}"

    def words(self, inputs: Grid | None) -> str:
        assert self.grid.block is not None
        return f"fp8 block {self.grid.block[0]}x{self.grid.block[1]}"

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        assert self.grid.block is not None
        count = blocks_of((rows, columns), self.grid.block)
        return {
            self.scales: Part(count, STORED_FLOATS, role=Role.SCALES),
            "weight": Part((rows, columns), (self.grid.storage,), role=Role.CODES),
        }

    def tensors(self, quantized: Quantized) -> dict[str, Tensor]:
        return {self.scales: quantized.scale, "weight": quantized.codes}

    def check(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> None:
        check_finite(parts, self.scales)
        super().check(parts, rows, columns)

    def read(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> "Codes":
        return self.term(Quantized(parts["weight"], parts[self.scales], None, self.grid))


@dataclass(frozen=True, kw_only=True)
class FineGrained(Float8Blocks):
    """`Float8Blocks` under the names of transformers' `fp8`."""

    kind: ClassVar[str] = "fp8"
    layout: ClassVar[Layout | None] = None
    scales: ClassVar[str] = "weight_scale_inv"


@dataclass(frozen=True)
class Codes(Quantized, StoredTerm):
    """A quantized matrix in a format."""

    format: CodesFormat

    def parts(self) -> dict[str, Tensor]:
        return self.format.tensors(self)


def scales_by_row(quantized: Quantized) -> Tensor:
    """The scales [N, G]; a single scale is repeated for every row."""
    one = quantized.scale.shape[0] == 1
    return quantized.scale.expand(quantized.codes.shape[0], -1) if one else quantized.scale
