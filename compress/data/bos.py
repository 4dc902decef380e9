"""BOS: the token that a tokenizer puts before a text, and its places in windows of text.

    row      before every row of a file: windows hold rows as the model saw texts in training
    window   before every window, whose rows are joined by blank lines
    none     nowhere

By default `row` where the tokenizer itself puts BOS before a text, and otherwise `none`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from transformers import PreTrainedTokenizerBase

from compress.base.errors import InputError, one_of
from compress.checkpoint.read.tokenizer_check import tokenizing

Place = Literal["row", "window", "none"]
PLACES = get_args(Place)


@dataclass(frozen=True)
class Bos:
    """BOS of a tokenizer. token: None where it has none. added: the tokenizer puts it before what it tokenizes."""

    token: int | None
    added: bool
    place: Place

    @property
    def before_rows(self) -> int | None:
        """The token where it is before every row."""
        return self.token if self.place == "row" else None

    @property
    def before_windows(self) -> list[int]:
        """The tokens before every window: one, or none."""
        return [self.token] if self.place == "window" and self.token is not None else []

    def row(self, ids: Sequence[int]) -> list[int]:
        """A row as the tokenizer returns it, with BOS before it where rows have it, and otherwise without."""
        bare = list(ids[1:] if self.added and ids else ids)
        return bare if self.before_rows is None else [self.before_rows, *bare]


def bos_of(tokenizer: PreTrainedTokenizerBase, asked: str | None, source: str) -> Bos:
    """BOS in the place that is asked for, or that is usual. Raises InputError for a place that does not exist, and
    where the tokenizer has no BOS for it."""
    token = tokenizer.bos_token_id
    with tokenizing(tokenizer, source, ()):  # it was tried on this when it was loaded
        first = tokenizer("a", verbose=False)["input_ids"][:1]
    added = isinstance(token, int) and list(first) == [token]
    if asked is None:
        return Bos(token, added, "row" if added else "none")
    one_of("bos", asked, PLACES)
    if token is None and asked != "none":
        raise InputError(
            f"bos {asked!r} for {source}: its tokenizer has no BOS (bos_token); leave it out, or give none"
        )
    place: Place = asked  # type: ignore[assignment]  # of PLACES
    return Bos(token, added, place)
