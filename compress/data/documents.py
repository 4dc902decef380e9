"""Documents: what text files, datasets and folders of them hold, as texts and as rows of chat messages."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compress.checkpoint.read.source import DEMO, path_of
from compress.errors import InputError, first_line
from compress.system.reading import json_line, regular

TEXT_FORMATS, TOKEN_FORMATS = (".txt", ".jsonl", ".parquet"), (".pt", ".npy")
CHATS = ("messages", "conversations")  # fields of a row that is a conversation
COLUMNS = (*CHATS, "tools")


@dataclass(frozen=True)
class Documents:
    """The rows of a file or dataset. rows: (words that name the row, its text or its conversation)."""

    name: str
    rows: Sequence[tuple[str, str | Mapping[str, Any]]]

    @property
    def chat(self) -> bool:
        """True where some row is a conversation."""
        return any(isinstance(row, Mapping) for _, row in self.rows)

    def texts(self) -> list[str]:
        """Texts that are not blank. Raises InputError where there is none, and for conversations."""
        where = next((where for where, row in self.rows if isinstance(row, Mapping)), None)
        if where is not None:
            raise InputError(
                f"{where} has no string field 'text'; conversations are read for calibration and training alone"
            )
        texts = [row for _, row in self.rows if isinstance(row, str) and row.strip()]
        if not texts:
            raise InputError(f"{self.name} holds no text")
        return texts

    def text(self) -> str:
        """All texts, joined by blank lines. Raises InputError as `texts` does."""
        return "\n\n".join(self.texts())


def read_text(source: str, what: str) -> str:
    """The text of a .txt, .jsonl (field `text`) or .parquet (column `text`) file, a `datasets` id, or `demo`.

    what: `calibration` or `held-out`, which chooses the demo text. Documents are joined by blank lines.
    """
    return read_documents(source, what).text()


def read_documents(source: str, what: str) -> Documents:
    """The rows of what `read_text` reads; rows of chat messages are no text. Raises InputError."""
    if source == "demo":
        path = DEMO / ("calibration.txt" if what == "calibration" else "heldout.txt")
        return Documents(source, [(source, path.read_text(encoding="utf-8"))])
    path = path_of(source, "text")
    if not path.is_dir():
        regular(path, "text")
    if path.is_dir() or path.suffix not in TEXT_FORMATS:
        if path.is_dir():
            raise InputError(
                f"text {source!r} is a directory; give a file ({', '.join(TEXT_FORMATS + TOKEN_FORMATS)}), a datasets "
                "id or 'demo'"
            )
        if path.exists():
            raise InputError(
                f"text {source!r} has the ending {path.suffix!r}; allowed: "
                f"{', '.join(TEXT_FORMATS + TOKEN_FORMATS)}, a datasets id or 'demo'"
            )
        return _from_hub(source)
    if not path.is_file():
        raise InputError(f"text file {source!r} does not exist")
    try:
        if path.suffix == ".parquet":
            return Documents(source, list(_parquet(path)))
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{source} is not UTF-8 (byte {error.start}); convert it first") from None
    except OSError as error:
        raise InputError(f"{source} cannot be read: {error.strerror}") from None
    return Documents(source, list(_jsonl(text, source)) if path.suffix == ".jsonl" else [(source, text)])


def read_folder(source: str) -> list[Documents]:
    """The rows of every text file in a folder, in the order of their names. Raises InputError where there is none."""
    paths = sorted(p for p in Path(source).iterdir() if p.suffix in TEXT_FORMATS)
    if not paths:
        raise InputError(
            f"text {source!r} is a directory without {', '.join(TEXT_FORMATS)}; give files of these kinds, a datasets "
            "id or 'demo'"
        )
    return [read_documents(str(path), "calibration") for path in paths]


def _row(record: Any) -> str | Mapping[str, Any] | None:
    """The text of a record, or the record itself where it is a conversation; None for one that is neither."""
    if not isinstance(record, dict):
        return None
    if isinstance(record.get("text"), str):
        return str(record["text"])
    return record if any(isinstance(record.get(name), list) for name in CHATS) else None


def _jsonl(text: str, source: str) -> Iterable[tuple[str, str | Mapping[str, Any]]]:
    # Not splitlines(): a JSON string may hold other line separators, like U+2028.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{source} line {number}"
        row = _row(json_line(line, where))
        if row is None:
            raise InputError(f"{where} has no string field 'text', and no list of chat messages in 'messages'")
        yield where, row


def _parquet(path: Path) -> Iterable[tuple[str, str | Mapping[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names = [name for name in pq.read_schema(path).names if name in COLUMNS]
        if "text" in pq.read_schema(path).names or not names:
            texts = pq.read_table(path, columns=["text"]).column("text").to_pylist()
            return [(str(path), text) for text in texts if isinstance(text, str)]
        table = pq.read_table(path, columns=names).to_pylist()
    except (pa.ArrowException, KeyError, OSError) as error:
        raise InputError(f"{path} is not a parquet file with a column 'text' ({first_line(error)})") from None
    return _conversations(table, str(path))


def _conversations(table: Iterable[Mapping[str, Any]], source: str) -> list[tuple[str, str | Mapping[str, Any]]]:
    """The rows of a table of conversations. Raises InputError for one that is none."""
    found = []
    for number, record in enumerate(table, 1):
        row = _row(record)
        if row is None:
            raise InputError(f"{source} row {number} has no list of chat messages in 'messages'")
        found.append((f"{source} row {number}", row))
    return found


def _from_hub(source: str) -> Documents:
    import datasets

    name, _, configuration = source.partition(":")
    try:
        loaded: Any = datasets.load_dataset(name, configuration or None, split="train")  # runs no scripts since 4.0
    except Exception as error:  # noqa: BLE001 - every failure of the hub client means the same to the person
        raise InputError(
            f"text {source!r} is no file and no datasets id that can be had ({first_line(error)}); allowed: "
            f"{', '.join(TEXT_FORMATS + TOKEN_FORMATS)}, a datasets id (name or name:configuration), 'demo'"
        ) from None
    if "text" in loaded.column_names:
        return Documents(source, [(source, text) for text in loaded["text"]])
    names = [name for name in loaded.column_names if name in COLUMNS]
    if not set(names) & set(CHATS):
        raise InputError(
            f"dataset {source!r} has no column 'text'; it has {', '.join(loaded.column_names)} (chats are read from "
            f"{' or '.join(CHATS)})"
        )
    return Documents(source, _conversations(loaded.select_columns(names), source))


def read_batches(source: str) -> list[Mapping[str, Any]] | None:
    """The batches that a .pt file holds: a list of dictionaries of a model's inputs, written with torch.save; None for
    any other content. Raises InputError as `read_tokens` does."""
    if Path(source).suffix != ".pt":
        return None
    held = read_tokens(source)
    return list(held) if isinstance(held, list | tuple) and all(isinstance(b, Mapping) for b in held) else None


def read_tokens(source: str) -> Any:
    """The content of a .pt or .npy file, not yet checked to be token ids (see `checked_ids`). Raises InputError."""
    path = regular(path_of(source, "token file"), "token file")
    if not path.is_file():
        raise InputError(f"token file {source!r} does not exist")
    try:
        if path.suffix == ".pt":
            return torch.load(path, map_location="cpu", weights_only=True)
        return torch.from_numpy(np.load(path, allow_pickle=False))
    except Exception:  # noqa: BLE001 - pickle and numpy raise anything, and advise to load it unsafely
        writer = "torch.save" if path.suffix == ".pt" else "numpy.save"
        raise InputError(
            f"{source} is damaged or holds no tensor; write integers of shape [samples, length] with {writer}"
        ) from None
