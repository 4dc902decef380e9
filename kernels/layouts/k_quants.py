"""The bytes of llama.cpp's K-quants and IQ4_XS: super-blocks of 256 weights whose scales are codes themselves (ggml,
`block_q2_K` ... `block_q6_K`, `block_iq4_xs`; layouts as gguf-py's `quants.py` reads them).

A super-block is G groups of g weights. All of its numbers but d and dmin are unsigned codes. Sections, in order:

    q2_k   84 bytes   scales 16, codes 64, d, dmin          g 16   scale and minimum 4 bits each, in one byte
    q3_k  110 bytes   high bits 32, codes 64, scales 12, d  g 16   scales of 6 bits
    q4_k  144 bytes   d, dmin, scales 12, codes 128         g 32   scales and minima of 6 bits
    q5_k  176 bytes   d, dmin, scales 12, high bits 32,
                      codes 128                             g 32   likewise
    q6_k  210 bytes   codes 128, high bits 64, scales 16, d g 16   scales of 8 bits
    iq4_xs 136 bytes  d, scales 6, codes 128                g 32   scales of 6 bits

d, dmin: little-endian float16. A plane holds b bits of every code: bytes of `span` codes lie side by side, and bits
[i b, (i + 1) b) of a byte belong to the code i spans on.

The 12 bytes of scales (s) and minima (m) of q4_k and q5_k, high bits first:

    byte  0...3   s4..s7 bits 4, 5 | s0..s3          4...7   m4..m7 bits 4, 5 | m0..m3        8...11   m4..m7 | s4..s7

and of q3_k:

    byte  0...7   s8..s15 | s0..s7 (4 low bits each)    8...11   bits 4, 5 of s12..s15 | s8..s11 | s4..s7 | s0..s3

and the 6 bytes of iq4_xs:

    byte  0, 1    bits 4, 5 of s3 | s2 | s1 | s0, of s7 | s6 | s5 | s4
          2...5   s1 | s0, s3 | s2, s5 | s4, s7 | s6 (4 low bits each)
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 256
_FLOAT = 2  # bytes of d, and of dmin


class Plane(NamedTuple):
    """Some bits of every code, from the lowest that no earlier plane has: how many, and how many codes lie side by
    side."""

    bits: int
    span: int


@dataclass(frozen=True)
class KLayout:
    """The layout of a type. group: weights that share a scale. planes: of the codes, low bits first. sections: names in
    the order of the bytes. scale_bits: of a scale's code, and of a minimum's. scale_bytes: of the section `scales`.
    scale_planes: (lowest bit, plane) of each part of that section, in the order of its bytes; empty where a scale is a
    byte, or has a minimum beside it."""

    group: int
    planes: tuple[Plane, ...]
    sections: tuple[str, ...]
    scale_bits: int
    scale_bytes: int
    has_minima: bool
    scale_planes: tuple[tuple[int, Plane], ...] = ()

    @property
    def bits(self) -> int:
        """Bits of a weight's code."""
        return sum(plane.bits for plane in self.planes)

    @property
    def groups(self) -> int:
        """Groups of a super-block."""
        return BLOCK // self.group

    @property
    def size(self) -> int:
        """Bytes of a super-block."""
        return sum(self._sizes())

    def _sizes(self) -> list[int]:
        known = {f"codes{i}": BLOCK * plane.bits // 8 for i, plane in enumerate(self.planes)}
        known |= {"scales": self.scale_bytes, "d": _FLOAT, "dmin": _FLOAT}
        return [known[name] for name in self.sections]

    def cut(self, blocks: Tensor) -> dict[str, Tensor]:
        """{section: bytes} of super-blocks [..., size]."""
        return dict(zip(self.sections, blocks.split(self._sizes(), -1), strict=True))


_Q3_SCALES = (0, Plane(4, 8)), (4, Plane(2, 4))
_IQ4_SCALES = (4, Plane(2, 1)), (0, Plane(4, 1))
_WITH_MINIMA = ("d", "dmin", "scales")
K_QUANTS = {
    "q2_k": KLayout(16, (Plane(2, 32),), ("scales", "codes0", "d", "dmin"), 4, 16, True),
    "q3_k": KLayout(16, (Plane(2, 32), Plane(1, 32)), ("codes1", "codes0", "scales", "d"), 6, 12, False, _Q3_SCALES),
    "q4_k": KLayout(32, (Plane(4, 32),), (*_WITH_MINIMA, "codes0"), 6, 12, True),
    "q5_k": KLayout(32, (Plane(4, 32), Plane(1, 32)), (*_WITH_MINIMA, "codes1", "codes0"), 6, 12, True),
    "q6_k": KLayout(16, (Plane(4, 64), Plane(2, 32)), ("codes0", "codes1", "scales", "d"), 8, 16, False),
    "iq4_xs": KLayout(32, (Plane(4, 16),), ("d", "scales", "codes0"), 6, 6, False, _IQ4_SCALES),
}


class KFields(NamedTuple):
    """The numbers of super-blocks: codes uint8 [..., 256], scales and minima uint8 [..., G], d and dmin float16 [...].
    minima, dmin: None for a type without them."""

    codes: Tensor
    scales: Tensor
    minima: Tensor | None
    d: Tensor
    dmin: Tensor | None


def pack_blocks(fields: KFields, layout: KLayout) -> Tensor:
    """The bytes of super-blocks, uint8 [..., size]."""
    parts = {"scales": _pack_scales(fields.scales, fields.minima, layout), "d": _bytes(fields.d)}
    if fields.dmin is not None:
        parts["dmin"] = _bytes(fields.dmin)
    rest = fields.codes
    for i, plane in enumerate(layout.planes):
        parts[f"codes{i}"] = _interleaved(rest & (2**plane.bits - 1), plane)
        rest = rest >> plane.bits
    return torch.cat([parts[name] for name in layout.sections], -1)


def unpack_blocks(blocks: Tensor, layout: KLayout) -> KFields:
    """Inverse of `pack_blocks`."""
    parts = layout.cut(blocks)
    codes, shift = torch.zeros((), dtype=torch.uint8, device=blocks.device), 0
    for i, plane in enumerate(layout.planes):
        codes = codes | _side_by_side(parts[f"codes{i}"], plane) << shift
        shift += plane.bits
    scales, minima = _unpack_scales(parts["scales"], layout)
    return KFields(codes, scales, minima, _floats(parts["d"]), _floats(parts["dmin"]) if layout.has_minima else None)


def _bytes(number: Tensor) -> Tensor:
    return number.contiguous().unsqueeze(-1).view(torch.uint8)


def _floats(held: Tensor) -> Tensor:
    return held.clone(memory_format=torch.contiguous_format).view(torch.float16).squeeze(-1)


def _shifts(plane: Plane, device: torch.device) -> Tensor:
    return torch.arange(0, 8, plane.bits, dtype=torch.uint8, device=device).unsqueeze(-1)


def _interleaved(codes: Tensor, plane: Plane) -> Tensor:
    """The bytes of a plane from numbers [..., n] that have no other bits."""
    apart = codes.unflatten(-1, (-1, 8 // plane.bits, plane.span)) << _shifts(plane, codes.device)
    return apart.sum(-2, dtype=torch.uint8).flatten(-2)


def _side_by_side(held: Tensor, plane: Plane) -> Tensor:
    """Inverse of `_interleaved`."""
    apart = held.unflatten(-1, (-1, 1, plane.span)) >> _shifts(plane, held.device)
    return (apart & (2**plane.bits - 1)).flatten(-3)


def _pack_scales(scales: Tensor, minima: Tensor | None, layout: KLayout) -> Tensor:
    """The section of scales, which has the minima, too, where there are any."""
    if minima is None:
        planes = [_interleaved(scales >> bit & 2**plane.bits - 1, plane) for bit, plane in layout.scale_planes]
        return torch.cat(planes, -1) if planes else scales
    if layout.scale_bits == 4:
        return scales | minima << 4
    (s, late_s), (m, late_m) = scales.chunk(2, -1), minima.chunk(2, -1)
    return torch.cat([s | late_s >> 4 << 6, m | late_m >> 4 << 6, late_s & 15 | late_m << 4], -1)


def _unpack_scales(held: Tensor, layout: KLayout) -> tuple[Tensor, Tensor | None]:
    """Inverse of `_pack_scales`."""
    if layout.scale_bits == 8:
        return held, None
    if layout.scale_bits == 4:
        return held & 15, held >> 4
    if not layout.has_minima:
        sizes = [layout.groups * plane.bits // 8 for _, plane in layout.scale_planes]
        parts = zip(held.split(sizes, -1), layout.scale_planes, strict=True)
        found = [_side_by_side(part, plane) << bit for part, (bit, plane) in parts]
        return found[0] | found[1], None
    s, m, late = held.chunk(3, -1)
    late_s, late_m = late & 15 | s >> 6 << 4, late >> 4 | m >> 6 << 4
    return torch.cat([s & 63, late_s], -1), torch.cat([m & 63, late_m], -1)
