"""Key-value caches in 8 bits: int8 or float8, fitted to every token and head, or calibrated per head or tensor.

What attentions keep of a token takes half the bytes that 16 bits take (per token: and four more for each head). Keys
and values are rounded where they enter the cache, after the rotary embedding (`weights.caches`); nothing else changes.

    token   a scale for every token and head, fitted as it comes (dynamic): the most exact, needs no calibration data
    head    a scale for every key-value head, calibrated (static)
    tensor  one scale for the keys of a layer and one for its values, calibrated (static)

Among the readers of compressed-tensors, transformers rounds as all of these say; vLLM's kernels take fp8 with `tensor`
(some of them `head`). The ranges are those of the compressed model, so this pass is the last of a recipe.

Source: `kv_cache_scheme` of compressed-tensors is the layout; scales of tokens as KIVI has them for values (Liu et al.
2024, arXiv 2402.02750), which at 2 bits gives keys scales of channels instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch

from compress.calibration.calibrators import Range, scale_and_zero_point
from compress.calibration.stats import StatisticFactory
from compress.errors import InputError, one_of
from compress.passes.options.fixed_ranges import PERCENTILE, FixedRanges
from compress.passes.protocol.base import Pass, Treats
from compress.passes.protocol.stages import Fix, Stage
from compress.weights.caches import CacheCodes, CacheGranularity, CacheScheme


@dataclass(frozen=True, kw_only=True)
class CacheFormat(Pass):
    """The options of a number format of caches."""

    type: Literal["int8", "fp8"] = "int8"
    """Numbers of 8 bits; fp8 is e4m3."""

    granularity: CacheGranularity = "token"
    """Part with a scale of its own, for keys and for values; scales of head and tensor are calibrated."""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("type of a key-value cache", self.type, ("int8", "fp8"))
        one_of("granularity of a key-value cache", self.granularity, get_args(CacheGranularity))

    @property
    def scheme(self) -> CacheScheme:
        """The scheme of key-value caches that these options describe."""
        return CacheScheme(type="int" if self.type == "int8" else "float", granularity=self.granularity)


@dataclass(frozen=True, kw_only=True)
class KVCache(FixedRanges, CacheFormat):
    """8-bit key-value caches."""

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
    if kind not in ("int8", "fp8") or granularity not in ("", *get_args(CacheGranularity)):
        raise InputError(
            f"key-value cache {words!r}; allowed: int8 or fp8, and behind it :token (the default), :head or :tensor"
        )
    chosen = {"granularity": granularity} if granularity else {}
    return KVCache(type=kind, **chosen)  # type: ignore[arg-type]
