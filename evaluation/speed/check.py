"""Is a compressed model right? Asked before it is timed, in the two ways in which it could be wrong.

Layers: in a real prefill and a real decode step, every compressed layer's output is held, for a few of the tokens, to
the exact product of its dequantized weight with the very input that it got. Allowed, elementwise:

    sums and result rounded      `reference.tolerance`
    weights rounded or not       `reference.weight_rounding`
    8-bit input, w8a8 and fp8    one code of one input: a tie may round either way
    8-bit output                 one code of it, as well
    int8 input, weight-only      2 step |W|, step of the token's grid: seven standard deviations of what rounding does

Logits: those of the model against its dequantized twin, the same model with every compressed layer replaced by the
plain product of what its codes stand for, in the model's dtype:

    |a - b|_2 / |b|_2  <=  max(ROUNDINGS eps(dtype) sqrt(blocks), STEPS of 8-bit inputs)

Roundings add up like a random walk over the blocks; an 8-bit input turns a difference in the last place into a whole
step now and then. The first test is sharp and sees each layer; the second is loose and sees what lies between them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from compress.kernels import fp8, reference
from compress.runtime.assembly import compressed_layers
from compress.runtime.linear import Fp8Linear, Int8Linear, PackedLinear, QuantLinear, RowLinear

# Tokens of a product that are compared, spread over all of them.
SAMPLED = 16
# Roundings of a block that its output feels at full size: two residual sums, two norms, and half as much again for the
# products between them, which are smaller.
ROUNDINGS = 6
INT8_STEP = 1 / 127.5
# A rounding to e4m3, of the value (its standard deviation); the step below the largest code.
FLOAT8_STEP, FLOAT8_LARGEST_STEP = 1 / 32, 32


def input_codes(layer: RowLinear, x_MK: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """(codes, scale, zero) of a layer's input, as the references have them."""
    inputs = layer.scheme.inputs
    assert inputs is not None
    scale = layer.input_scale
    if isinstance(layer, Int8Linear):
        if scale is None:
            return reference.quantize_tokens(x_MK, inputs.symmetric)
        return reference.quantize_static(x_MK, scale, layer.input_zero), scale, layer.input_zero
    if scale is None:
        return *fp8.quantize_tokens(x_MK), None
    return fp8.quantize_static(x_MK, scale), scale, None


def layer_error(layer: QuantLinear, x: Tensor, out: Tensor) -> float:
    """Largest distance from the exact product over what is allowed: above 1 is wrong."""
    flat, given = out.reshape(-1, out.shape[-1]), x.reshape(-1, x.shape[-1])
    rows = torch.linspace(0, len(given) - 1, min(len(given), SAMPLED), device=x.device).long()
    x_MK, weight_NK = given[rows], layer.dequantize().double()
    exact = x_MK.double()
    slack: Tensor | float = 0.0
    if isinstance(layer, RowLinear):
        weight_NK = layer.weight_codes.double() * layer.weight_scale.double()[:, None]
        codes, scale, zero = input_codes(layer, x_MK)
        exact = codes.double() if zero is None else codes.double() - zero.double()[:, None]
        exact = exact * scale.double()[:, None]
        step = FLOAT8_LARGEST_STEP if isinstance(layer, Fp8Linear) else 1
        slack = step * scale.double()[:, None] * weight_NK.abs().amax(-1)
    elif isinstance(layer, PackedLinear) and layer.input_group is not None:
        step_M1 = exact.abs().amax(-1, keepdim=True) * INT8_STEP
        slack = 2 * step_M1 * weight_NK.norm(dim=-1)
    truth = exact @ weight_NK.t()
    allowed = reference.tolerance(exact, weight_NK, truth, layer.dtype) + slack
    allowed += reference.weight_rounding(exact, weight_NK, layer.dtype)
    bias: Any = layer.bias
    if bias is not None:
        truth = truth + bias.double()
        allowed += torch.finfo(layer.dtype).eps * truth.abs()
    if isinstance(layer, RowLinear) and layer.output_scale is not None:
        truth = layer.rounded(truth.float()).double()
        allowed += layer.output_scale * (FLOAT8_LARGEST_STEP if isinstance(layer, Fp8Linear) else 1)
    error = ((flat[rows].double() - truth).abs() / allowed).max().item()
    return error if error == error else float("inf")


@contextmanager
def watched_layers(model: nn.Module) -> Iterator[dict[str, float]]:
    """Within: the worst error of every compressed layer that runs, by name."""
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


def plain(layer: QuantLinear, x: Tensor) -> Tensor:
    """What a layer computes, by torch's own products."""
    bias: Any = layer.bias
    if isinstance(layer, PackedLinear):
        return torch.nn.functional.linear(x, layer.dequantize(), bias)
    assert isinstance(layer, RowLinear)
    codes, scale, zero = input_codes(layer, x.reshape(-1, x.shape[-1]))
    if isinstance(layer, Int8Linear):
        sums = reference.int8_matmul(codes, layer.codes)
        out = reference.rescale(sums, scale, layer.weight_scale, zero, layer.row_sum, bias, x.dtype)
    else:
        out = fp8.reference(codes, scale, layer.weight_codes, layer.weight_scale, bias).to(x.dtype)
    return layer.rounded(out.view(*x.shape[:-1], -1))


@contextmanager
def dequantized(model: nn.Module) -> Iterator[None]:
    """Within: the model is its own dequantized twin, one dense weight at a time."""
    layers = [layer for _, layer in compressed_layers(model)]
    for layer in layers:
        # An attribute of the instance, which the call of a module finds before its class's.
        vars(layer)["forward"] = lambda x, layer=layer: plain(layer, x)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


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
