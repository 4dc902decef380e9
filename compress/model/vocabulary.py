"""Vocabularies of two models that are compared: equal, or the same tokens padded to two lengths.

Embeddings are often longer than the tokenizer's list, to a multiple of 64 or 128 that differs by size of the model
(Qwen2.5: 151,936 and 152,064). The tokens that both models have are the first ones; ids beyond are in no text.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from compress.base.errors import InputError

PADDING = 1024  # tokens by which two paddings of one vocabulary differ, at most
Tokens = Mapping[str, int]


def padded_alike(one: int, other: int) -> bool:
    """True for sizes that may be of one vocabulary, padded."""
    return abs(one - other) <= PADDING


def common_tokens(sizes: Mapping[str, int], tokens: Mapping[str, Tokens], what: str) -> int:
    """The number of tokens that two models have in common.

    sizes: of their vocabularies, by what the models are called. tokens: {token: id} of each tokenizer that is known.
    Raises InputError for vocabularies that are not one, padded. what: needs one vocabulary, for the message.
    """
    (one, size), (other, another) = sizes.items()
    wrong = f"{other} has a vocabulary of {another}, {one} of {size}; {what} needs the same one"
    if not padded_alike(size, another):
        raise InputError(f"{wrong}, or one that is padded further (by {PADDING} at most)")
    shared = min(size, another)
    if len(tokens) == len(sizes):
        ours, theirs = ({i: token for token, i in each.items() if i < shared} for each in tokens.values())
        for i in sorted(ours.keys() & theirs.keys()):
            if ours[i] != theirs[i]:
                raise InputError(f"{wrong}: token {i} is {ours[i]!r} of {one}, and {theirs[i]!r} of {other}")
    return shared


def check_common(ids: Tensor, source: str, shared: int) -> None:
    """Raises InputError for token ids that only one of two models has."""
    if int(ids.max()) >= shared:
        raise InputError(
            f"{source} holds token id {int(ids.max())}, which only one of the two models has; both have 0 to "
            f"{shared - 1}: leave such text out"
        )


def over_vocabulary(logits_TV: Tensor, size: int) -> Tensor:
    """Logits of a vocabulary of this size: cut, or with -inf, which no distribution gives mass to, at tokens beyond."""
    missing = size - logits_TV.shape[-1]
    if missing <= 0:
        return logits_TV[..., :size]
    return torch.nn.functional.pad(logits_TV, (0, missing), value=-torch.inf)
