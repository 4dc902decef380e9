"""A language model's predictions, a few tokens at a time: its last hidden states, and logits made of them in chunks.

Where the head of a model is found and checked (`compress.train.objective.heads`), its forward makes no logits: of [B,
L, V] values there is never more than a chunk. Where it is not, logits are made by the forward, of all tokens of a
batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from compress.evaluation.quality.windows import Batch, Windows
from compress.train.objective.heads import OutputHead, output_head

CHUNK_VALUES = 2**24  # logits at a time, at least those of one token: 64 MiB of float32, of which few copies are made
FORWARD_TOKENS = 2**13  # of the windows of one forward, at least one window
PROBED = 8  # tokens by which a head is checked


class Says(Protocol):
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
        if self.head is None:
            found = network(input_ids=ids_BL).logits
        else:
            taken: list[Tensor] = []
            with self.head.replaced(taken.append):
                network(input_ids=ids_BL)
            (found,) = taken
        return found[batch.scored_BL.to(found.device)]

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
def compared(log_q_CV: Tensor, log_p_CV: Tensor | None, targets_C: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(name, value per token) for each figure stored, float64 on the CPU, from log-probabilities of the model and the
    reference."""
    at = targets_C.to(log_q_CV.device).unsqueeze(-1)
    yield "surprisal", -log_q_CV.gather(-1, at).squeeze(-1).double().cpu()
    if log_p_CV is None:
        return
    yield "reference_surprisal", -log_p_CV.gather(-1, at).squeeze(-1).double().cpu()
    p_CV = log_p_CV.exp()
    top_C, first_C = p_CV.max(-1)
    yield "reference_top", top_C.double().cpu()
    yield "same_top", (first_C == log_q_CV.argmax(-1)).double().cpu()
    kl_C = torch.sub(log_p_CV, log_q_CV).mul_(p_CV).sum(-1).double()
    lost_C = kl_C.isnan()
    if bool(lost_C.any()):  # of logits that are -inf: 0 ln 0 = 0
        terms_CV = (log_p_CV[lost_C] - log_q_CV[lost_C]) * p_CV[lost_C]
        kl_C[lost_C] = terms_CV.masked_fill(p_CV[lost_C] == 0, 0).sum(-1).double()
    yield "kl", kl_C.clamp(min=0).cpu()


def chunked(model: Says, reference: Says | None, batch: Batch, vocabulary: int) -> Iterator[dict[str, Tensor]]:
    """`compared` for a batch, chunk by chunk."""
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
        yield dict(compared(log_q, log_p, targets_P[part]))
        del logits, log_q, log_p
