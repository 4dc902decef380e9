"""What a pass does, stage by stage: values, each of which says what it needs to know and what it does with that.

    Survey    what has to be known about all layers before the first of them is decided: how a budget is shared out
    Learn     training of the whole model as the passes before have left it
    Rewrite   edits of a block before anything in it is rounded      the scales of SmoothQuant and AWQ
    Decide    what becomes of the layers of a site                   every method that rounds or prunes
    Fix       how what a layer returns, or a cache keeps, is rounded: ranges that are found once the layer is decided

A pass is a tuple of them (`Pass.stages`). The loop asks for no more: what is new is a stage, not another question.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from compress.calibration.stats import StatisticFactory
from compress.passes.sites import FoldSite, Scaling, Site
from compress.train.options import TrainingOptions
from compress.weights.decision import Decision

Needs = Mapping[str, StatisticFactory]


@dataclass(frozen=True)
class Survey:
    """needs: statistics of layers' inputs, by name, in the uncompressed model. look: what is found out about each layer
    of a site, the same on every rank. settle: (the pass that knows what was found about all layers, which of these it
    leaves alone then, and why)."""

    needs: Needs
    look: Callable[[Site], Mapping[str, Any]]
    settle: Callable[[Mapping[str, Any]], tuple[Any, Mapping[str, str]]]


@dataclass(frozen=True)
class Learn:
    """options: how the whole model is trained, once all earlier passes have decided about all layers."""

    options: TrainingOptions


@dataclass(frozen=True)
class Rewrite:
    """needs: statistics of layers' inputs, by name. scaling: by how much to divide what the layers of a fold read, the
    same on every rank."""

    needs: Needs
    scaling: Callable[[FoldSite], Scaling]


@dataclass(frozen=True)
class Decide:
    """needs: statistics of a layer's input, by name; none where no calibration data is needed. apply: a decision for
    every layer of a site, the same on every rank. rounds_inputs: whether decisions say how inputs are rounded, too.
    reference: whether statistics compare with the inputs of the uncompressed model, which a second stream computes."""

    needs: Needs
    apply: Callable[[Site], dict[str, Decision]]
    rounds_inputs: bool = False
    reference: bool = False


@dataclass(frozen=True)
class Fix:
    """needs: statistics, by name, of what a layer returns once it is decided about, bias included, or of what a cache
    is given. codes: how that is rounded, from the finished statistics and the dtype of scales."""

    needs: Needs
    codes: Callable[..., Any]


Stage = Survey | Learn | Rewrite | Decide | Fix
