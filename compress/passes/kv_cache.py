"""Key-value caches in few bits: int8 or float8, int4 or int3.

What attentions keep of a token takes a half, a quarter or a fifth of the bytes that 16 bits take (per token: and four
more for each head, or each group of a head). Keys and values are rounded where they enter the cache, after the rotary
embedding (`weights.kv_cache_codes`); nothing else changes.

    token   a scale for every token and head, fitted as it comes (dynamic): the most exact, needs no calibration data
    head    a scale for every key-value head, calibrated (static)
    tensor  one scale for the keys of a layer and one for its values, calibrated (static)

int4 and int3 are fitted to every token and head, in groups of 64, and keys are rotated before they are rounded (R3):
some channels of keys are far larger than others, and would take the range of their group alone.

Among the readers of compressed-tensors, transformers rounds as all of these say in 8 bits; vLLM's kernels take fp8 with
`tensor` (some of them `head`). Checkpoints with fewer bits are read by compress alone. The ranges are those of the
compressed model, so this pass is the last of a recipe.

Source: `kv_cache_scheme` of compressed-tensors is the layout in 8 bits. Scales of tokens as KIVI has them for values
(Liu et al. 2024, arXiv 2402.02750), which gives keys scales of channels instead; rotated keys as in QuaRot (Ashkboos et
al. 2024, arXiv 2404.00456).

Departs from QuaRot: ranges are not clipped.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch

from compress.base.errors import InputError, one_of
from compress.passes.options.fixed_ranges import PERCENTILE, FixedRanges
from compress.passes.protocol.base import Pass, Treats
from compress.passes.protocol.stages import Fix, Stage
from compress.solvers.statistics.calibrators import Range, scale_and_zero_point
from compress.solvers.statistics.input_statistics import StatisticFactory
from compress.weights.kv_cache_codes import IN_BYTES, CacheBits, CacheCodes, CacheGranularity, CacheScheme

GROUP = 64  # elements with a minimum and a step of their own, at 4 and 3 bits
TYPES: dict[str, CacheBits] = {"int8": 8, "fp8": 8, "int4": 4, "int3": 3}


@dataclass(frozen=True, kw_only=True)
class CacheFormat(Pass):
    """The options of a number format of caches."""

    type: Literal["int8", "fp8", "int4", "int3"] = "int8"
    """Numbers of 8, 4 or 3 bits; fp8 is e4m3."""

    granularity: CacheGranularity = "token"
    """Part with a scale of its own, for keys and for values; scales of head and tensor are calibrated (8 bits)."""

    group_size: int | None = None
    """8 or more: most elements that share a range, in equal parts of a head (int4, int3).  [default: 64]"""

    rotate: bool = True
    """Rotate keys before they are rounded (int4, int3); keys of 8 bits are rounded as they are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("type of a key-value cache", self.type, tuple(TYPES))
        one_of("granularity of a key-value cache", self.granularity, get_args(CacheGranularity))
        narrow = TYPES[self.type] < 8
        if narrow and self.granularity != "token":
            raise InputError(f"a key-value cache of {self.type} per {self.granularity}; allowed: per token")
        if not narrow and (self.group_size is not None or not self.rotate):
            raise InputError(f"group_size and rotate=false are of caches of int4 and int3, not of {self.type}")
        if self.group_size is not None and self.group_size < IN_BYTES:
            raise InputError(f"group_size {self.group_size} of a key-value cache; allowed: {IN_BYTES} or more")

    @property
    def scheme(self) -> CacheScheme:
        """The scheme of key-value caches that these options describe."""
        if (bits := TYPES[self.type]) == 8:
            return CacheScheme(type="float" if self.type == "fp8" else "int", granularity=self.granularity)
        return CacheScheme(bits=bits, group=self.group_size or GROUP, rotated=self.rotate)


@dataclass(frozen=True, kw_only=True)
class KVCache(FixedRanges, CacheFormat):
    """Key-value caches in few bits."""

    name: ClassVar[str] = "kv-cache"
    treats: ClassVar[Treats] = "caches"

    def __post_init__(self) -> None:
        super().__post_init__()
        chosen = self.calibrator != "minmax" or self.percentile != PERCENTILE or self.histograms
        if self.scheme.dynamic and chosen:
            raise InputError(
                "calibrator, percentile and histograms are of fixed ranges; give granularity=head or tensor with them"
            )
        self.needs()

    def needs(self) -> Mapping[str, StatisticFactory]:
        if self.scheme.dynamic:
            return {}
        return {"range": self.fixed_range(self.scheme.grid)}

    @property
    def cache_scheme(self) -> CacheScheme:
        return self.scheme

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (Fix(self.needs(), self.codes),)

    def codes(self, ranges: tuple[Range, Range] | None, dtype: torch.dtype) -> CacheCodes:
        """From the ranges of keys and values, [1] or [H], the scales in their stored dtype."""
        if ranges is None:
            return CacheCodes(self.scheme)
        keys, values = (scale_and_zero_point(found, self.scheme.grid, dtype)[0].to(dtype) for found in ranges)
        if self.granularity == "head":
            keys, values = keys.reshape(-1, 1, 1), values.reshape(-1, 1, 1)
        return CacheCodes(self.scheme, (keys, values))


def cache_pass(words: str) -> KVCache:
    """The pass that `int8`, `fp8:tensor` and their like describe: a type and, after a colon, a granularity."""
    kind, _, granularity = words.partition(":")
    if kind not in TYPES or granularity not in ("", *get_args(CacheGranularity)):
        raise InputError(
            f"key-value cache {words!r}; allowed: {', '.join(TYPES)}, and behind int8 or fp8 :token (the default), "
            ":head or :tensor"
        )
    chosen = {"granularity": granularity} if granularity else {}
    return KVCache(type=kind, **chosen)  # type: ignore[arg-type]
