"""Rows of unequal length, some pieces of which are predicted, as the windows of a text."""

from collections.abc import Sequence

import torch

from compress.evaluation.document import Role
from compress.evaluation.quality.texts import Text
from compress.evaluation.quality.windows import row_windows

Row = Sequence[tuple[Sequence[int], bool]]  # pieces of tokens, and whether each is an item, which is predicted


def rows_text(name: str, role: Role, rows: Sequence[Row], parts: Sequence[str]) -> Text:
    """A text with a window for each row, the shorter ones padded on the right, where a causal model does not look.
    parts: the kind of each item, in their order."""
    ids, items, count = [], [], 0
    for row in rows:
        ids.append([token for piece, _ in row for token in piece])
        item: list[int] = []
        for piece, asked in row:
            item += [count if asked else -1] * len(piece)
            count += asked
        items.append(item)
    longest = max(map(len, ids))
    padded = [
        torch.tensor([row + [fill] * (longest - len(row)) for row in each]) for each, fill in ((ids, 0), (items, -1))
    ]
    return Text(name, role, row_windows(padded[0], item_BL=padded[1]), parts=tuple(parts))
