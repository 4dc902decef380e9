"""What goes through a model: batches, the calls of its blocks, and what arrives before a layer."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from compress.errors import CompressError, InputError
from compress.model.convolution import elements, samples
from compress.model.layers import Layer

Batch = Mapping[str, Any]


@dataclass(frozen=True)
class Call:
    """One micro-batch on its way through the blocks: the arguments of a block and where its hidden state is.

    key: position or keyword of the hidden state. tokens: bool mask of the tokens that count, of the batch's leading
    shape [B, T], or None when all do.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    key: int | str | None
    tokens: Tensor | None

    @property
    def hidden(self) -> Tensor:
        assert self.key is not None
        return self.args[self.key] if isinstance(self.key, int) else self.kwargs[self.key]

    def with_hidden(self, hidden: Tensor) -> "Call":
        """The same call on another hidden state."""
        if isinstance(self.key, int):
            return replace(self, args=(*self.args[: self.key], hidden, *self.args[self.key + 1 :]))
        assert self.key is not None
        return replace(self, kwargs={**self.kwargs, self.key: hidden})


def hidden_of(output: Any) -> Tensor:
    """The hidden state in what a block returned."""
    return output if isinstance(output, Tensor) else output[0]


def real_tokens(x: Tensor, call: Call) -> Tensor:
    """The tokens of a layer's input as rows [M, K], pads removed.

    Raises CompressError where the input's leading shape is not that of the padding mask.
    """
    rows = x.reshape(-1, x.shape[-1])
    if call.tokens is None:
        return rows
    mask = call.tokens
    if x.shape[:-1] not in (mask.shape, (mask.numel(),)):
        raise CompressError(
            f"a layer's input of shape {tuple(x.shape)} cannot be matched with the batch's padding mask "
            f"{tuple(mask.shape)}; calibrate with samples of one length"
        )
    return rows[mask.reshape(-1)]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; every module's own mode again afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Key-value caches off: a cache would be filled by every block forward."""
    configs = [c for c in (getattr(model, "config", None),) if c is not None]
    configs += [c for c in (getattr(configs[0], "text_config", None),) if c is not None] if configs else []
    before = [(c, c.use_cache) for c in configs if hasattr(c, "use_cache")]
    for config, _ in before:
        config.use_cache = False
    try:
        yield
    finally:
        for config, value in before:
            config.use_cache = value


def token_mask(batch: Batch) -> Tensor | None:
    """Which tokens of a batch count: its attention mask [B, T], or None where all of them do.

    Raises InputError for padding that does not say which token of which layer it is about.
    """
    mask = batch.get("attention_mask")
    if mask is None or bool((mask != 0).all()):
        return None
    if mask.ndim != 2 or any(name.startswith("decoder_") for name in batch):
        raise InputError(
            f"calibration with padding needs an attention mask [batch, tokens] and one token sequence per sample; this "
            f"one has shape {tuple(mask.shape)} with {', '.join(batch)}: calibrate with samples of one length"
        )
    return mask != 0


@contextmanager
def without_data() -> Iterator[FakeTensorMode]:
    """Within: tensors have shapes and no data. What cannot be computed so raises, and torch logs no errors about it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        logger.setLevel(level)


@dataclass(frozen=True)
class Arrival:
    """A micro-batch at a site: its tokens as rows, in the compressed model and (where it runs) in the original.

    Before a convolution the rows are of channels, one per element of a channel, and `samples` are the inputs as they
    came, [B, C, ...].
    """

    x_MK: Tensor
    reference_MK: Tensor | None
    samples: Tensor | None = None
    reference_samples: Tensor | None = None


@dataclass(frozen=True)
class Arrivals:
    """What arrives at a site, one micro-batch after the other (None where one does not come by). All of them wait
    there, so they can be walked again."""

    walk: Callable[[], Iterator[Arrival | None]]

    def __iter__(self) -> Iterator[Arrival | None]:
        return self.walk()


def arrived(layer: Layer, call: Call, x: Tensor, reference: Tensor | None) -> Arrival:
    """What arrives before a layer (and before the same layer of the original model).

    Raises CompressError where it cannot be told which of it is padding.
    """
    geometry = layer.geometry
    if geometry is None:
        return Arrival(real_tokens(x, call), None if reference is None else real_tokens(reference, call))
    if call.tokens is not None:
        raise CompressError(
            f"{layer.name} is a convolution, whose input of shape {tuple(x.shape)} cannot be matched with the batch's "
            f"padding mask {tuple(call.tokens.shape)}; calibrate with samples of one length"
        )
    if reference is None:
        return Arrival(elements(x, geometry), None, samples(x, geometry))
    other = elements(reference, geometry)
    return Arrival(elements(x, geometry), other, samples(x, geometry), samples(reference, geometry))
