"""The protocol of a measurement: the predicted tokens of a text, and the context of each.

    non-overlapping   |0 1 2 3|4 5 6 7|      every token after a window's first, from those before it in its window
    strided (2 of 4)  |0 1 2 3|              the first window as above; of each further one only the tokens that no
                          |2 3 4 5|          earlier window has had, from all before them in theirs; the last window
                              |4 5 6 7|      may be shorter. What Hugging Face's documentation calls a sliding window.

A text is one sequence of ids; `data.bos` says where BOS is in it. BOS before each of several rows is read and not
predicted, because no row has it. Rows of a token file are windows, each read from its own start. Of windows that hold
items (answers, tool calls, facts to recall) only the tokens of items are predicted.

Shapes: N tokens of a text, B windows, L tokens of a window, P predicted tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from compress.checkpoint.files import checksum, fingerprint


class Span(NamedTuple):
    """A window: ids [begin, end) of a text, of which the last `new` are predicted."""

    begin: int
    end: int
    new: int


class Batch(NamedTuple):
    """Windows of one length. scored_BL: bool, True at the place before each predicted token. first: the number of the
    text's predicted tokens before these. stretch_P: the number of the stretch of `length` tokens that each predicted
    token is in. position_P: tokens before it in its window. item_P: its item;
    None where there are none."""

    ids_BL: Tensor
    scored_BL: Tensor
    first: int
    stretch_P: Tensor
    position_P: Tensor
    item_P: Tensor | None = None

    @property
    def targets(self) -> Tensor:
        """The tokens that are predicted [P], in the order of `scored_BL`."""
        return self.ids_BL[:, 1:][self.scored_BL[:, :-1]]


@dataclass(frozen=True)
class Windows:
    """ids_N int64, and the windows on it. length, stride: tokens of a window, and between the beginnings of two.
    begun: each begins with BOS. skipped: a token that is not predicted. item_N: the number of the item that a token
    belongs to, -1 for none; with it, windows do not overlap."""

    ids_N: Tensor
    spans: tuple[Span, ...]
    length: int
    stride: int
    begun: bool = False
    skipped: int | None = None
    item_N: Tensor | None = None

    @property
    def protocol(self) -> str:
        """The protocol in words."""
        begun = "; each begins with BOS" if self.begun else ""
        return self._protocol + (begun if self.skipped is None else "; BOS before a row is not predicted")

    @property
    def _protocol(self) -> str:
        if self.item_N is not None:
            return f"windows of {self.length} tokens, each by itself; the tokens of items are predicted"
        if self.stride == self.length:
            return (
                f"non-overlapping windows of {self.length} tokens; every token after a window's first is predicted "
                "from those before it in its window"
            )
        return (
            f"windows of {self.length} tokens, one every {self.stride}; of each, the tokens that no earlier window has "
            "had are predicted from all before them in it"
        )

    @property
    def predicted(self) -> int:
        """The number of predicted tokens."""
        if self.item_N is not None:
            return int((self.item_N >= 0).sum())
        new = sum(span.new for span in self.spans)
        if self.skipped is None:
            return new
        return new - sum(int((self.ids_N[span.end - span.new : span.end] == self.skipped).sum()) for span in self.spans)

    def sha256(self) -> str:
        """sha256 of the ids and of the windows on them."""
        more: dict[str, object] = {} if self.skipped is None else {"skipped": self.skipped}
        more |= {} if self.item_N is None else {"items": checksum(self.item_N)}
        return fingerprint({"ids": checksum(self.ids_N), "spans": self.spans, **more})

    def batches(self, rows: int) -> Iterator[Batch]:
        """Windows in their order, at most `rows` of them together."""
        first = 0
        for length, group in groupby(self.spans, key=lambda span: span.end - span.begin):
            spans = list(group)
            for i in range(0, len(spans), rows):
                part = spans[i : i + rows]
                begins = torch.tensor([span.begin for span in part])
                places_BL = begins[:, None] + torch.arange(length)
                news = torch.tensor([span.new for span in part])
                after_BL = torch.arange(1, length + 1)  # the place of the token that each place predicts
                scored_BL = (after_BL >= length - news[:, None]) & (after_BL < length)
                ids_BL = self.ids_N[places_BL]
                if self.skipped is not None:
                    scored_BL[:, :-1] &= ids_BL[:, 1:] != self.skipped
                item_P = None
                if self.item_N is not None:
                    item_BL = self.item_N[places_BL]
                    scored_BL[:, :-1] &= item_BL[:, 1:] >= 0
                    item_P = item_BL[:, 1:][scored_BL[:, :-1]]
                stretch_P = (places_BL[scored_BL] + 1) // self.length
                position_P = after_BL.expand_as(scored_BL)[scored_BL]
                yield Batch(ids_BL, scored_BL, first, stretch_P, position_P, item_P)
                first += int(scored_BL.sum())


def row_windows(
    ids_BL: Tensor, begun: bool = False, skipped: int | None = None, item_BL: Tensor | None = None
) -> Windows:
    """Every row of ids [B, L] as a window that shares nothing with the others. item_BL: as in `Windows`; no first token
    of a row is of an item."""
    count, length = ids_BL.shape
    spans = tuple(Span(i * length, (i + 1) * length, length - 1) for i in range(count))
    item_N = None if item_BL is None else item_BL.reshape(-1)
    return Windows(ids_BL.reshape(-1), spans, length, length, begun, skipped, item_N)


def overlapping_windows(
    ids_N: Tensor, length: int, stride: int, samples: int | None = None, skipped: int | None = None
) -> Windows:
    """Overlapping windows over all of a text of two tokens or more; of them at most `samples`, spread evenly."""
    spans, done = [], 0
    for begin in range(0, len(ids_N), stride):
        end = min(begin + length, len(ids_N))
        spans.append(Span(begin, end, min(end - done, end - begin - 1)))  # nothing comes before a window's first
        done = end
        if end == len(ids_N):
            break
    spans = [span for span in spans if span.new]
    if samples is not None and samples < len(spans):
        picked = torch.linspace(0, len(spans) - 1, samples).round().int().tolist()
        spans = [spans[i] for i in picked]
    return Windows(ids_N, tuple(spans), length, stride, skipped=skipped)
