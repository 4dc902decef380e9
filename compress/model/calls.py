"""The data that goes through a model: batches, the calls of its blocks, and the inputs of its layers."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.hooks import RemovableHandle

from compress.base.errors import CompressError, InputError
from compress.base.host_memory import OnHost, aside, here
from compress.model.convolution import elements, samples
from compress.model.layers import Layer

Batch = Mapping[str, Any]
# Of any module, and transformers' mark of modules that record what they return: the mark goes with its hooks.
_KEPT = {*vars(nn.Module()), "_output_capturing_hooks_installed"}


@dataclass(frozen=True)
class Call:
    """One micro-batch on its way through the blocks: the arguments of a block, and the hidden state's place in them.

    key: position or keyword of the hidden state; None where there is none. tokens: bool mask of the tokens that are no
    padding, of the batch's leading shape [B, T], or None when all tokens count. links: {position or keyword: place in
    what the block before returns} of arguments that it makes, beside the hidden state. waits: whether the arguments'
    tensors are on the host, for lack of memory on the device.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    key: int | str | None
    tokens: Tensor | None
    links: Mapping[int | str, int] = field(default_factory=dict)
    waits: bool = False

    def aside(self, known: dict[int, OnHost]) -> "Call":
        """This call with its arguments on the host. known: as `host_memory.aside` has it."""
        return replace(self, args=aside(self.args, known), kwargs=aside(dict(self.kwargs), known), waits=True)

    def here(self) -> "Call":
        """This call with its arguments on their device."""
        return replace(self, args=here(self.args), kwargs=here(dict(self.kwargs)), waits=False) if self.waits else self

    @property
    def hidden(self) -> Tensor:
        assert self.key is not None
        return self.args[self.key] if isinstance(self.key, int) else self.kwargs[self.key]

    def with_hidden(self, hidden: Tensor) -> "Call":
        """This call with another hidden state."""
        if isinstance(self.key, int):
            return replace(self, args=(*self.args[: self.key], hidden, *self.args[self.key + 1 :]))
        assert self.key is not None
        return replace(self, kwargs={**self.kwargs, self.key: hidden})

    def following(self, output: Any) -> "Call":
        """This call with all that it gets of the block before it, which has returned `output`."""
        call = self.with_hidden(hidden_of(output))
        if not self.links:
            return call
        args = tuple(output[self.links[i]] if i in self.links else a for i, a in enumerate(call.args))
        kwargs = {k: output[self.links[k]] if k in self.links else v for k, v in call.kwargs.items()}
        return replace(call, args=args, kwargs=kwargs)


def hidden_of(output: Any) -> Any:
    """The hidden state in the output of a block: the tensor itself, or the first element. One that waits on the host
    stays there."""
    return output if isinstance(output, Tensor | OnHost) else output[0]


def real_tokens(x: Tensor, call: Call) -> Tensor:
    """The tokens of a layer's input as rows [M, K], without padding.

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
    """Puts the model into evaluation mode for the body; every module returns to its own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def removing(hooks: Iterable[RemovableHandle]) -> Iterator[None]:
    """Removes hooks after the body."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Turns key-value caches off for the body: every block forward would fill them."""
    held = [c for module in model.modules() if (c := getattr(module, "config", None)) is not None]  # a decoder's own
    held += [text for c in held if (text := getattr(c, "text_config", None)) is not None]
    before = [(c, c.use_cache) for c in {id(c): c for c in held}.values() if hasattr(c, "use_cache")]
    for config, _ in before:
        config.use_cache = False
    try:
        yield
    finally:
        for config, value in before:
            config.use_cache = value


def token_mask(batch: Batch) -> Tensor | None:
    """The bool mask [B, T] of the tokens that are no padding, from the attention mask; None where no token is padding.

    Raises InputError for a mask of another shape, and for padding in a model with several token sequences per sample.
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
def without_data(model: nn.Module) -> Iterator[FakeTensorMode]:
    """Runs the body, which calls a model, on tensors with shapes but no data. An operation that needs data raises;
    torch logs nothing. What modules keep of the call (LeViT its attention biases) is forgotten."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with keeping_attributes(model), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            yield mode
    finally:
        logger.setLevel(level)


