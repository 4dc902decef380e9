"""Readers of the result of a plan: engines by its schemes, and the kernels of `compress.load` on a device."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from compress.api.engines import ENGINES, check_engine
from compress.errors import InputError
from compress.kernels.routes import TOKENS
from compress.passes.protocol.base import Pass
from compress.run.plan.stored_sizes import WrittenLayer
from compress.runtime.layers.linear import run_of


@dataclass(frozen=True)
class Kernel:
    """The kernels of layers of one shape and scheme. kernels: {tokens: kernel}. why_not: reasons against faster ones;
    empty: they have the fastest."""

    layers: int
    shape: tuple[int, int]
    scheme: str
    kernels: dict[int, str]
    why_not: tuple[str, ...]


def engines_for(passes: Sequence[Pass]) -> dict[str, str | None]:
    """{engine: the reason why it does not run what these passes write, None where it does}."""
    found: dict[str, str | None] = {}
    for name in ENGINES:
        try:
            check_engine(name, passes)
            found[name] = None
        except InputError as why:
            found[name] = str(why)
    return found


def kernels_for(
    layers: Sequence[WrittenLayer], tables: Collection[str], dtype: torch.dtype, device: torch.device
) -> list[Kernel]:
    """The kernels of layers, one entry per shape and scheme. dtype: of the arithmetic."""
    alike: dict[tuple[tuple[int, int], str, bool], list[WrittenLayer]] = {}
    for layer in layers:
        alike.setdefault((layer.shape, str(layer.scheme), layer.name in tables), []).append(layer)
    found = []
    for (shape, words, looked_up), same in alike.items():
        scheme = same[0].scheme
        assert scheme is not None
        if looked_up:
            found.append(Kernel(len(same), shape, words, dict.fromkeys(TOKENS, "rows looked up"), ()))
            continue
        runs = run_of(scheme)
        routes = {M: runs.route(scheme, M, shape, dtype, device) for M in TOKENS}
        reasons = dict.fromkeys(reason for route in routes.values() for reason in route.why_not)
        found.append(Kernel(len(same), shape, words, {M: r.kernel for M, r in routes.items()}, tuple(reasons)))
    return found
