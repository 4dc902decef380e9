"""Finds out where a run lacks the memory to keep all forwards of a block at once, and says so."""

from collections.abc import Sequence

import torch

from compress.base.memory import available_bytes
from compress.engine.plan.batches import tokens_of
from compress.engine.plan.plan import Plan
from compress.jobs.forecast.memory import PeakMemory, TokenCounts, peak_of, stored_dtype
from compress.jobs.model_source import OpenedModel
from compress.model.calls import Batch

MIB = 2**20


def lack_of_memory(opened: OpenedModel, plan: Plan, batches: Sequence[Batch], spills: bool) -> str | None:
    """A remark that forwards are repeated, because all of a block's would take more memory than there is; None where
    there is enough, or where that is not known: of batches without token ids.

    spills: whether large tensors on the CPU lie in files.
    """
    counts = counts_of(batches)
    if not plan.calibrated or counts is None or (spills and opened.device.type == "cpu"):
        return None
    available = available_bytes(opened.device)
    memory = peak_of(plan, counts, (opened.dtype or stored_dtype(opened.model)).itemsize, available)
    return None if memory is None or available is None else said(memory, available, opened.device)


def counts_of(batches: Sequence[Batch]) -> TokenCounts | None:
    """The tokens in batches; None where they hold no token ids."""
    tokens = tokens_of(batches)
    if not tokens:
        return None
    rows = [len(batch["input_ids"]) for batch in batches]
    return TokenCounts(sum(rows), tokens // sum(rows), max(rows))


def said(memory: PeakMemory, available: int, device: torch.device) -> str | None:
    """The remark about a peak; None where forwards are kept."""
    if memory.kept is None:
        return None
    or_files = ", or --spill FOLDER keeps them in files" if device.type == "cpu" else ""
    still = " (still more than that)" if memory.working > available else ""
    return (
        f"memory: to keep all forwards of a block would take {memory.kept / MIB:,.0f} MiB on {device}, where "
        f"{available / MIB:,.0f} MiB are free; they are repeated for each group of layers that share an input, which "
        f"takes {memory.working / MIB:,.0f} MiB{still} and about 2.5 times the time of the forwards. Fewer --samples "
        f"avoid that{or_files}"
    )
