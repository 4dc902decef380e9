"""Is a compressed model right? Asked before it is timed, in the two ways in which it could be wrong.

Layers: in a real prefill and a real decode step, every compressed layer's output is compared, for a few of the tokens,
with the exact product of its decoded weight and the layer's actual input (`compress.inference.check.dense_twin.error`).

Logits: those of the model against its dequantized twin, the same model with every compressed layer replaced by the
plain product of its decoded weight, in the model's dtype:

    |a - b|_2 / |b|_2  <=  max(ROUNDINGS eps(dtype) sqrt(blocks), STEPS of 8-bit inputs)

Roundings add up like a random walk over the blocks; an 8-bit input turns a difference in the last place into a whole
step now and then. The first test is sharp and sees each layer; the second is loose and sees the operations between
them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from compress.inference.check.dense_twin import dequantized, error
from compress.inference.layers.compressed_layers import compressed_layers
from compress.inference.layers.linear import Fp8Linear, Int8Linear, PackedLinear, QuantLinear
from compress.kernels import reference

# Tokens of a product that are compared, spread over all of them.
SAMPLED = 16
# Roundings of a block that its output feels at full size: two residual sums, two norms, and half as much again for the
# products between them, which are smaller.
ROUNDINGS = 6
INT8_STEP = 1 / reference.INT8_HALF_RANGE  # of the largest magnitude
FLOAT8_STEP = 1 / 32  # a rounding to e4m3, of the value (its standard deviation)


def layer_error(layer: QuantLinear, x: Tensor, out: Tensor) -> float:
    """The `error` of a layer, of `SAMPLED` of its tokens."""
    flat, given = out.reshape(-1, out.shape[-1]), x.reshape(-1, x.shape[-1])
    rows = torch.linspace(0, len(given) - 1, min(len(given), SAMPLED), device=x.device).long()
    return error(layer, given[rows], flat[rows])


@contextmanager
def watched_layers(model: nn.Module) -> Iterator[dict[str, float]]:
    """Records the worst error of every compressed layer that runs inside a context, by name."""
    worst: dict[str, float] = {}

    def watch(name: str) -> Any:
        def hook(layer: QuantLinear, inputs: tuple[Tensor, ...], out: Tensor) -> None:
            worst[name] = max(worst.get(name, 0.0), layer_error(layer, inputs[0], out))

        return hook

    handles = [layer.register_forward_hook(watch(name)) for name, layer in compressed_layers(model)]
    try:
        yield worst
    finally:
        for handle in handles:
            handle.remove()


def logits_allowed(model: nn.Module, blocks: int, dtype: torch.dtype) -> float:
    """The tolerance of `logits_error`."""
    layers = [layer for _, layer in compressed_layers(model)]
    steps = [FLOAT8_STEP for layer in layers if isinstance(layer, Fp8Linear)]
    steps += [
        INT8_STEP
        for layer in layers
        if isinstance(layer, Int8Linear) or (isinstance(layer, PackedLinear) and layer.input_group is not None)
    ]
    walk = ROUNDINGS * torch.finfo(dtype).eps * max(blocks, 1) ** 0.5
    # float32 sums of thousands of products differ in more than their last place.
    walk = max(walk, ROUNDINGS * torch.finfo(torch.float32).eps * 2**10)
    return max(walk, ROUNDINGS * max(steps, default=0.0) * max(blocks, 1) ** 0.5)


@torch.no_grad()
def logits_error(model: Any, ids: Tensor) -> float:
    """|a - b| / |b| of the model's logits a and its dequantized twin's b, over some tokens."""
    logits = model(ids, use_cache=False).logits.double()
    with dequantized(model):
        twin = model(ids, use_cache=False).logits.double()
    error = float((logits - twin).norm() / twin.norm())
    return error if error == error else float("inf")
