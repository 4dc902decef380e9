"""Documents: what text files, datasets and folders of them hold, as texts and as rows of chat messages."""

import json
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compress.base.errors import InputError, first_line
from compress.base.regular_files import json_line, regular
from compress.checkpoint.read.source import DEMO, looks_like_path, path_of, why_not_had
from compress.data.rows import CHATS, COLUMNS, KNOWN, Row, row_of

TEXT_FORMATS, TOKEN_FORMATS = (".txt", ".jsonl", ".json", ".parquet"), (".pt", ".npy")
PLAIN = (".txt", ".raw", ".md", "")  # endings of files that are one text; in a folder .txt alone
ALLOWED = f"text ({', '.join(filter(None, PLAIN))} or no ending), {', '.join(TEXT_FORMATS[1:] + TOKEN_FORMATS)}"
HOW = "; give an array of rows, or a row on each line"
MOST_EXPANDED = 100  # times the size of a file that what it stands for may have ...
SPARE_BYTES = 2**22  # ... and so many bytes more
ROW_BYTES = 64  # that a row takes at least
MANY_ROWS, FEW_ROWS = 2**16, 2**8  # that are read at a time: of texts; of lists, whose texts are repeated in memory
STRINGS = ("string", "large_string")
NESTED = 4  # levels of lists and mappings in a file of batches
USUAL = ("", "text", *CHATS)  # fields that need no remark


@dataclass(frozen=True)
class Documents:
    """The rows of a file or dataset. rows: (words that name the row, its text or its conversation). joined: {fields
    that make a text together: rows of them}."""

    name: str
    rows: Sequence[tuple[str, Row]]
    joined: Mapping[str, int] = field(default_factory=dict)

    @property
    def chat(self) -> bool:
        """True where some row is a conversation."""
        return any(isinstance(row, Mapping) for _, row in self.rows)

    @property
    def empty(self) -> int:
        """The number of rows without text."""
        return sum(isinstance(row, str) and not row.strip() for _, row in self.rows)

    def said_of_fields(self, what: str) -> list[str]:
        """Remarks on fields that make a text together. what: `calibration` or `held-out`."""
        return [
            f"{what} {self.name!r}: {rows} of {len(self.rows)} rows are read as {fields}"
            for fields, rows in self.joined.items()
        ]

    def said_of_empty(self, what: str) -> list[str]:
        """A remark on rows without text, if there are any."""
        return [f"{what} {self.name!r}: {self.empty} of {len(self.rows)} rows left out (empty)"] if self.empty else []

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


def read_documents(source: str, what: str) -> Documents:
    """The rows (`data.rows`) of a text, .jsonl, .json or .parquet file, a `datasets` id, or `demo`. what: `calibration`
    or `held-out`, which chooses the demo text. Raises InputError."""
    if source == "demo":
        path = DEMO / ("calibration.txt" if what == "calibration" else "heldout.txt")
        return Documents(source, [(source, path.read_text(encoding="utf-8"))])
    path = path_of(source, "text")
    if not path.is_dir():
        regular(path, "text")
    if path.is_dir():
        raise InputError(f"text {source!r} is a directory; give a file: {ALLOWED}; or a datasets id, or 'demo'")
    if not path.exists():
        if path.suffix in (*TEXT_FORMATS, *filter(None, PLAIN)) or looks_like_path(source):
            raise InputError(f"text file {source!r} does not exist")
        return _from_hub(source)
    if path.suffix not in (*TEXT_FORMATS, *PLAIN):
        raise InputError(
            f"text {source!r} has the ending {path.suffix!r}; allowed: {ALLOWED}; or a datasets id, or 'demo'"
        )
    try:
        if path.suffix == ".parquet":
            return _documents(source, _parquet(path))
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{source} is not UTF-8 (byte {error.start}); convert it first") from None
    except OSError as error:
        raise InputError(f"{source} cannot be read: {error.strerror}") from None
    if path.suffix in PLAIN:
        return Documents(source, [(source, text)])
    return _documents(
        source, _array(text, source) if path.suffix == ".json" and _is_array(text) else _jsonl(text, source)
    )