@contextmanager
def keeping_attributes(model: nn.Module) -> Iterator[None]:
    """Restores the attributes of a model's modules afterwards, and the entries of those that are dictionaries or lists.
    Parameters, modules and hooks are left to the body."""
    before = [(module, _attributes(module)) for module in model.modules()]
    held = [(value, copy(value)) for _, values in before for value in values.values() if type(value) in (dict, list)]
    try:
        yield
    finally:
        for value, entries in held:
            value.clear()
            (value.update if isinstance(value, dict) else value.extend)(entries)
        for module, values in before:
            for name in _attributes(module).keys() - values.keys():
                del module.__dict__[name]
            module.__dict__.update(values)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name == "_buffers" or name not in _KEPT}


@dataclass(frozen=True)
class Arrival:
    """A micro-batch at a site: its tokens as rows, in the compressed model and (where it runs, too) in the original.

    Before a convolution a row holds the channels [C] of one element (position), and `samples` are the unchanged inputs
    [B, C, ...]. weight_M: of the rows, above 0 to 1; None: 1. elsewhere: the original gives the layer other tokens,
    which cannot be paired; reference_MK is then x_MK. importance_M: above 0, a further weight of each row in sums of
    products; None: 1.
    """

    x_MK: Tensor
    reference_MK: Tensor | None
    samples: Tensor | None = None
    reference_samples: Tensor | None = None
    weight_M: Tensor | None = None
    elsewhere: bool = False
    importance_M: Tensor | None = None

    @property
    def weighted(self) -> tuple[Tensor, Tensor | None]:
        """x_MK and reference_MK, times the roots of the weights: for sums of products."""
        weight_M = self.weight_M if self.importance_M is None else self.importance_M
        if weight_M is None:
            return self.x_MK, self.reference_MK
        root_M1 = weight_M.to(self.x_MK.dtype).sqrt()[:, None]
        return self.x_MK * root_M1, None if self.reference_MK is None else self.reference_MK * root_M1

    def important(self, importance_M: Tensor | None) -> "Arrival":
        """This arrival with an importance of its tokens; as it is where that is of other tokens, or rows have weights
        of their own."""
        if importance_M is None or self.weight_M is not None or len(importance_M) != len(self.x_MK):
            return self
        return replace(self, importance_M=importance_M.to(self.x_MK.device))

    @property
    def own(self) -> Tensor:
        """The rows [M, K] of full weight; all of them where none has it."""
        full_M = None if self.weight_M is None else self.weight_M == 1
        return self.x_MK if full_M is None or not bool(full_M.any()) else self.x_MK[full_M]


def pair_with_original(arrival: Arrival) -> Arrival:
    """The arrival beside the original's, or, where that gives the layer other tokens, beside itself."""
    if arrival.reference_MK is not None and arrival.reference_MK.shape == arrival.x_MK.shape:
        return arrival
    return replace(arrival, reference_MK=arrival.x_MK, elsewhere=True)


def joined(parts: list[Arrival | None]) -> Arrival | None:
    """The arrival of a micro-batch from those of its parts, a list that is emptied: both take memory. None where none
    of them comes by."""
    came = [part for part in parts if part is not None]
    parts.clear()
    if len(came) < 2:
        return came[0] if came else None

    apart = {f.name: [getattr(part, f.name) for part in came] for f in fields(Arrival)}
    came.clear()
    elsewhere = any(apart.pop("elsewhere"))
    joint: dict[str, Any] = {
        name: None if apart[name][0] is None else torch.cat(apart.pop(name)) for name in list(apart)
    }
    return Arrival(**joint, elsewhere=elsewhere)


@dataclass(frozen=True)
class Arrivals:
    """The arrivals at a site, one for each micro-batch (None for one that does not reach it). All micro-batches wait at
    the site, so that the arrivals can be iterated again."""

    walk: Callable[[], Iterator[Arrival | None]]

    def __iter__(self) -> Iterator[Arrival | None]:
        return self.walk()

    def whole(self, parts: Sequence[int]) -> "Arrivals":
        """The arrivals of micro-batches that are split into so many parts each."""

        def walk() -> Iterator[Arrival | None]:
            of_parts = iter(self)
            for count in parts:
                yield joined(list(islice(of_parts, count)))

        return Arrivals(walk) if parts else self


def arrival_of(
    layer: Layer, call: Call, x: Tensor, reference: Tensor | None, weight_M: Tensor | None = None
) -> Arrival:
    """The arrival for a layer's input `x`. reference: the input of the same layer in the original model. weight_M: of
    the first rows of both; the others do not count (None: all rows count, but for padding).

    Raises CompressError where padding cannot be told apart from tokens.
    """
    geometry = layer.geometry
    if weight_M is not None:
        rows = slice(len(weight_M))
        return Arrival(x[rows], None if reference is None else reference[rows], weight_M=weight_M)
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
