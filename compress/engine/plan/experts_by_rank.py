"""Tells whether the ranks of a sharded run share out the experts of mixtures.

Each rank then holds, opens, calibrates, decides and writes its share of every mixture's experts, and of a block nothing
else but the dense parts (`model.experts.share_experts`). Every rank runs all micro-batches: it has the tokens of its
experts without asking anyone, and its forwards may wait at them while others wait elsewhere. What an expert adds to a
token is sent to all ranks, which add in the order of the experts: bit for bit what one process computes. If tokens
travelled to their experts instead, ranks would have to be at the same expert at the same time, and an expert would
multiply the rows of several ranks at once, whose products round differently.

What this costs: attention and other dense parts run on every rank for all tokens, and hidden states of all tokens are
on every rank. Dense layers are solved as always, each rank its share of the rows.
"""

from torch import nn

from compress.engine.plan.plan import Plan
from compress.model.experts import Experts
from compress.passes.protocol.stages import Decide, Fix


def why_whole(plan: Plan, model: nn.Module, ranks: int) -> str | None:
    """The reason why every rank opens all experts of a block; None where they share them out."""
    counts = [len(module.numbers) for module in model.modules() if isinstance(module, Experts)]
    if not counts:
        return "the model has no experts apart"
    if min(counts) < ranks:
        return f"a mixture has {min(counts)} experts, fewer than there are ranks"
    if plan.stacks[0].container is None:
        return "the model runs as one block"
    for p in plan.passes:
        beyond = next((stage for stage in p.stages if not isinstance(stage, Decide | Fix)), None)
        if beyond is not None or p.asks_curvature:
            return f"{p.name} looks beyond one layer" if beyond is not None else f"{p.name} has objective=loss"
    return None
