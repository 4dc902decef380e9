"""Output heads whose logits need not be computed: detected by their numbers, and replaced while a model is called.

A model's logits are plainly those of its head where, on a batch, they are `Head.finish(Head.product(x))` of what its
output embedding is given, for any class of model: the product itself, the product times one number, or under a
softcap. `losses.chunked` then needs the input x and the weight alone. The weight is read inside the head's forward:
under FSDP2 it is whole there, whichever unit it belongs to.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compress.train.losses.chunked_logits import Head
from compress.train.rounding.swapped_layers import computed_weight

ROUNDINGS = 8  # of the logits' dtype: how far two ways to compute them may differ, of the largest
DIGITS = (2, 3, 4, 6)  # of a scale or a softcap, which somebody wrote into a configuration


@dataclass(frozen=True)
class OutputHead:
    """The output embedding of a model, with the scale and the softcap applied to its product."""

    module: nn.Linear
    scale: float = 1.0
    softcap: float | None = None

    @property
    def whole(self) -> Head:
        """The head as the loss calls it; under FSDP only inside of the forward."""
        return Head(computed_weight(self.module), self.module.bias, self.scale, self.softcap)

    @contextmanager
    def replaced(self, take: Callable[[Tensor], None]) -> Iterator[None]:
        """Replace the head's forward inside a context: `take` is called with the hidden states [..., D] that reach the
        head, and the head returns [..., 1] instead of logits. The gradient of that must be asked for, with a weight of
        zero: FSDP's root goes backward once the gradient of its outputs is there."""
        own = self.module.__dict__.get("forward")

        def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            take(hidden)
            return hidden[..., :1]

        self.module.forward = forward  # type: ignore[assignment,method-assign]
        try:
            yield
        finally:
            del self.module.forward
            if own is not None:
                self.module.forward = own  # type: ignore[method-assign]


@torch.no_grad()
def output_head(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[OutputHead | None, str, Tensor | None]:
    """(The head that a model's logits are computed by, else the reason why there is none, the logits), by one call."""
    get: Any = getattr(model, "get_output_embeddings", lambda: None)
    module = get()
    calls: list[tuple[Tensor, Tensor]] = []

    def see(module: nn.Linear, args: tuple[Tensor, ...], output: Tensor) -> None:
        calls.append((args[0], Head(computed_weight(module), module.bias).product(args[0])))

    with module.register_forward_hook(see) if isinstance(module, nn.Linear) else nullcontext():
        output = model(**inputs)
    logits = getattr(output, "logits", output if isinstance(output, Tensor) else None)
    if logits is None:
        return None, "it returns no logits", None
    if not isinstance(module, nn.Linear) or len(calls) != 1:
        return None, "it has no output embedding that makes them in one call", logits
    product = calls[0][1]
    if product.shape != logits.shape or logits.ndim != len("BTV"):
        return None, "they are not what its output embedding returns", logits
    for scale, softcap in _finishes(product, logits):
        head = OutputHead(module, scale, softcap)
        if _distance(head, product, logits) <= ROUNDINGS * torch.finfo(logits.dtype).eps:
            return head, "", logits
    return None, "they are not what its output embedding returns, times a number or under a softcap", logits


def _distance(head: OutputHead, product: Tensor, logits: Tensor) -> float:
    """Largest difference of logits, as a share of the largest."""
    finished = Head(product, None, head.scale, head.softcap).finish(product)
    return float((finished - logits).abs().max() / logits.abs().max().clamp(min=torch.finfo(torch.float32).tiny))


def _finishes(product: Tensor, logits: Tensor) -> Iterator[tuple[float, float | None]]:
    """(scale, softcap) that may turn products into logits, derived from the largest one."""
    yield 1.0, None
    at = product.abs().argmax()
    p, z = float(product.flatten()[at]), float(logits.flatten()[at])
    if p == 0 or z / p <= 0 or not math.isfinite(z / p):
        return
    share = z / p
    yield from ((scale, None) for scale in (*_short(share), *(1 / each for each in _short(1 / share)), share))
    if share < 1:
        low, high = 0.0, 1 / share  # tanh(u) / u = share, with u = p / softcap; tanh(u) < 1
        for _ in range(100):
            u = (low + high) / 2
            low, high = (u, high) if math.tanh(u) / u > share else (low, u)
        softcap = abs(p) / high
        yield from ((1.0, each) for each in (*_short(softcap), softcap))


def _short(number: float) -> list[float]:
    """Numbers of few digits near one, which rounding has changed."""
    return [float(f"{number:.{digits}g}") for digits in DIGITS]
