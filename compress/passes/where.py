"""Passes on some of the layers."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch

from compress.calibration.stats import StatisticFactory
from compress.passes.base import Aspect, FoldSite, Pass, Scaling, Site, Treats
from compress.weights.decision import Decision
from compress.weights.rounding import ActivationCodes


@dataclass(frozen=True, kw_only=True)
class Only(Pass):
    """`inner`, on the layers whose full name matches one of the shell-style `patterns` (or on none of them: `but`)."""

    name: ClassVar[str] = "only"

    inner: Pass
    patterns: tuple[str, ...]
    but: bool = False

    @property
    def treats(self) -> Treats:  # type: ignore[override]
        return self.inner.treats

    @property
    def reads(self) -> Aspect:  # type: ignore[override]
        return self.inner.reads

    @property
    def writes(self) -> Aspect:  # type: ignore[override]
        return self.inner.writes

    @property
    def innermost(self) -> Pass:
        return self.inner.innermost

    def wants(self, layer: str) -> bool:
        return any(fnmatchcase(layer, p) for p in self.patterns) != self.but and self.inner.wants(layer)

    def needs(self) -> Mapping[str, StatisticFactory]:
        return self.inner.needs()

    def fold_needs(self) -> Mapping[str, StatisticFactory]:
        return self.inner.fold_needs()

    def scaling(self, site: FoldSite) -> Scaling:
        return self.inner.scaling(site)

    def output_needs(self) -> Mapping[str, StatisticFactory]:
        return self.inner.output_needs()

    def output_codes(self, stats: Mapping[str, Any], scale_dtype: torch.dtype) -> ActivationCodes:
        return self.inner.output_codes(stats, scale_dtype)

    @property
    def rounds(self) -> bool:
        return self.inner.rounds

    @property
    def rounds_inputs(self) -> bool:
        return self.inner.rounds_inputs

    @property
    def needs_reference(self) -> bool:
        return self.inner.needs_reference

    def check(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        self.inner.check(shapes)

    def fitted(self, widths: Collection[int]) -> Pass:
        return replace(self, inner=self.inner.fitted(widths))

    def apply(self, site: Site) -> dict[str, Decision]:
        return self.inner.apply(site)


def only(inner: Pass, *patterns: str) -> Only:
    """The pass on the layers that match: `only(GPTQ(scheme="w3a16"), "*.mlp.*")`."""
    return Only(inner=inner, patterns=patterns)


def but(inner: Pass, *patterns: str) -> Only:
    """The pass on the layers that do not match: `but(RTN(), "*.down_proj")`."""
    return Only(inner=inner, patterns=patterns, but=True)
