"""Key-value caches in 8 bits: their schemes, and the conversion of keys and values to the bytes that a cache keeps.

    granularity  scale                  kept
    tensor       k_scale, v_scale [1]        in the checkpoint, found by calibration
    head         k_scale, v_scale [H, 1, 1]  in the checkpoint, found by calibration
    token        for every token and head    behind the D codes of the token, as the four bytes of a float32

Codes are symmetric: int8, x = s q with s = absmax / 127.5, or float8 e4m3 with s = absmax / 448 (`weights.grid`).

Shapes: B sequences, H key-value heads, T tokens, D elements of a head (of keys and of values, which may differ).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from compress.weights.grid import Granularity, Grid, decode, encode, scale_of_range

CacheGranularity = Literal["tensor", "head", "token"]
SCALES = ("k_scale", "v_scale")
SCALE_BYTES = 4  # of a float32


@dataclass(frozen=True, kw_only=True)
class CacheScheme:
    """The storage of a model's keys and values: int8 or float8, one scale per tensor, head, or token and head."""

    type: Literal["int", "float"] = "int"
    granularity: CacheGranularity = "token"

    def __str__(self) -> str:
        return f"{self.number} cache, per {self.granularity}"

    @property
    def number(self) -> str:
        """The type of a stored number, as options have it."""
        return "int8" if self.type == "int" else "fp8"

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


def encode_states(x: Tensor, scheme: CacheScheme, scale: Tensor | None) -> Tensor:
    """Keys or values [B, H, T, D] as the bytes that a cache keeps, int8 [B, H, T, D], or [B, H, T, D + 4] per token."""
    work = x.float()
    if scheme.dynamic:
        absmax = work.abs().amax(-1, keepdim=True)
        scale, _ = scale_of_range(-absmax, absmax, scheme.grid, torch.float32)
    assert scale is not None
    codes = encode(work, _working(scale, x), torch.zeros((), device=x.device), scheme.grid)
    stored = codes.to(scheme.grid.storage).view(torch.int8)
    return torch.cat([stored, scale.view(torch.int8)], -1) if scheme.dynamic else stored


def decode_states(stored: Tensor, scheme: CacheScheme, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The keys or values of stored bytes, in a dtype. Bytes of 0 are values of 0."""
    if scheme.dynamic:
        stored, scale = stored[..., :-SCALE_BYTES], stored[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    assert scale is not None
    codes = stored.contiguous().view(scheme.grid.storage).float()
    return decode(codes, _working(scale, stored), torch.zeros((), device=stored.device), dtype).to(dtype)


def _working(scale: Tensor, like: Tensor) -> Tensor:
    """A scale for computing, float32 and above 0: the scale of a head that is always 0 may become 0 in a dtype narrower
    than the checkpoint's."""
    return scale.to(like.device, torch.float32).clamp(min=torch.finfo(torch.float32).tiny)
