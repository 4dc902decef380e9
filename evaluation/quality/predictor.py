"""A language model's predictions of a text, beside its original's on the same windows.

`windows` has the protocol, `statistics` the figures and their errors. Logits are computed and compared in float32, so
that the KL of a token has an error of about 1e-7 nats.

Where the head of a model is found and checked (`compress.train.objective.heads`), its forward makes no logits: they are
made of the last hidden states in chunks, and of [B, L, V] values there is never more than a chunk. Where it is not,
logits are made by the forward, of all tokens of a batch. Windows longer than `FORWARD_TOKENS` are read in pieces of so
many, through the model's own key-value cache.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from compress.base.errors import CompressError
from compress.evaluation.document import Agreed, Band, Figure, Histogram, ItemFigures
from compress.evaluation.quality.breakdowns import agreement, by_confidence, by_part, by_position, kl_histogram
from compress.evaluation.quality.kl_and_perplexity import figures_of
from compress.evaluation.quality.windows import Batch, Windows
from compress.train.objective.heads import OutputHead, output_head

CHUNK_VALUES = 2**24  # logits at a time, at least those of one token: 64 MiB of float32, of which few copies are made
FORWARD_TOKENS = 2**13  # of the windows of one forward, at least one window
PROBED = 8  # tokens by which a head is checked


class Predictions(Protocol):
    """A source of predictions to compare: states of a batch's predicted tokens [P, D], and logits [C, V] of some of
    them."""

    def states(self, batch: Batch) -> Tensor:
        """The states of a batch, in the order of `Batch.targets`."""
        ...

    def logits(self, states_CD: Tensor) -> Tensor:
        """Logits of some states, float32 or wider."""
        ...


@dataclass(frozen=True)
class Predictor:
    """A model, and its head where one is known. why: the reason where none is."""

    network: nn.Module
    head: OutputHead | None
    why: str = ""

    @torch.no_grad()
    def states(self, batch: Batch) -> Tensor:
        """Last hidden states, [P, D]; the model's logits, [P, V], where no head is known."""
        network: Any = self.network
        ids_BL = batch.ids_BL.to(next(network.parameters()).device)
        taken: list[Tensor] = []
        cache, pieces = None, ids_BL.split(FORWARD_TOKENS, 1)
        for piece_BL in pieces:
            more = {} if len(pieces) == 1 else {"past_key_values": cache, "use_cache": True}
            with nullcontext() if self.head is None else self.head.replaced(taken.append):
                output = network(input_ids=piece_BL, **more)
            if self.head is None:
                taken.append(output.logits)
            cache = getattr(output, "past_key_values", None)
        hidden = torch.cat(taken, 1) if len(taken) > 1 else taken[0]
        return hidden[batch.scored_BL.to(hidden.device)]

    @torch.no_grad()
    def logits(self, states_CD: Tensor) -> Tensor:
        """[C, V] logits of some states."""
        return states_CD.float() if self.head is None else logits_by(self.head, states_CD)


def logits_by(head: OutputHead, states_CD: Tensor) -> Tensor:
    """A head's logits of hidden states, [C, V] in float32 or wider."""
    whole = head.whole
    return whole.finish(whole.product(states_CD.to(whole.weight_VD.device)))


@torch.no_grad()
def predictor(network: nn.Module, windows: Windows) -> Predictor:
    """A model in evaluation mode, with its head where a forward of a few tokens detects one."""
    device = next(network.parameters()).device
    probe = windows.ids_N[: min(PROBED, windows.length)].unsqueeze(0).to(device)
    head, why, _ = output_head(network, {"input_ids": probe})
    return Predictor(network, head, why)


