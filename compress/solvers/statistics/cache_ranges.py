"""Ranges of the keys and values that a block's attentions cache, collected from calibration batches."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from compress.base.collectives import Comm
from compress.base.errors import CompressError
from compress.model.attention import attentions, seeing_caches
from compress.model.calls import Call
from compress.solvers.statistics.calibrators import Range
from compress.solvers.statistics.input_statistics import Statistic, StatisticFactory


def cache_names(block: nn.Module, block_name: str) -> dict[str, nn.Module]:
    """The attentions of a block that fill a cache, by full name."""
    prefix = f"{block_name}." if block_name else ""
    return {prefix + name: module for name, module in attentions(block).items()}


class _Watcher:
    """The statistics of one attention's keys and values, created when the first of them arrive."""

    def __init__(self, name: str, make: StatisticFactory, per_head: bool) -> None:
        self.name, self.make, self.per_head = name, make, per_head
        self.statistics: tuple[Statistic, Statistic] | None = None
        self.sizes = (1, 1)
        self.seen = 0
        self.problem: str | None = None
        self.tokens: Tensor | None = None

    def see(self, keys: Tensor, values: Tensor) -> None:
        """Count the keys and values [B, H, T, D] of a micro-batch."""
        self.seen += 1
        mask = self.tokens
        if mask is not None and (keys.shape[0], keys.shape[2]) != mask.shape:
            self.problem = (
                f"the keys of {self.name}, of shape {tuple(keys.shape)}, cannot be matched with the batch's padding "
                f"mask {tuple(mask.shape)}; calibrate with samples of one length"
            )
            return
        if self.statistics is None:
            self.statistics = self.make(keys.shape[1], keys.device), self.make(values.shape[1], values.device)
            self.sizes = (keys.shape[-1], values.shape[-1]) if self.per_head else (1, 1)
        for statistic, x in zip(self.statistics, (keys, values), strict=True):
            tokens = x.transpose(1, 2)
            rows = tokens.flatten(0, 1) if mask is None else tokens[mask]
            statistic.update(rows.transpose(1, 2).flatten(0, 1) if self.per_head else rows.flatten(1), None)


def cache_ranges(
    block: nn.Module,
    calls: Sequence[Call],
    names: Mapping[str, nn.Module],
    make: StatisticFactory,
    per_head: bool,
    comm: Comm,
) -> dict[str, tuple[Range, Range]]:
    """Ranges of the keys and values of each attention, [1] or (per_head) [H], from one forward of every micro-batch.

    Attentions without a cache of their own (they read another one's) are left out. A collective. Raises CompressError,
    on every rank, where an attention does not fill its cache exactly once per forward.
    """
    watchers = {name: _Watcher(name, make, per_head) for name in names}
    with torch.no_grad(), seeing_caches({names[name]: watcher.see for name, watcher in watchers.items()}):
        for call in calls:
            for watcher in watchers.values():
                watcher.tokens = call.tokens
            block(*call.args, **call.kwargs)
    counts = {name: watcher.seen for name, watcher in watchers.items()}
    problem = next((w.problem for w in watchers.values() if w.problem is not None), None)
    odd = [name for name, seen in counts.items() if seen not in (0, len(calls))]
    if odd:
        problem = f"{odd[0]} filled its cache {counts[odd[0]]} times in {len(calls)} forwards; it must be once in each"
    used = [name for name, seen in counts.items() if seen]
    if any(other != used for other in comm.gather_objects(used)):
        problem = "ranks disagree on which attentions fill a cache; run it in one process"
    comm.fail_together(problem)
    ranges = {}
    for name in used:
        sides = []
        statistics = watchers[name].statistics
        assert statistics is not None
        for side, statistic, size in zip(("keys", "values"), statistics, watchers[name].sizes, strict=True):
            statistic.sync(comm)
            try:
                seen = statistic.result()
                sides.append(replace(seen, tokens=seen.tokens // size))  # a head has a row for each of its elements
            except CompressError as error:
                raise CompressError(f"the {side} of {name}: {error}") from None
        ranges[name] = (sides[0], sides[1])
    return ranges
