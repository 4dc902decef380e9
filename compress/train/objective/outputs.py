"""Outputs of a model on a batch: logits, hidden states, attention maps, and the arguments of its attention.

Shapes: B samples, H heads, T tokens, D width, d width of a head, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from compress.base.errors import InputError
from compress.train.inputs.samples import inputs_of, token_mask
from compress.train.losses.options import LossOptions
from compress.train.objective.heads import OutputHead

EAGER = "eager"


class Vectors(NamedTuple):
    """Queries, keys and values of an attention, [B, H, T, d]; causal: whether tokens see those before them alone."""

    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool


@dataclass(frozen=True)
class ModelOutputs:
    """The outputs of a model on a batch. logits: [..., V]; with a replaced head, its stand-in [..., 1]. hidden: of
    every layer, [B, T, D], the embedding's first. maps: of every layer, [B, H, T, T]. vectors: of every layer."""

    logits: Tensor | None
    hidden: tuple[Tensor, ...]
    maps: tuple[Tensor, ...]
    vectors: tuple[Vectors, ...]


class _Attentions(TorchFunctionMode):
    """Records the arguments of fused attention inside a context, in order of the calls. mask: [B, T], True for tokens
    that are not padding."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask
        self.found: list[Vectors] = []

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is nn.functional.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            causal = bool(given.get("is_causal")) or _is_causal(given.get("attn_mask"), self.mask)
            self.found.append(Vectors(given["query"], given["key"], given["value"], causal))
        return function(*args, **kwargs)


def _is_causal(seen: Tensor | None, mask: Tensor) -> bool:
    """True for an attention mask [B, 1, T, T] that lets no token see the one after it."""
    if seen is None or seen.shape[-2] != mask.shape[-1] or mask.ndim < 2:
        return False
    allowed = seen if seen.dtype == torch.bool else seen > torch.finfo(seen.dtype).min / 2
    following = allowed[:, 0].diagonal(1, -2, -1)
    pairs = (mask[:, 1:] & mask[:, :-1]).to(following.device)
    return not bool((following & pairs).any())


def look(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    options: LossOptions,
    head: OutputHead | None = None,
    take: Callable[[Tensor], None] | None = None,
) -> ModelOutputs:
    """Call a model with a batch. Raises InputError where it does not give what the losses need.

    take: is handed the head's input, whose logits are then not made; the head is given with it.
    """
    wanted: dict[str, bool] = {}
    if options.features or options.contrastive:
        wanted["output_hidden_states"] = True
    if options.attention:
        wanted["output_attentions"] = True
    reading = _Attentions(token_mask(batch)) if options.relations else None
    replaced = nullcontext() if head is None or take is None else head.replaced(take)
    with replaced, reading or nullcontext():
        output = model(**inputs_of(batch, next(model.parameters()).device), **wanted)
    name = type(model).__name__
    logits = getattr(output, "logits", output if isinstance(output, Tensor) else None)
    if logits is None and (options.logits or options.task):
        raise InputError(f"{name} returns no logits ({type(output).__name__}); give logits=0 task=0 features=1")
    hidden = tuple(getattr(output, "hidden_states", None) or ())
    if "output_hidden_states" in wanted and not hidden:
        raise InputError(f"{name} returns no hidden states; leave features and contrastive out")
    maps = tuple(each for each in getattr(output, "attentions", None) or () if each is not None)
    if options.attention and not maps:
        raise InputError(f"{name} gives no attention maps, which needs eager attention; leave attention out")
    vectors = () if reading is None else tuple(reading.found)
    if options.relations and not vectors:
        raise InputError(f"{name} never calls fused attention (sdpa), where relations are read; leave relations out")
    return ModelOutputs(logits, hidden, maps, vectors)


@contextmanager
def eager_attention(models: Sequence[nn.Module]) -> Iterator[list[str]]:
    """Switch models to eager attention inside a context, so that they return maps; yields a note on each changed
    model."""
    changed: list[tuple[Any, str]] = []
    model: Any
    for model in models:
        before = getattr(getattr(model, "config", None), "_attn_implementation", None)
        if before not in (None, EAGER) and hasattr(model, "set_attn_implementation"):
            changed.append((model, before))
            model.set_attn_implementation(EAGER)
    try:
        yield [
            f"{type(model).__name__} computes {EAGER} attention, not {before}, for its maps"
            for model, before in changed
        ]
    finally:
        for model, before in changed:
            model.set_attn_implementation(before)
