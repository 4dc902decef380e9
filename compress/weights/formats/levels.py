"""Codes of tables of levels, and float8 codes in groups, as a term of a weight: microscaling floats, NVFP4, NF4,
IQ4_NL.

N outputs, K inputs, G groups, n bits. Names and layouts are those of compressed-tensors, which lacks NF4 and IQ4_NL:

    all          weight_packed         uint8 [N, K n / 8]       codes as a bit stream, the first in the lowest bits
    but MXFP8    weight                float8 e4m3 [N, K]
    MX           weight_scale          uint8 [N, G]             127 + the exponent of a power of two; 255 is NaN
    NVFP4        weight_scale          float8 e4m3 [N, G]       value = code * weight_scale / weight_global_scale
                 weight_global_scale   float32 [1]
    NF4          weight_scale          model dtype [N, G]       the absmax of a group; float32 in NF4Float32
    IQ4_NL       weight_scale          model dtype [N, G]       of either sign or 0 (of zeros), a number of float16, too

Values are computed in float32, whatever dtype the model has. Layers that read one input have one global scale, because
engines make one layer of some of them (`passes.protocol.sites.Site.reached`).

ModelOpt (NVIDIA) has the numbers of NVFP4 under other names, its global scales the other way round:

    weight uint8, weight_scale, weight_scale_2 = 1 / weight_global_scale, input_scale = 1 / input_global_scale
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from compress.base.errors import CheckpointError, InputError
from compress.kernels.layouts.words import pack_rows, unpack_rows
from compress.weights.formats.codes import Codes, CodesFormat, Layout
from compress.weights.grid import Grid, Quantized, grid_of
from compress.weights.number_formats import ALONE, LEVELS
from compress.weights.roles import Role
from compress.weights.scale_numbers import E8M0_NAN, FLOAT8, e8m0_codes, of_e8m0
from compress.weights.terms import FLOATS, Part

BYTE, HALF_BYTE = 8, 4
GLOBAL = "weight_global_scale"


@dataclass(frozen=True, kw_only=True)
class LevelCodes(CodesFormat):
    """Base of the formats. on: the grid that one of them has."""

    telling: ClassVar[str | None] = "weight_packed"
    as_bytes: ClassVar[frozenset[str]] = frozenset({GLOBAL})
    on: ClassVar[Grid]
    # Names of the codes, the global scale of weights and that of inputs; inverted: files hold 1 / the global scales.
    packed: ClassVar[str] = "weight_packed"
    of_weights: ClassVar[str] = GLOBAL
    of_inputs: ClassVar[str] = "input_global_scale"
    inverted: ClassVar[bool] = False

    def __post_init__(self) -> None:
        known = replace(self.grid, range_choice=self.on.range_choice, group_size=self.on.group_size)
        if known != self.on:
            raise InputError(f"{self.kind} codes are on the grid of {self.kind}; given: {self.grid}")

    def size(self, first: int, second: int) -> tuple[int, int]:
        return first, second * BYTE // self.grid.bits

    def problem(self, rows: int, columns: int) -> str | None:
        group = self.on.group_size
        if self.grid.group_size != group:
            return f"has groups of {self.grid.group_size}; {self.kind} has groups of {group}"
        return super().problem(rows, columns)

    def words(self, inputs: Grid | None) -> str:
        name = self.kind.partition("-")[0]
        return name if inputs is not None or name in ALONE else f"{name}a16"

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        kinds = {"e8m0": (torch.uint8,), "e4m3": (FLOAT8,)}
        kind = kinds.get(self.grid.scales, FLOATS)
        codes = FLOAT8 if self.grid.levels is None else torch.uint8
        parts = {
            "weight_scale": Part((rows, self.groups(columns)), kind, role=Role.SCALES),
            self.packed: Part((rows, columns * self.grid.bits // BYTE), (codes,), role=Role.CODES),
        }
        if self.grid.scales == "e4m3":
            parts[self.of_weights] = Part((1,), (torch.float32,), role=Role.SCALES)
        return parts

    def tensors(self, quantized: Quantized) -> dict[str, Tensor]:
        parts = {"weight_scale": quantized.scale}
        if self.grid.scales == "e8m0":
            parts["weight_scale"] = e8m0_codes(quantized.scale)
        elif self.grid.global_scales:
            divisor = quantized.grid.global_scale
            assert divisor is not None, "a quantized matrix knows its global scale"
            # Dividing moved each scale by less than half a step of float32; e4m3 has wider ones.
            parts["weight_scale"] = (quantized.scale * divisor).to(FLOAT8)
            stored = 1 / divisor if self.inverted else divisor
            parts[self.of_weights] = torch.tensor([stored], device=quantized.scale.device)
        return {**parts, self.packed: self.pack(quantized.codes)}

    def pack(self, codes: Tensor) -> Tensor:
        """Pack codes [R, K] into stored rows: uint8, or float8 as they are."""
        if self.grid.levels is None:
            return codes
        return pack_rows(codes, self.grid.bits, signed=False).contiguous().view(torch.uint8)

    def unpack(self, packed: Tensor, columns: int) -> Tensor:
        """Inverse of `pack`."""
        if self.grid.levels is None:
            return packed
        packed = packed.contiguous()
        if self.grid.bits == HALF_BYTE:
            return torch.stack([packed & 15, packed >> HALF_BYTE], -1).view(len(packed), columns)
        return unpack_rows(packed.view(torch.int32), self.grid.bits, columns, signed=False)

    def read(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> Codes:
        codes, stored, grid = self.unpack(parts[self.packed], columns), parts["weight_scale"], self.grid
        if grid.scales == "e8m0":
            scale = of_e8m0(stored)
        elif grid.global_scales:
            divisor = self.global_scale(parts[self.of_weights])
            local = stored.to(torch.float32)
            scale = local * parts[self.of_weights].reshape(()) if self.inverted else local / divisor
            grid = replace(grid, global_scale=divisor)
        else:
            scale = stored
        return self.term(Quantized(codes, scale, None, grid))

    def values(self, parts: Mapping[str, Tensor]) -> Tensor:
        rows, columns = self.size(*parts[self.packed].shape)
        return self.read(parts, rows, columns).dequantize()

    def check(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> None:
        scale = parts["weight_scale"]
        wrong = scale == E8M0_NAN if self.grid.scales == "e8m0" else ~torch.isfinite(scale.float())
        if bool(wrong.any()):
            raise CheckpointError("weight_scale holds values that are not finite numbers")
        if self.grid.levels is None and bool(parts[self.packed].float().isnan().any()):
            raise CheckpointError(f"{self.packed} holds codes that are not numbers")
        check_global(parts, self.of_weights)

    def global_scale(self, stored: Tensor) -> float:
        """The divisor of scales that a stored number stands for."""
        number = float(stored.reshape(()))
        return 1 / number if self.inverted else number


def check_global(parts: Mapping[str, Tensor], name: str) -> None:
    """Raises CheckpointError for a global scale that is no finite number above 0."""
    if name in parts and not 0 < float(parts[name].reshape(())) < float("inf"):
        raise CheckpointError(f"{name} holds values that are not finite numbers above 0")


def without_global(term: Codes) -> Codes:
    """The matrix of the same codes and local scales, as if the global scale were 1; the same where there is none."""
    divisor = term.grid.global_scale
    if divisor is None:
        return term
    local = (term.scale * divisor).to(FLOAT8).to(term.scale.dtype)
    return replace(term, scale=local, grid=replace(term.grid, global_scale=1.0))


@dataclass(frozen=True, kw_only=True)
class MXFP4(LevelCodes):
    """E2M1 in groups of 32 with powers of two."""

    kind: ClassVar[str] = "mxfp4-pack-quantized"
    layout: ClassVar[Layout | None] = "mxfp4-pack-quantized"
    on: ClassVar[Grid] = grid_of(LEVELS["mxfp4"])


@dataclass(frozen=True, kw_only=True)
class MXFP6(LevelCodes):
    """E2M3 in groups of 32 with powers of two."""

    kind: ClassVar[str] = "mxfp6-pack-quantized"
    layout: ClassVar[Layout | None] = "mxfp6-pack-quantized"
    on: ClassVar[Grid] = grid_of(LEVELS["mxfp6"])


@dataclass(frozen=True, kw_only=True)
class MXFP6E3M2(LevelCodes):
    """E3M2 in groups of 32 with powers of two; compressed-tensors has E2M3 alone."""

    kind: ClassVar[str] = "mxfp6e3m2"
    on: ClassVar[Grid] = grid_of(LEVELS["mxfp6e3m2"])


@dataclass(frozen=True, kw_only=True)
class NVFP4(LevelCodes):
    """E2M1 in groups of 16 with e4m3 scales and a global one."""

    kind: ClassVar[str] = "nvfp4-pack-quantized"
    layout: ClassVar[Layout | None] = "nvfp4-pack-quantized"
    on: ClassVar[Grid] = grid_of(LEVELS["nvfp4"])


@dataclass(frozen=True, kw_only=True)
class ModelOptNVFP4(NVFP4):
    """`NVFP4` under the names of ModelOpt."""

    kind: ClassVar[str] = "modelopt-nvfp4"
    layout: ClassVar[Layout | None] = None
    telling: ClassVar[str | None] = "weight"
    packed: ClassVar[str] = "weight"
    of_weights: ClassVar[str] = "weight_scale_2"
    of_inputs: ClassVar[str] = "input_scale"
    inverted: ClassVar[bool] = True
    as_bytes: ClassVar[frozenset[str]] = frozenset({of_weights})

    def words(self, inputs: Grid | None) -> str:
        return "nvfp4a16" if inputs is None else "nvfp4"


@dataclass(frozen=True, kw_only=True)
class NF4(LevelCodes):
    """Quantiles of the normal distribution in groups of 64."""

    kind: ClassVar[str] = "nf4"
    on: ClassVar[Grid] = grid_of(LEVELS["nf4"])


@dataclass(frozen=True, kw_only=True)
class NF4Float32(NF4):
    """`NF4` whose scales are float32, whatever dtype the model has: those of bitsandbytes."""

    kind: ClassVar[str] = "nf4-float32"
    as_bytes: ClassVar[frozenset[str]] = frozenset({"weight_scale"})

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        parts = super().parts(rows, columns)
        return {**parts, "weight_scale": parts["weight_scale"]._replace(dtypes=(torch.float32,))}

    def term(self, quantized: Quantized) -> Codes:
        return super().term(replace(quantized, scale=quantized.scale.float()))


@dataclass(frozen=True, kw_only=True)
class IQ4NL(LevelCodes):
    """The levels of llama.cpp's IQ4_NL in groups of 32, with scales that its blocks hold."""

    kind: ClassVar[str] = "iq4_nl"
    on: ClassVar[Grid] = grid_of(LEVELS["iq4_nl"])


@dataclass(frozen=True, kw_only=True)
class MXFP8(LevelCodes):
    """float8 e4m3 in groups of 32 with powers of two."""

    kind: ClassVar[str] = "mxfp8-quantized"
    layout: ClassVar[Layout | None] = "mxfp8-quantized"
    whole: ClassVar[str | None] = "weight"
    telling: ClassVar[str | None] = None
    packed: ClassVar[str] = "weight"
    on: ClassVar[Grid] = grid_of(LEVELS["mxfp8"])


# {name in `LEVELS`: the storage of weights}.
LEVEL_FORMATS: dict[str, type[LevelCodes]] = {
    kind.kind.partition("-")[0]: kind for kind in (MXFP4, NVFP4, MXFP6, MXFP6E3M2, MXFP8, NF4, IQ4NL)
}
