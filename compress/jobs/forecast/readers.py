"""Readers of the result of a plan: engines by its schemes, and the kernels of `compress.load` on a device."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from compress.base.errors import InputError
from compress.engine.plan.plan import Plan
from compress.engine.plan.stored_sizes import WrittenLayer
from compress.inference.layers.experts import one_by_one, route_among
from compress.inference.layers.linear import run_of
from compress.jobs.fused_layers import why_not_merged
from compress.jobs.target_engines import ENGINES, check_engine
from compress.kernels.routes import TOKENS


@dataclass(frozen=True)
class Kernel:
    """The kernels of layers of one shape and scheme. kernels: {tokens: kernel}. why_not: reasons against faster ones;
    empty: they have the fastest."""

    layers: int
    shape: tuple[int, int]
    scheme: str
    kernels: dict[int, str]
    why_not: tuple[str, ...]


def engines_for(plan: Plan, model: nn.Module, layers: Sequence[WrittenLayer]) -> dict[str, str | None]:
    """{engine: the reason why it does not run the result of a plan, None where it does}. layers: what it holds."""
    reasons: dict[str, str | None] = {}
    for name in ENGINES:
        try:
            check_engine(name, plan.recipe)
            reasons[name] = why_not_merged(name, plan, model, layers)
        except InputError as why:
            reasons[name] = str(why)
    return reasons


def kernels_for(
    model: nn.Module,
    layers: Sequence[WrittenLayer],
    tables: Collection[str],
    dtype: torch.dtype,
    device: torch.device,
) -> list[Kernel]:
    """The kernels of a model's layers, one entry per shape and scheme. dtype: of the arithmetic."""
    known = {layer.name: (layer.scheme, layer.shape) for layer in layers if layer.scheme is not None}
    apart = {name: tuple(reasons) for name, reasons in one_by_one(model, known, dtype, device).items()}
    alike: dict[tuple[tuple[int, int], str, bool, tuple[str, ...] | None], list[WrittenLayer]] = {}
    for layer in layers:
        kind = (layer.shape, str(layer.scheme), layer.name in tables, apart.get(layer.name))
        alike.setdefault(kind, []).append(layer)
    kernels = []
    for (shape, words, looked_up, reasons_apart), same in alike.items():
        scheme = same[0].scheme
        assert scheme is not None
        if looked_up:
            kernels.append(Kernel(len(same), shape, words, dict.fromkeys(TOKENS, "rows looked up"), ()))
            continue
        runs = run_of(scheme)
        routes = {M: runs.route(scheme, M, shape, dtype, device) for M in TOKENS}
        if reasons_apart is not None:
            routes = {M: route_among(route, reasons_apart) for M, route in routes.items()}
        reasons = dict.fromkeys(reason for route in routes.values() for reason in route.why_not)
        kernels.append(Kernel(len(same), shape, words, {M: r.kernel for M, r in routes.items()}, tuple(reasons)))
    return kernels
