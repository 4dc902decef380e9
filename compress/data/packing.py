"""Packing: rows of any number of tokens, as windows of one length with as little padding as possible.

A row longer than a window is cut, and goes on in another one. Each piece goes, in the order of the rows, into the first
window that has room for it. Rows that share a window see those before them, as documents of a text do. Padding is at
the end of a window, where no token sees it, and masked: no statistic counts it.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from compress.base.errors import InputError
from compress.checkpoint.read.tokenizer_check import tokenizing
from compress.data.bos import Bos
from compress.data.chat import Conversations
from compress.data.documents import Documents
from compress.data.tokens import Origin, Tokens

OPEN = 64  # windows that later pieces may still go into
EMPTY, SPARE = "empty", "not needed for so many samples"


@dataclass(frozen=True)
class RowPiece:
    """Tokens of a row that lie in one window. file, row: their numbers."""

    file: int
    row: int
    ids: Sequence[int]


def pack(pieces: Sequence[RowPiece], length: int) -> list[list[RowPiece]]:
    """Windows of pieces, none of them longer than `length`."""
    windows: list[list[RowPiece]] = []
    room: dict[int, int] = {}  # {window: free places}, oldest first
    for piece in pieces:
        size = len(piece.ids)
        place = next((window for window, free in room.items() if free >= size), None)
        if place is None:
            place = len(windows)
            windows.append([])
            room[place] = length
        windows[place].append(piece)
        room[place] -= size
        if room[place] < 2:
            del room[place]
        elif len(room) > OPEN:
            del room[next(iter(room))]
    return windows


def pack_tokens(
    files: Sequence[Documents],
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    length: int,
    samples: int | None,
    bos: Bos,
) -> Tokens:
    """Windows of the rows of files, at most so many, spread evenly. Raises InputError where there is no row of 2 tokens
    or more."""
    size = length - len(bos.before_windows)
    chats = Conversations(tokenizer, source) if any(file.chat for file in files) else None
    pieces: list[RowPiece] = []
    empty: Counter[int] = Counter()
    for number, file in enumerate(files):
        for row, ids in enumerate(_row_ids(file, tokenizer, chats, bos)):
            parts = [ids[i : i + size] for i in range(0, len(ids), size)]
            found = [RowPiece(number, row, part) for part in parts if len(part) > 1]
            pieces += found
            empty[number] += not found
    if not pieces:
        raise InputError(f"{source} holds no row of 2 tokens or more")
    windows = pack(pieces, size)
    count = len(windows) if samples is None else min(samples, len(windows))
    picked = [windows[i] for i in torch.linspace(0, len(windows) - 1, count).round().long().tolist()]
    origins = [_origin(file, i, empty[i], pieces, picked) for i, file in enumerate(files)]
    pad: Any = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    rows = [[token for piece in window for token in piece.ids] for window in picked]
    rows = [row if row[:1] == bos.before_windows else [*bos.before_windows, *row] for row in rows]
    longest = max(map(len, rows))
    ids_BT = torch.full((count, longest), 0 if pad is None else int(pad), dtype=torch.int64)
    mask = torch.zeros(count, longest, dtype=torch.bool)
    for i, joined in enumerate(rows):
        ids_BT[i, : len(joined)], mask[i, : len(joined)] = torch.tensor(joined), True
    fields = [line for file in files for line in file.said_of_fields("calibration")]
    share = 100 * float((~mask).float().mean())
    padding = f"packed into {count} windows of {longest} tokens, {share:.1f} % of them padding, which is masked"
    notes = [*fields, *map(_remark, origins), padding, *([] if chats is None else chats.notes(source))]
    return Tokens(ids_BT, source, tuple(notes), None if bool(mask.all()) else mask, tuple(origins), bos=bos)


def _row_ids(file: Documents, tokenizer: Any, chats: Conversations | None, bos: Bos) -> list[list[int]]:
    """The token ids of every row: of a text with the special tokens that the tokenizer adds, and BOS where rows have
    it; of a conversation with those that its template writes."""
    if not file.rows:
        return []
    texts = [row if isinstance(row, str) else None for _, row in file.rows]
    plain = [text for text in texts if text is not None and text.strip()]
    written = [chats.text(row, where) for where, row in file.rows if chats is not None and not isinstance(row, str)]
    with tokenizing(tokenizer, file.name, [*plain, *written]):
        tokens = iter(tokenizer(plain, verbose=False)["input_ids"] if plain else [])
        of_chats = iter(tokenizer(written, add_special_tokens=False, verbose=False)["input_ids"] if written else [])
    return [next(of_chats) if text is None else bos.row(next(tokens)) if text.strip() else [] for text in texts]


def _origin(
    file: Documents, number: int, empty: int, pieces: Sequence[RowPiece], picked: Sequence[list[RowPiece]]
) -> Origin:
    """The part of a file that is in the windows that were picked."""
    mine = Counter(piece.row for piece in pieces if piece.file == number)
    shown = [piece for window in picked for piece in window if piece.file == number]
    used = len({piece.row for piece in shown})
    dropped = {EMPTY: empty, SPARE: len(mine) - used}
    return Origin(
        file.name,
        len(file.rows),
        used,
        sum(len(piece.ids) for piece in shown),
        sum(count > 1 for count in mine.values()),
        {why: count for why, count in dropped.items() if count},
    )


def _remark(origin: Origin) -> str:
    """A remark on a file: its rows and its tokens."""
    more = [f"{origin.split} longer than a window and cut"] if origin.split else []
    more += [f"{count} left out ({why})" for why, count in origin.dropped.items()]
    return f"calibration {origin.file!r}: {origin.tokens} tokens of {origin.used} of {origin.rows} rows" + "".join(
        f"; {part}" for part in more
    )