@torch.no_grad()
def compare_tokens(log_q_CV: Tensor, log_p_CV: Tensor | None, targets_C: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(name, value per token) for each figure stored, float64 on the CPU, from log-probabilities of the model and the
    reference."""
    at = targets_C.to(log_q_CV.device).unsqueeze(-1)
    chosen_C1 = log_q_CV.argmax(-1, keepdim=True)
    yield "surprisal", -log_q_CV.gather(-1, at).squeeze(-1).double().cpu()
    yield "given", (chosen_C1 == at).squeeze(-1).double().cpu()
    if log_p_CV is None:
        return
    yield "reference_surprisal", -log_p_CV.gather(-1, at).squeeze(-1).double().cpu()
    p_CV = log_p_CV.exp()
    top_C1, first_C1 = p_CV.max(-1, keepdim=True)
    yield "reference_top", top_C1.squeeze(-1).double().cpu()
    yield "reference_given", (first_C1 == at).squeeze(-1).double().cpu()
    yield "same_top", (first_C1 == chosen_C1).squeeze(-1).double().cpu()
    yield "flip_margin", (log_p_CV.gather(-1, first_C1) - log_p_CV.gather(-1, chosen_C1)).squeeze(-1).double().cpu()
    kl_C = torch.sub(log_p_CV, log_q_CV).mul_(p_CV).sum(-1).double()
    lost_C = kl_C.isnan()
    if bool(lost_C.any()):  # of logits that are -inf: 0 ln 0 = 0
        terms_CV = (log_p_CV[lost_C] - log_q_CV[lost_C]) * p_CV[lost_C]
        kl_C[lost_C] = terms_CV.masked_fill(p_CV[lost_C] == 0, 0).sum(-1).double()
    yield "kl", kl_C.clamp(min=0).cpu()


def compare_chunks(
    model: Predictions, reference: Predictions | None, batch: Batch, vocabulary: int
) -> Iterator[dict[str, Tensor]]:
    """`compare_tokens` for a batch, chunk by chunk."""
    states, expected = model.states(batch), None if reference is None else reference.states(batch)
    targets_P = batch.targets
    tokens = max(1, CHUNK_VALUES // vocabulary)
    for first in range(0, len(targets_P), tokens):
        part = slice(first, first + tokens)
        logits, log_p = model.logits(states[part]), None
        if reference is not None and expected is not None:
            theirs = reference.logits(expected[part])
            shared = min(logits.shape[-1], theirs.shape[-1])  # tokens that both have, where one is padded further
            logits, theirs = logits[:, :shared], theirs[:, :shared]
            log_p = functional.log_softmax(theirs, -1).to(logits.device)
            del theirs
        log_q = functional.log_softmax(logits, -1)
        yield dict(compare_tokens(log_q, log_p, targets_P[part]))
        del logits, log_q, log_p


@dataclass(frozen=True)
class Quality:
    """Figures of one model on some windows, by name (`kl_and_perplexity`), and of some of their tokens (`breakdowns`);
    those against a reference are absent where none was given."""

    figures: dict[str, Figure]
    by_confidence: list[Band] = field(default_factory=list)
    kl_histogram: Histogram | None = None
    by_position: list[Band] = field(default_factory=list)
    by_part: list[ItemFigures] = field(default_factory=list)
    agreement: list[Agreed] = field(default_factory=list)


def measure(
    model: Predictions,
    windows: Windows,
    vocabulary: int,
    reference: Predictions | None = None,
    step: Callable[[int], None] = lambda windows: None,
    narrow: bool = False,
    parts: Sequence[str] = (),
) -> Quality:
    """Evaluate a model on the windows of a text. step(n) is called after every batch of n windows. narrow: computed in
    float16, whose range may be too small. parts: the kind of each item, where windows hold items.

    A few numbers are stored per token, never its distribution. Raises CompressError for logits that are not numbers.
    """
    values: dict[str, list[torch.Tensor]] = {}
    places: dict[str, list[torch.Tensor]] = {}
    for batch in windows.batches(max(1, FORWARD_TOKENS // windows.length)):
        for chunk in compare_chunks(model, reference, batch, vocabulary):
            for name, values_C in chunk.items():
                values.setdefault(name, []).append(values_C)
        for name, each_P in (("stretch", batch.stretch_P), ("position", batch.position_P), ("item", batch.item_P)):
            if each_P is not None:
                places.setdefault(name, []).append(each_P)
        step(len(batch.ids_BL))
    tokens = {name: torch.cat(found).numpy() for name, found in values.items()}
    for name, whose in (("surprisal", "the model"), ("reference_surprisal", "the reference")):
        if name in tokens and not np.isfinite(tokens[name]).all():
            why = "in float16, whose range ends at 65504; measure it in a wider --dtype" if narrow else "it is damaged"
            raise CompressError(f"{whose} gives logits that are not finite numbers on this text: {why}")
    where = {name: torch.cat(found).numpy() for name, found in places.items()}
    stretch_N = where["stretch"]
    figures = figures_of(tokens, stretch_N)
    items = by_part(where["item"], parts, tokens, stretch_N) if parts else []
    if reference is None:
        return Quality(figures, by_part=items)
    bands = by_confidence(tokens["reference_top"], tokens["kl"], stretch_N)
    positions = [] if parts else by_position(where["position"], tokens, stretch_N)
    same = agreement(where["item"], tokens["given"]) if parts else []
    return Quality(figures, bands, kl_histogram(tokens["kl"]), positions, items, same)
