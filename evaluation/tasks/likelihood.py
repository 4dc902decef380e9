"""The probability of a text after another one by a model: log p(continuation | context), many at a time.

    log p = sum over the continuation's tokens c_i of log softmax(logits at the token before c_i)[c_i]

Tokens are those of lm-eval (`loglikelihood`): blanks at the end of a context belong to the continuation; context and
both together are encoded, and the tokens beyond the context's number are the continuation. Text longer than the model's
window loses its beginning.

Texts of about one length share a batch, padded on the right, where a causal model does not look. Logits are made at
the continuation's positions alone, `CHUNK_VALUES` at a time, where they are plainly those of the model's head
(`compress.train.objective.heads`); otherwise a batch holds at most `LOGIT_VALUES` of them, at least those of one text.
The softmax is float32, the sum float64.

Shapes: B texts of a batch, T tokens, D width, R rows: positions of continuation tokens, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compress.base.errors import CompressError, InputError
from compress.train.losses.chunked_logits import CHUNK_VALUES
from compress.train.objective.heads import OutputHead, output_head

LOGIT_VALUES = 2**26  # of a batch, at least of one text: 256 MiB of float32
BATCH_TOKENS = 4096  # padding included; at least one text
WINDOWS = ("n_positions", "max_position_embeddings", "n_ctx")  # names of the window in configurations


@dataclass(frozen=True)
class ContinuationPair:
    """Token ids of a context and of its continuation. lost: tokens of the context that the window has no room for."""

    context: list[int]
    continuation: list[int]
    lost: int = 0

    @property
    def read(self) -> list[int]:
        """The model's input: all tokens but the last."""
        return (self.context + self.continuation)[:-1]


class Likelihood(NamedTuple):
    """log_prob: of all tokens of the continuation, nats. greedy: True where each of them is the most probable one."""

    log_prob: float
    greedy: bool


def window_of(config: Any) -> int | None:
    """The number of tokens that a model reads at once; None where its configuration does not say."""
    inside = getattr(config, "text_config", None) or config
    return next((int(value) for name in WINDOWS if (value := getattr(inside, name, None))), None)


def count_appended(tokenizer: Any, text: str) -> int:
    """The number of tokens that a tokenizer appends to every text, like </s>: nothing can follow them."""
    bare, whole = (tokenizer.encode(text, add_special_tokens=added, verbose=False) for added in (False, True))
    starts = (i for i in range(len(whole) - len(bare) + 1) if whole[i : i + len(bare)] == bare)
    return next((len(whole) - i - len(bare) for i in starts), 0)


def encode(
    tokenizer: Any, context: str, continuation: str, window: int | None, where: str, behind: int = 0
) -> ContinuationPair:
    """Context and continuation as tokens. where: named in messages. behind: `count_appended`. Raises InputError for a
    continuation without tokens of its own, and for one longer than the window."""
    stripped = context.rstrip()
    continuation = context[len(stripped) :] + continuation
    before, whole = (tokenizer.encode(text, verbose=False) for text in (stripped, stripped + continuation))
    before, whole = before[: len(before) - behind], whole[: len(whole) - behind]
    answer = whole[len(before) :]
    if not before or not answer:
        raise InputError(f"{where}: the tokenizer makes no token of {continuation!r} behind its context; rewrite it")
    if window is not None and len(answer) > window:
        raise InputError(
            f"{where}: an answer has {len(answer)} tokens, the model reads at most {window}; ask fewer questions, or "
            "leave this one out"
        )
    lost = 0 if window is None else max(0, len(before) + len(answer) - 1 - window)
    return ContinuationPair(before[lost:], answer, lost)


@torch.no_grad()
def likelihoods(
    model: nn.Module, pairs: Sequence[ContinuationPair], step: Callable[[int], None] = lambda more: None
) -> list[Likelihood]:
    """The likelihood of each pair, in their order. step(n) is called after every batch: n more are done.

    Raises CompressError where the model's logits are not finite.
    """
    order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i].read))  # the largest batch first: it fits, or fails
    device = next(model.parameters()).device
    shortest = torch.tensor([pairs[order[-1]].read], device=device)
    head, _, logits = output_head(model, {"input_ids": shortest})
    if logits is None:
        raise InputError(f"{type(model).__name__} returns no logits; tasks need a language model")
    tokens = BATCH_TOKENS if head is not None else min(BATCH_TOKENS, LOGIT_VALUES // logits.shape[-1])
    found: dict[int, Likelihood] = {}
    for batch in _batches([len(pairs[i].read) for i in order], tokens):
        places = order[batch]
        found |= zip(places, _batch(model, head, [pairs[i] for i in places], device), strict=True)
        step(len(places))
    return [found[i] for i in range(len(pairs))]


def _batches(lengths: Sequence[int], tokens: int) -> Iterator[slice]:
    """Runs of falling lengths, each of at most so many tokens when padded to its first."""
    first = 0
    while first < len(lengths):
        count = max(1, tokens // lengths[first])
        yield slice(first, first + count)
        first += count


def _batch(
    model: nn.Module, head: OutputHead | None, pairs: Sequence[ContinuationPair], device: torch.device
) -> list[Likelihood]:
    longest = max(len(pair.read) for pair in pairs)
    # Its own last token again: no id that a model takes for padding, and asks for a mask.
    ids_BT = torch.tensor([pair.read + pair.read[-1:] * (longest - len(pair.read)) for pair in pairs], device=device)
    counts = [len(pair.continuation) for pair in pairs]
    rows = [b for b, count in enumerate(counts) for _ in range(count)]
    columns = [t for pair in pairs for t in range(len(pair.context) - 1, len(pair.read))]
    targets_R = torch.tensor([token for pair in pairs for token in pair.continuation], device=device)
    log_probs_R, greedy_R = _rows(_logits(model, head, ids_BT, rows, columns), targets_R)
    if not bool(torch.isfinite(log_probs_R).all()):
        raise CompressError("logits of the model are not finite numbers on these questions; it is damaged")
    made = zip(log_probs_R.split(counts), greedy_R.split(counts), strict=True)
    return [Likelihood(float(log_probs.sum()), bool(greedy.all())) for log_probs, greedy in made]


def _logits(
    model: nn.Module, head: OutputHead | None, ids_BT: Tensor, rows: list[int], columns: list[int]
) -> Iterator[Tensor]:
    """Logits [., V] in float32 of the tokens at (row, column) of a batch, some at a time."""
    if head is None:
        logits_RV = model(input_ids=ids_BT).logits[rows, columns]
        yield from (part.float() for part in logits_RV.split(max(1, CHUNK_VALUES // logits_RV.shape[-1])))
        return
    taken: list[Tensor] = []
    with head.replaced(taken.append):
        model(input_ids=ids_BT)
    whole = head.whole
    for hidden_CD in taken[0][rows, columns].split(max(1, CHUNK_VALUES // len(whole.weight_VD))):
        yield whole.finish(whole.product(hidden_CD))


def _rows(logits: Iterator[Tensor], targets_R: Tensor) -> tuple[Tensor, Tensor]:
    """The log-probability of each target, float64, and True where it is the most probable token, on the CPU."""
    log_probs, greedy, first = [], [], 0
    for logits_CV in logits:
        targets_C = targets_R[first : first + len(logits_CV)]
        first += len(logits_CV)
        log_probs.append(logits_CV.log_softmax(-1).gather(-1, targets_C[:, None]).squeeze(-1).double().cpu())
        greedy.append((logits_CV.argmax(-1) == targets_C).cpu())
    return torch.cat(log_probs), torch.cat(greedy)
