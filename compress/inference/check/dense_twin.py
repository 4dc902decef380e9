"""The twin of a compressed model: the values of its codes multiplied by torch, and bounds for the errors of kernels.

    t = x^ W^T + b  in fp64        x^: the values of the input's codes, where the layer rounds its input

An output is right between t - a and t + a, after the output's own rounding where there is one. Allowed, a:

    sums and result rounded      `reference.tolerance`
    weights rounded or not       `reference.weight_rounding`
    the bias added               eps |t|
    ties of the input            the step between the two codes, times |w|, where the last places of x decide
    omissions of the kernel      `QuantLinear.slack`

Shapes: M tokens, N outputs, K inputs.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import Tensor, nn

from compress.inference.layers.compressed_layers import compressed_layers
from compress.inference.layers.linear import QuantLinear
from compress.kernels import reference
from compress.model.structure.hollow_forward import replaced_forwards
from compress.weights.grid import decode, encode, quantize, scales_of, working_dtype
from compress.weights.rounding import ActivationCodes

# Relative error of an input over its scale: the quotient and the scale are each off by a place or two in fp32.
TIE = 4 * torch.finfo(torch.float32).eps


def plain(layer: QuantLinear, x: Tensor) -> Tensor:
    """The output of a layer computed by torch's own product, in the dtype of x."""
    inputs, outputs = layer.rounding("input"), layer.rounding("output")
    if inputs is None:
        out = nn.functional.linear(x, layer.values().to(x.dtype), layer.bias)
    else:
        work = working_dtype(x)
        bias = None if layer.bias is None else layer.bias.to(work)
        out = nn.functional.linear(inputs.fake_quantize(x.to(work)), layer.values().to(work), bias).to(x.dtype)
    return out if outputs is None else outputs.fake_quantize(out)


def round_input(codes: ActivationCodes, x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """(Values of the codes of x, distances) in fp64. distance: between the two candidate values of a tie, an element
    whose code depends on the last places of x; 0 for all others."""
    work = x_MK.to(working_dtype(x_MK))
    scale, zero = codes.scale, codes.zero_point
    if scale is None:
        fitted = quantize(work, codes.grid, torch.float32)
        scale, zero = scales_of(fitted.scale, work.shape, codes.grid), fitted.zero_point
    scale = scale.to(work)
    zero = torch.zeros_like(scale) if zero is None else zero.to(work)

    def values(factor: float) -> Tensor:
        rounded = encode(work * factor, scale, zero, codes.grid).double()
        return decode(rounded, scale.double(), zero.double(), torch.float64)

    return values(1.0), (values(1 + TIE) - values(1 - TIE)).abs()


def error(layer: QuantLinear, x: Tensor, out: Tensor) -> float:
    """The error of a layer's output relative to the allowed error: the largest over all outputs. Above 1 is wrong;
    infinite where an output is not a number."""
    x_MK, out_MN = x.reshape(-1, x.shape[-1]), out.reshape(-1, out.shape[-1]).double()
    weight_NK, exact_MK = layer.values().double(), x_MK.double()
    codes, outputs = layer.rounding("input"), layer.rounding("output")
    slack = layer.slack(exact_MK)
    if codes is not None:
        exact_MK, apart_MK = round_input(codes, x_MK)
        slack = slack + apart_MK @ weight_NK.abs().t()
    truth_MN = exact_MK @ weight_NK.t()
    allowed_MN = reference.tolerance(exact_MK, weight_NK, truth_MN, layer.dtype) + slack
    allowed_MN += reference.weight_rounding(exact_MK, weight_NK, layer.dtype)
    if layer.bias is not None:
        truth_MN = truth_MN + layer.bias.double()
        allowed_MN += torch.finfo(layer.dtype).eps * truth_MN.abs()
    if outputs is not None:
        low, high = (outputs.fake_quantize(truth_MN + sign * allowed_MN) for sign in (-1, 1))
        truth_MN, last = (low + high) / 2, torch.finfo(layer.dtype)
        allowed_MN = (high - low) / 2 + last.eps * truth_MN.abs() + last.tiny
    worst = ((out_MN - truth_MN).abs() / allowed_MN).max().item()
    return worst if worst == worst else float("inf")


@contextmanager
def compare_layers(model: nn.Module, sampled: int | None = None) -> Iterator[dict[str, float]]:
    """Makes the model compute as its own twin in the body. Yields {layer: the largest `error` of its kernel}, on the
    twin's inputs. sampled: the number of tokens of a product that are compared, spread over it; all by default.

    Outputs of whole models cannot be compared where inputs are rounded. A difference in the last place gives a tie
    another code, this whole step changes more codes in the next layers, and after a few blocks the difference is as
    large as the effect of rounding. With float8, whose steps are the widest, that is the rule.
    """
    worst: dict[str, float] = {}
    with ExitStack() as entered:
        for name, layer in compressed_layers(model):
            entered.enter_context(compare_layer(worst, name, layer, sampled))
        yield worst


def compare_layer(
    worst: dict[str, float], name: str, layer: QuantLinear, sampled: int | None = None
) -> AbstractContextManager[None]:
    """Makes a layer compute as its own twin in the body, and puts the largest `error` of its kernel in
    `worst[name]`. sampled: as in `compare_layers`."""

    def forward(x: Tensor) -> Tensor:
        x_MK, out_MN = (each.reshape(-1, each.shape[-1]) for each in (x, type(layer).forward(layer, x)))
        if sampled is not None and sampled < len(x_MK):
            rows = torch.linspace(0, len(x_MK) - 1, sampled, device=x.device).long()
            x_MK, out_MN = x_MK[rows], out_MN[rows]
        worst[name] = max(worst.get(name, 0.0), error(layer, x_MK, out_MN))
        return plain(layer, x)

    return replaced_forwards({layer: forward})
