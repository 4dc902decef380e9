"""The obvious way to run a calibrated pass: one whole forward per site. Same solver, same result, more forwards."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from compress.base.collectives import Comm
from compress.engine.plan.plan import plan
from compress.engine.residency import Local
from compress.engine.walk.capture import capture
from compress.engine.walk.sites import structure_of
from compress.model.calls import Batch, Call, hidden_of, real_tokens, without_cache
from compress.passes.protocol.base import Pass
from compress.passes.protocol.sites import Site


def replay(model: nn.Module, p: Pass, batches: Sequence[Batch]) -> tuple[dict[str, Tensor], int]:
    """Quantize in place; returns the codes by layer and how many block forwards that took."""
    with without_cache(model):
        return _replay(model, p, batches)


def _replay(model: nn.Module, p: Pass, batches: Sequence[Batch]) -> tuple[dict[str, Tensor], int]:
    plan_ = plan(model, [p])
    residency = Local(torch.device("cpu"), torch.float32)
    codes: dict[str, Tensor] = {}
    forwards = 0

    def run(block: nn.Module, call: Call) -> Tensor:
        nonlocal forwards
        forwards += 1
        with torch.no_grad():
            return hidden_of(block(*call.args, **call.kwargs))

    for stack in plan_.stacks:
        captured = capture(model, stack, batches, residency)
        calls = shadow = captured[0]
        for i, (name, block) in enumerate(stack.blocks):
            if i > 0:
                calls = [own.with_hidden(c.hidden) for own, c in zip(captured[i], calls, strict=True)]
                shadow = [own.with_hidden(c.hidden) for own, c in zip(captured[i], shadow, strict=True)]
            layers = {layer.name: layer for layer in plan_.layers[name]}
            with residency.open(block) as opened:
                originals: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
                for site in structure_of(block, calls, list(layers.values())).sites:
                    leader = layers[site[0]]
                    seen: list[Tensor] = []
                    hook = leader.module.register_forward_pre_hook(lambda _, a, seen=seen: seen.append(a[0]))
                    statistics = {k: make(leader.weight.shape[1], torch.device("cpu")) for k, make in p.needs().items()}
                    for call, other in zip(calls, shadow, strict=True):
                        seen.clear()
                        run(block, call)
                        x, reference = real_tokens(seen[0], call), None
                        if p.decide_stage.reference:
                            for parameter, (old, _) in originals.items():
                                parameter.data = old
                            seen.clear()
                            run(block, other)
                            reference = real_tokens(seen[0], other)
                            for parameter, (_, new) in originals.items():
                                parameter.data = new
                        for statistic in statistics.values():
                            statistic.update(x, reference)
                    hook.remove()
                    dtypes = {n: opened.dtypes[n.removeprefix(f"{name}.") + ".weight"] for n in site}
                    weights = {n: layers[n].weight for n in site}
                    decisions = p.apply(Site(weights, {k: s.result() for k, s in statistics.items()}, dtypes, Comm()))
                    for n, decision in decisions.items():
                        parameter = layers[n].parameter
                        new = layers[n].stored(decision.weight.dequantize().to(parameter.dtype))
                        originals[parameter] = (parameter.data, new)
                        parameter.data = new
                        codes[n] = decision.weight.codes
                calls = [call.with_hidden(run(block, call)) for call in calls]
                if p.decide_stage.reference:
                    for parameter, (old, _) in originals.items():
                        parameter.data = old
                    shadow = [call.with_hidden(run(block, call)) for call in shadow]
                    for parameter, (_, new) in originals.items():
                        parameter.data = new
    return codes, forwards
