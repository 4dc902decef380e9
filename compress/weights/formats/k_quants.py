"""K-quants of llama.cpp, and its IQ4_XS, as a term of a weight: the bytes of a GGUF tensor as they are, so that
exporting is copying.

N outputs, K inputs; a super-block is 256 weights of a row in G groups (`compress.kernels.layouts.k_quants`).

    weight_blocks   uint8 [N, K / 256 * bytes]      super-blocks of a row one after another

    q2_k, q4_k, q5_k   value = d scale code - dmin minimum      scales and minima unsigned
    q3_k, q6_k         value = d scale (code - 2^(bits - 1))    scales signed
    iq4_xs             value = d scale level(code)              scales signed; `weights.levels.IQ4_NL`

computed in float32 as ggml does: d scale and dmin minimum first, both exact, then the product with the code, then the
difference. d and dmin are float16, whatever dtype the model has.

Bits per weight: q2_k 2.625, q3_k 3.4375, q4_k 4.5, q5_k 5.5, q6_k 6.5625, iq4_xs 4.25.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from compress.base.errors import CheckpointError
from compress.kernels.layouts.k_quants import BLOCK, K_QUANTS, KFields, KLayout, pack_blocks, unpack_blocks
from compress.weights.formats.dense import dense
from compress.weights.grid import Grid, Quantized, encode_unsigned
from compress.weights.levels import IQ4_NL, Levels
from compress.weights.matrix import Matrix, added
from compress.weights.roles import Role
from compress.weights.terms import Format, Part, StoredTerm

PART = "weight_blocks"


@dataclass(frozen=True, kw_only=True)
class KQuant(Format):
    """Super-blocks of one of llama.cpp's types. type: `q2_k` ... `q6_k` or `iq4_xs`."""

    kind: ClassVar[str] = "k-quant"
    trains: ClassVar[bool] = True
    type: str = "q4_k"

    @property
    def layout(self) -> KLayout:
        return K_QUANTS[self.type]

    @property
    def levels(self) -> Levels | None:
        """The levels that its codes stand for; None where they are numbers."""
        return IQ4_NL if self.type == "iq4_xs" else None

    @property
    def zero(self) -> int:
        """The code whose value is 0, if the type has no minima; 0 with them, and for levels."""
        return 0 if self.layout.has_minima or self.levels is not None else 2 ** (self.layout.bits - 1)

    @property
    def range(self) -> tuple[float, float]:
        """The least and the largest weight in units of its scale, without a minimum."""
        if self.levels is not None:
            return self.levels.least, self.levels.largest
        return -self.zero, 2**self.layout.bits - 1 - self.zero

    def encode(self, x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """The codes nearest to x, in its dtype; of iq4_xs, levels. Where the scale is 0, so are all values."""
        if self.levels is None:
            return encode_unsigned(x, scale, zero, self.layout.bits)
        return self.levels.nearest(torch.where(scale == 0, torch.zeros_like(x), x / scale))

    @property
    def grid(self) -> Grid:
        """The grid of its codes, without minima."""
        size = self.layout.group
        if self.levels is not None:
            return Grid(bits=self.layout.bits, type="nonlinear", granularity="group", group_size=size)
        return Grid(bits=self.layout.bits, symmetric=False, signed=False, granularity="group", group_size=size)

    @property
    def scale_range(self) -> tuple[int, int]:
        """The least and the largest number that a scale's code stands for."""
        levels = 2**self.layout.scale_bits
        return (0, levels - 1) if self.layout.has_minima else (-levels // 2, levels // 2 - 1)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.layout.size / BLOCK

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        size = columns // BLOCK * self.layout.size
        return {PART: Part((rows, size), (torch.uint8,), role=Role.BLOCKS)}

    def problem(self, rows: int, columns: int) -> str | None:
        if self.type not in K_QUANTS:
            return f"has the type {self.type!r}; readable: {', '.join(K_QUANTS)}"
        return f"has {columns} inputs; super-blocks of {BLOCK} do not fit" if columns % BLOCK else None

    def check(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> None:
        fields = self._fields(parts[PART])
        for name, held in (("d", fields.d), ("dmin", fields.dmin)):
            if held is not None and not bool(torch.isfinite(held).all()):
                raise CheckpointError(f"{PART} holds values of {name} that are not finite numbers")

    def words(self, inputs: Grid | None) -> str:
        return self.type

    def read(self, parts: Mapping[str, Tensor], rows: int, columns: int) -> "KBlocks":
        return KBlocks(parts[PART], self)

    def values(self, parts: Mapping[str, Tensor]) -> Tensor:
        return self.read(parts, 0, 0).dequantize()

    def _fields(self, blocks: Tensor) -> KFields:
        return unpack_blocks(blocks.unflatten(-1, (-1, self.layout.size)), self.layout)

    def packed(self, codes: Tensor, scales: Tensor, minima: Tensor, d: Tensor, dmin: Tensor) -> "KBlocks":
        """The term of whole numbers in any dtype: codes [N, K] (of iq4_xs, levels), scales and minima [N, K / g], and
        of d and dmin [N, K / 256], which are exact in float16. minima and dmin of a type without them are not looked
        at."""
        layout, (rows, columns) = self.layout, codes.shape
        codes = codes if self.levels is None else self.levels.codes(codes)
        whole, signed = codes.to(torch.int16), scales.to(torch.int16)
        if not layout.has_minima:
            # q3_k adds half of its range, and q6_k has numbers of 8 bits in two's complement.
            signed = signed + 2 ** (layout.scale_bits - 1) if layout.scale_bits < 8 else signed & 255
        inside = (rows, columns // BLOCK, -1)
        fields = KFields(
            whole.to(torch.uint8).view(inside),
            signed.to(torch.uint8).view(inside),
            minima.to(torch.uint8).view(inside) if layout.has_minima else None,
            d.to(torch.float16),
            dmin.to(torch.float16) if layout.has_minima else None,
        )
        return KBlocks(pack_blocks(fields, layout).flatten(1), self)


@dataclass(frozen=True)
class KBlocks(StoredTerm):
    """A term in `KQuant`: its bytes, uint8 [N, K / 256 * bytes of a super-block]."""

    blocks: Tensor
    format: KQuant

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.blocks), self.blocks.shape[1] // self.format.layout.size * BLOCK

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        codes, minima = self._affine()
        values = codes.dequantize()
        if minima is not None:
            values = (values.view(*minima.shape, -1) - minima.unsqueeze(-1)).view(values.shape)
        return values if dtype is None else values.to(dtype)

    def on_grid(self) -> Matrix:
        codes, minima = self._affine()
        size = self.format.layout.group
        return codes if minima is None else added(codes, dense(-minima.repeat_interleave(size, 1)))

    def _affine(self) -> tuple[Quantized, Tensor | None]:
        """(Codes with their scales, minima [N, K / g] in float32, which are taken from their values)."""
        fields, format_ = self.format._fields(self.blocks), self.format
        scale = (fields.d.float().unsqueeze(-1) * self._scales(fields.scales)).flatten(1)
        zero = None if format_.levels is not None else torch.full_like(scale, format_.zero, dtype=torch.uint8)
        codes = Quantized(fields.codes.flatten(1), scale, zero, format_.grid)
        if fields.minima is None or fields.dmin is None:
            return codes, None
        return codes, (fields.dmin.float().unsqueeze(-1) * fields.minima.float()).flatten(1)

    def recoded(self, codes_NK: Tensor) -> "KBlocks":
        fields = self.format._fields(self.blocks)._replace(codes=codes_NK.unflatten(1, (-1, BLOCK)))
        return KBlocks(pack_blocks(fields, self.format.layout).flatten(1), self.format)

    def steps(self) -> Tensor:
        """float16 [N, K / 256, 1 or 2]: d, and dmin where the type has minima."""
        fields = self.format._fields(self.blocks)
        return torch.stack([held for held in (fields.d, fields.dmin) if held is not None], -1)

    def _scales(self, codes: Tensor) -> Tensor:
        """The numbers, in float32, that codes of scales stand for."""
        if self.format.layout.scale_bits == 8:
            return codes.view(torch.int8).float()
        return codes.float() - (0 if self.format.layout.has_minima else 2 ** (self.format.layout.scale_bits - 1))

    def parts(self) -> dict[str, Tensor]:
        return {PART: self.blocks}

    def rows(self, part: slice) -> "KBlocks":
        return KBlocks(self.blocks[part], self.format)

    @classmethod
    def stacked(cls, terms: Sequence["KBlocks"]) -> "KBlocks":
        return cls(torch.cat([term.blocks for term in terms]), terms[0].format)
