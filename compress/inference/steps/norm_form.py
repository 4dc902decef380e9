"""Finds which norm a module computes, by what it returns."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from compress.inference.steps.parts import TOLERANCE, NormForm, error, multiplies, same
from compress.inference.steps.trace import Called
from compress.kernels.cpu.steps import Norm

EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
# Inputs of a norm so small that its epsilon tells.
SMALL = 1e-3


def normalized(variant: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    """A norm over the last dimension, by torch."""
    if variant == Norm.LAYER:
        return layer_norm(x, x.shape[-1:], weight, bias, epsilon)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    if weight is None:
        return wide.to(x.dtype)
    if variant == Norm.RMS:
        return weight * wide.to(x.dtype)
    return (wide * (weight.float() + (variant == Norm.RMS_PLUS_ONE))).to(x.dtype)


def fitted_norm(called: Called) -> NormForm | None:
    """The norm that a module computes; None for a module that computes none."""
    module, x = called.module, called.x
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    size = x.shape[-1]
    epsilons = {value for name in EPSILONS if isinstance(value := getattr(module, name, None), float)}
    if not epsilons or any(part is not None and part.shape != (size,) for part in (weight, bias)):
        return None
    small = x * SMALL
    try:
        expected = module.forward(small)
    except Exception:  # noqa: BLE001 - any module may be tried here
        return None
    found = []
    for epsilon in epsilons:
        for variant in Norm:
            if variant != Norm.LAYER and bias is not None:
                continue
            errors = [
                error(normalized(variant, given, weight, bias, epsilon), wanted)
                for given, wanted in ((x, called.out), (small, expected))
            ]
            found.append((max(errors), NormForm(module, variant, epsilon, size)))
    least, best = min(found, key=lambda pair: pair[0], default=(float("inf"), None))
    return best if least <= TOLERANCE[x.dtype] else None


def norms_of(calls: Sequence[Called], x: Tensor) -> Iterator[tuple[NormForm, Tensor]]:
    """Norms among these calls that were given x, with what they returned."""
    for called in calls:
        if not multiplies(called) and same(called.x, x):
            fitted = fitted_norm(called)
            if fitted is not None:
                yield fitted, called.out


def itself_and_norms(calls: Sequence[Called], x: Tensor) -> Iterator[tuple[NormForm | None, Tensor]]:
    """x itself, and what norms made of it."""
    yield None, x
    yield from norms_of(calls, x)


def added(calls: Sequence[Called], out: Tensor) -> tuple[NormForm | None, Tensor]:
    """(The norm of a half's result, if there is one, what is added to the residual stream)."""
    return next(norms_of(calls, out), (None, out))