def read_folder(source: str) -> list[Documents]:
    """The rows of every text file in a folder, in the order of their names. Raises InputError where there is none."""
    paths = sorted(p for p in Path(source).iterdir() if _holds_rows(p))
    if not paths:
        raise InputError(
            f"text {source!r} is a directory without {', '.join(TEXT_FORMATS)}; give files of these kinds, a datasets "
            "id or 'demo'"
        )
    return [read_documents(str(path), "calibration") for path in paths]


def _documents(source: str, records: Iterable[tuple[str, Any]]) -> Documents:
    """The rows of records, each with words that name it. Raises InputError for one of other fields."""
    rows: list[tuple[str, Row]] = []
    joined: Counter[str] = Counter()
    for where, record in records:
        found = row_of(record)
        if found is None:
            raise InputError(f"{where} has no string field 'text', and no other fields that are read: {KNOWN}")
        fields, row = found
        if fields not in USUAL:
            joined[fields] += 1
        rows.append((where, row))
    return Documents(source, rows, joined)


def _is_array(text: str) -> bool:
    """True for JSON that begins like an array. A row of JSONL is an object."""
    return text.lstrip()[:1] == "["


def _holds_rows(path: Path) -> bool:
    """True for a text file; for a .json file where its first line, or the first element of its array, is a row with
    known fields."""
    if path.suffix != ".json" or not path.is_file():
        return path.suffix in TEXT_FORMATS
    text = path.read_text(encoding="utf-8-sig", errors="replace").lstrip()
    first = text[1:].lstrip() if _is_array(text) else text.partition("\n")[0]
    try:
        record, _ = json.JSONDecoder().raw_decode(first)
    except (ValueError, RecursionError):
        return False
    return isinstance(record, Mapping) and row_of(record) is not None


def _array(text: str, source: str) -> Iterator[tuple[str, Any]]:
    for number, record in enumerate(json_line(text, source, HOW), 1):
        yield f"{source} row {number}", record


def _jsonl(text: str, source: str) -> Iterator[tuple[str, Any]]:
    # Not splitlines(): a JSON string may hold other line separators, like U+2028.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            where = f"{source} line {number}"
            yield where, json_line(line, where, HOW)


