"""Forecasts each of R ranks, from shapes: weights at rest and open, memory, and bytes that it sends in a run.

By ring algorithms a rank sends (R - 1) / R of what is gathered from all ranks, and twice that of what is summed:

    gathered   dense weights, once; codes of dense layers, a byte each
    summed     the statistics of every site, where ranks share out tokens; where they share out experts, what these
               add to every token: tokens x experts of a token x (hidden size + 1), for each stream

Scales, hidden states at the beginning and what is said of a run are not counted.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from compress.base.errors import InputError
from compress.engine.plan.experts_by_rank import why_whole
from compress.engine.plan.plan import Plan
from compress.jobs.forecast.peak_memory import (
    PeakMemory,
    TokenCounts,
    open_weights,
    sites_of,
    statistics_of,
    stored_dtype,
    weights_in,
)
from compress.jobs.model_source import compute_dtype
from compress.model.experts import Experts


@dataclass(frozen=True)
class RankForecast:
    """Bytes of each of so many ranks. held: of weights at rest. opened: of the weights of the largest block, in the
    dtype that is worked in. sent: in a whole run. memory: at the peak; None where that is not known before."""

    ranks: int
    held: int
    opened: int
    sent: int
    memory: PeakMemory | None


def check_ranks(ranks: int | None) -> None:
    """Raises InputError for a number of ranks that is none of a sharded run."""
    if ranks is not None and ranks < 2:
        raise InputError(f"ranks {ranks}; allowed: 2 or more")


def of_rank(
    model: nn.Module,
    plan: Plan,
    ranks: int,
    tokens: TokenCounts,
    device: torch.device,
    memory: Callable[[TokenCounts, Plan], PeakMemory | None],
    match: Callable[[nn.Module], Plan],
) -> RankForecast:
    """The forecast of a rank. model: on the meta device; loses the experts of other ranks. memory: tells that of a
    plan. match: makes the plan of what is left."""
    apart = why_whole(plan, model, ranks) is None
    mixtures = [module for module in model.modules() if apart and isinstance(module, Experts)]
    for mixture in mixtures:
        for name in mixture.numbers[-(-len(mixture.numbers) // ranks) :]:
            del mixture._modules[name]
    plan = match(model) if apart else plan
    counts = tokens if apart else replace(tokens, samples=-(-tokens.samples // ranks))
    width = (compute_dtype(model, device, None) or stored_dtype(model)).itemsize
    experts = {p for mixture in mixtures for p in mixture.parameters()}
    dense = sum(p.numel() for p in model.parameters() if p not in experts)
    own = sum(p.numel() for p in experts)
    largest = max(open_weights(block) for stack in plan.stacks for _, block in stack.blocks)
    codes = weights_in([layer for layer in plan.all_layers if layer.parameter not in experts])
    chosen = getattr(getattr(model, "config", None), "num_experts_per_tok", 1)
    summed = _of_experts(plan, mixtures, tokens, chosen * width) if apart else _of_statistics(plan, tokens)
    gathered = dense * stored_dtype(model).itemsize + codes
    return RankForecast(
        ranks,
        (dense // ranks + own) * stored_dtype(model).itemsize,
        largest * width,
        (gathered + 2 * summed) * (ranks - 1) // ranks,
        memory(counts, plan),
    )


def _of_statistics(plan: Plan, tokens: TokenCounts) -> int:
    """Bytes of the statistics of all sites."""
    return sum(
        min(statistics_of(p, site[0].shape[1], tokens, done) for done in (False, True))
        for layers in plan.layers.values()
        for site in (sites_of(layers) if plan.calibrated else ())
        for p in plan.passes
        if p.calibrated and any(p.wants(layer.name) for layer in site)
    )


def _of_experts(plan: Plan, mixtures: list[Experts], tokens: TokenCounts, width: int) -> int:
    """Bytes of what the experts of all mixtures add to all tokens. width: bytes of a number, for each of the experts of
    a token."""
    if not plan.calibrated:
        return 0
    firsts = (next(m for m in mixture.modules() if isinstance(m, nn.Linear)) for mixture in mixtures)
    return (1 + plan.compares) * tokens.count * sum(first.in_features + 1 for first in firsts) * width
