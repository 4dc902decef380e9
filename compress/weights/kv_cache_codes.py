"""Key-value caches in few bits: their schemes, and the conversion of keys and values to the bytes that a cache keeps.

    bits  granularity  scale                  kept
    8     tensor       k_scale, v_scale [1]        in the checkpoint, found by calibration
    8     head         k_scale, v_scale [H, 1, 1]  in the checkpoint, found by calibration
    8     token        for every token and head    behind the D codes of the token, as the four bytes of a float32
    4, 3  token        for every token, head and G elements: a minimum and a step, before the codes, as two bfloat16

Codes of 8 bits are symmetric: int8, x = s q with s = absmax / 127.5, or float8 e4m3 with s = absmax / 448
(`weights.grid`). Codes of fewer bits are asymmetric: x = minimum + step q with step = (maximum - minimum) / (2^b - 1).

Shapes: B sequences, H key-value heads, T tokens, D elements of a head (of keys and of values, which may differ), in
groups of G.

Sources: asymmetric groups of tokens are KIVI's for values (Liu et al. 2024, arXiv 2402.02750); keys are rotated before
they are rounded as in QuaRot (Ashkboos et al. 2024, arXiv 2404.00456), where the rotation is called R3.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from compress.base.errors import InputError
from compress.kernels.cpu.states import stride_of
from compress.kernels.division import divide
from compress.kernels.operators import states
from compress.weights.grid import Grid, decode, encode, scale_of_range
from compress.weights.number_formats import Granularity
from compress.weights.rotations.hadamard import has_hadamard, rotated

CacheBits = Literal[8, 4, 3]
CacheGranularity = Literal["tensor", "head", "token"]
SCALES = ("k_scale", "v_scale")
SCALE_BYTES = 4  # of a float32
IN_BYTES = 8  # elements whose codes fill whole bytes, at any number of bits
# Codes of b bits are split into fields that divide a byte: {b: the bits of each field, from the lowest on}.
FIELDS: dict[int, tuple[int, ...]] = {4: (4,), 3: (2, 1)}


@dataclass(frozen=True, kw_only=True)
class CacheScheme:
    """The storage of a model's keys and values.

    type, granularity: of 8 bits: int8 or float8, one scale per tensor, head, or token and head.
    bits: 8, or 4 or 3 for int with a minimum and a step per token, head and group.
    group: the most elements of a group, at 4 and 3 bits; a head is split into the largest equal groups up to it.
    rotated: keys are rotated before they are rounded, and turned back when they are read, at 4 and 3 bits.
    """

    type: Literal["int", "float"] = "int"
    granularity: CacheGranularity = "token"
    bits: CacheBits = 8
    group: int | None = None
    rotated: bool = False

    def __str__(self) -> str:
        groups = "" if self.group is None else f" in groups of {self.group}"
        return f"{self.number} cache, per {self.granularity}{groups}{', keys rotated' if self.rotated else ''}"

    @property
    def number(self) -> str:
        """The type of a stored number, as options have it."""
        return f"int{self.bits}" if self.type == "int" else "fp8"

    @property
    def narrow(self) -> bool:
        """True for fewer than 8 bits, which compressed-tensors has no words for."""
        return self.group is not None

    @property
    def dynamic(self) -> bool:
        """True where scales are fitted to each token at run time."""
        return self.granularity == "token"

    @property
    def grid(self) -> Grid:
        """The grid of keys and values that are laid out as rows with one column per head."""
        granularity: dict[CacheGranularity, Granularity] = {"tensor": "tensor", "head": "channel", "token": "token"}
        return Grid(bits=8, type=self.type, granularity=granularity[self.granularity])


@dataclass(frozen=True)
class CacheCodes:
    """The decision about the cache of one attention: its scheme and the scales of keys and values, [1] or [H, 1, 1] in
    their stored dtype (None where they are fitted to every token)."""

    scheme: CacheScheme
    scales: tuple[Tensor, Tensor] | None = None

    def parts(self) -> dict[str, Tensor]:
        """Its tensors in a checkpoint; none where scales are fitted to every token."""
        return {} if self.scales is None else dict(zip(SCALES, self.scales, strict=True))

    @classmethod
    def read(cls, scheme: CacheScheme, parts: Mapping[str, Tensor]) -> "CacheCodes":
        """Inverse of `parts`."""
        keys, values = (parts.get(name) for name in SCALES)
        return cls(scheme, None if keys is None or values is None else (keys, values))


def encode_states(x: Tensor, scheme: CacheScheme, scale: Tensor | None, keys: bool = False) -> Tensor:
    """Keys or values [B, H, T, D] as the bytes that a cache keeps, int8 [B, H, T, D], [B, H, T, D + 4] per token, or
    [B, H, T, D b / 8 + 4 D / G] at 4 and 3 bits. keys: x are keys, which a scheme may rotate."""
    turned = scheme.rotated and keys
    if (group := _compiled_group(x, scheme, turned)) is not None:
        return states.encode_states(x, scheme.bits, group, turned)
    work = rotated(x.float(), key_rotation(x.shape[-1])) if turned else x.float()
    if scheme.group is not None:
        return _encode_groups(work, scheme.bits, group_in(x.shape[-1], scheme.group))
    if scheme.dynamic:
        absmax = work.abs().amax(-1, keepdim=True)
        scale, _ = scale_of_range(-absmax, absmax, scheme.grid, torch.float32)
    assert scale is not None
    codes = encode(work, _working(scale, x), torch.zeros((), device=x.device), scheme.grid)
    stored = codes.to(scheme.grid.storage).view(torch.int8)
    return torch.cat([stored, scale.view(torch.int8)], -1) if scheme.dynamic else stored


def decode_states(
    stored: Tensor, scheme: CacheScheme, scale: Tensor | None, like: Tensor, keys: bool = False
) -> Tensor:
    """The keys or values of stored bytes, in the dtype and with the elements of `like` [..., D]. Bytes of 0 are values
    of 0. keys: of `encode_states`."""
    size, turned = like.shape[-1], scheme.rotated and keys
    if (group := _compiled_group(like, scheme, turned)) is not None:
        return states.decode_states(stored, size, scheme.bits, group, turned).to(like.dtype)
    if scheme.group is not None:
        found = _decode_groups(stored, scheme.bits, size, group_in(size, scheme.group))
        return (rotated(found, key_rotation(size), back=True) if turned else found).to(like.dtype)
    if scheme.dynamic:
        stored, scale = stored[..., :-SCALE_BYTES], stored[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    assert scale is not None
    codes = stored.contiguous().view(scheme.grid.storage).float()
    return decode(codes, _working(scale, stored), torch.zeros((), device=stored.device), like.dtype).to(like.dtype)


def _compiled_group(x: Tensor, scheme: CacheScheme, turned: bool) -> int | None:
    """The size of the groups of states x for the compiled loops; None where these do not take them."""
    if scheme.type == "float" or not scheme.dynamic:
        return None
    group = _group_of(scheme, x.shape[-1])
    return None if states.why_not_codes(x, scheme.bits, group, turned) else group


def bytes_of_token(scheme: CacheScheme, size: int) -> int:
    """The bytes that a cache keeps of the keys, or the values, of a token in one head of `size` elements."""
    return stride_of(size, scheme.bits, _group_of(scheme, size)) if scheme.dynamic else size


def _group_of(scheme: CacheScheme, size: int) -> int:
    """The elements of a head that share a range: at 8 bits all of them."""
    return size if scheme.group is None else group_in(size, scheme.group)


def group_in(size: int, most: int) -> int:
    """The size of the equal groups of a head: the largest divisor of `size` up to `most`. Raises InputError for a head
    whose codes do not fill whole bytes."""
    if size % IN_BYTES:
        raise InputError(f"a key-value cache of 4 or 3 bits takes heads of a multiple of {IN_BYTES}, not {size}")
    return next(group for group in range(min(most, size), 0, -1) if size % group == 0)


def key_rotation(size: int) -> int:
    """The size of the blocks in which keys of `size` elements, an even number, are rotated: all of them where there is
    a Hadamard matrix."""
    return next(block for block in range(size, 1, -1) if size % block == 0 and has_hadamard(block))


def _encode_groups(x: Tensor, bits: int, group: int) -> Tensor:
    """x [..., D] as bytes: the minima of the groups, their steps, then the codes."""
    grouped = x.unflatten(-1, (-1, group))
    low, high = grouped.amin(-1), grouped.amax(-1)
    low = low.to(torch.bfloat16)
    step = divide(high - low.float(), 2**bits - 1).to(torch.bfloat16)
    width = step.float().clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(-1)
    codes = ((grouped - low.float().unsqueeze(-1)) / width).round().clamp(0, 2**bits - 1).flatten(-2).to(torch.uint8)
    parts, lowest = [low, step], 0
    for field in FIELDS[bits]:
        values = (codes >> lowest & (1 << field) - 1).unflatten(-1, (8 // field, -1))
        parts.append((values << _shifts(field, x.device)).sum(-2, dtype=torch.uint8))
        lowest += field
    return torch.cat([part.view(torch.int8) for part in parts], -1)


def _decode_groups(stored: Tensor, bits: int, size: int, group: int) -> Tensor:
    """Inverse of `_encode_groups`, in float32. size: D."""
    at = stored.shape[-1] - size * bits // 8
    ranges = stored[..., :at].clone(memory_format=torch.contiguous_format)  # at an even address, as bfloat16 wants it
    low, step = ranges.view(torch.bfloat16).float().unflatten(-1, (2, -1)).unbind(-2)
    codes, lowest = torch.zeros((), dtype=torch.uint8, device=stored.device), 0
    for field in FIELDS[bits]:
        packed = stored[..., at : (at := at + size * field // 8)].view(torch.uint8).unsqueeze(-2)
        values = packed >> _shifts(field, stored.device) & (1 << field) - 1
        codes = codes | values.flatten(-2) << lowest
        lowest += field
    return (codes.float().unflatten(-1, (-1, group)) * step.unsqueeze(-1) + low.unsqueeze(-1)).flatten(-2)


def _shifts(field: int, device: torch.device) -> Tensor:
    """The places of fields in a byte, [8 / field, 1]."""
    return torch.arange(0, 8, field, dtype=torch.uint8, device=device).unsqueeze(-1)


def _working(scale: Tensor, like: Tensor) -> Tensor:
    """A scale for computing, float32 and above 0: the scale of a head that is always 0 may become 0 in a dtype narrower
    than the checkpoint's."""
    return scale.to(like.device, torch.float32).clamp(min=torch.finfo(torch.float32).tiny)