def _parquet(path: Path) -> list[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names = [name for name in pq.read_schema(path).names if name in COLUMNS]
        if "text" in pq.read_schema(path).names or not names:
            names = ["text"]
        table = _expand(path, names)
    except (pa.ArrowException, KeyError, OSError) as error:
        raise InputError(f"{path} is not a parquet file with a column 'text' ({first_line(error)})") from None
    return _number(table, str(path))


def _expand(path: Path, names: list[str]) -> list[Mapping[str, Any]]:
    """The rows of a parquet file. Raises InputError for one that holds far more than its size: a kilobyte can stand for
    any number of rows, and for texts of any length."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    most = SPARE_BYTES + MOST_EXPANDED * path.stat().st_size
    too_much = InputError(
        f"{path} stands for more than {most / 1e6:,.0f} MB of text, {MOST_EXPANDED} times its size; give it as .jsonl"
    )
    about, schema = pq.read_metadata(path), pq.read_schema(path)
    flat = all(_is_text(schema.field(name).type) for name in names)
    file = pq.ParquetFile(path, read_dictionary=names if flat else None)  # each different text once
    groups = [about.row_group(i) for i in range(about.num_row_groups)]
    columns = [group.column(i) for group in groups for i in range(group.num_columns)]
    held = sum(c.total_uncompressed_size for c in columns if c.path_in_schema.partition(".")[0] in names)
    if held + ROW_BYTES * about.num_rows > most:
        raise too_much
    rows: list[Mapping[str, Any]] = []
    size = 0
    for batch in file.iter_batches(batch_size=MANY_ROWS if flat else FEW_ROWS, columns=names):
        for column in batch.columns:
            lengths = pc.binary_length(column.dictionary).take(column.indices) if flat else None
            size += column.nbytes if lengths is None else pc.sum(lengths).as_py() or 0
        if size > most:
            raise too_much
        rows += batch.to_pylist()
    return rows


def _is_text(kind: Any) -> bool:
    """True for a column of texts or of categories that are texts."""
    import pyarrow as pa

    return str(kind.value_type if pa.types.is_dictionary(kind) else kind) in STRINGS


def _number(table: Iterable[Mapping[str, Any]], source: str) -> list[tuple[str, Any]]:
    return [(f"{source} row {number}", record) for number, record in enumerate(table, 1)]


def _from_hub(source: str) -> Documents:
    import datasets

    name, _, configuration = source.partition(":")
    try:
        loaded: Any = datasets.load_dataset(name, configuration or None, split="train")  # runs no scripts since 4.0
    except Exception as error:  # noqa: BLE001 - every failure of the hub client means the same to the person
        raise InputError(
            f"text {source!r} is no file here, and {why_not_had(error, 'dataset')}; allowed: {ALLOWED}; or a datasets "
            "id (name or name:configuration), or 'demo'"
        ) from None
    names = [name for name in loaded.column_names if name in COLUMNS]
    if "text" in loaded.column_names:
        names = ["text"]
    if not names:
        raise InputError(
            f"dataset {source!r} has no column 'text'; it has {', '.join(loaded.column_names)} (read are {KNOWN})"
        )
    return _documents(source, _number(loaded.select_columns(names), source))


def read_batches(source: str) -> list[Mapping[str, Any]] | None:
    """The batches that a .pt file holds: a list of dictionaries of a model's inputs, written with torch.save; None for
    any other content. Raises InputError as `read_tokens` does."""
    if Path(source).suffix != ".pt":
        return None
    held = read_tokens(source)
    return list(held) if isinstance(held, list | tuple) and all(isinstance(b, Mapping) for b in held) else None


def read_tokens(source: str) -> Any:
    """The content of a .pt or .npy file, not yet checked to be token ids (see `check_ids`). Raises InputError."""
    path = regular(path_of(source, "token file"), "token file")
    if not path.is_file():
        raise InputError(f"token file {source!r} does not exist")
    try:
        if path.suffix == ".pt":
            return _load(path)
        return torch.from_numpy(np.load(path, allow_pickle=False))
    except InputError:
        raise
    except Exception:  # noqa: BLE001 - pickle and numpy raise anything, and advise to load it unsafely
        writer = "torch.save" if path.suffix == ".pt" else "numpy.save"
        raise InputError(
            f"{source} is damaged or holds no tensor; write integers of shape [samples, length] with {writer}"
        ) from None


def _load(path: Path) -> Any:
    """The content of a .pt file. Raises InputError for one that stands for far more than its size: compressed, or of
    tensors that repeat few values."""
    size = path.stat().st_size
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as file:
            if sum(each.file_size for each in file.infolist()) > size:
                raise InputError(f"{path} is compressed; write it with torch.save")
    content = torch.load(path, map_location="cpu", weights_only=True)
    held = 0
    for tensor in _tensors(content):
        held += tensor.nbytes if tensor.layout is torch.strided else 0
        if held > SPARE_BYTES + MOST_EXPANDED * size:
            raise InputError(
                f"{path} holds tensors of {held / 1e6:,.0f} MB and more that share values; save what contiguous() "
                "returns"
            )
    return content


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in lists and mappings. What is nested deeper than batches are is left to their checks."""
    level = [value]
    for _ in range(NESTED):
        yield from (each for each in level if isinstance(each, torch.Tensor))
        holders = [each for each in level if isinstance(each, Mapping | list | tuple)]
        level = [each for held in holders for each in (held.values() if isinstance(held, Mapping) else held)]
