"""Text and tokens: converts text, token files and tensors that a person gives to micro-batches of token ids."""

import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from compress.checkpoint.portable_names import shown
from compress.checkpoint.read.source import DEMO, path_of
from compress.errors import InputError, first_line
from compress.model.calls import Batch
from compress.system.reading import json_line, regular

TEXT_FORMATS, TOKEN_FORMATS = (".txt", ".jsonl", ".parquet"), (".pt", ".npy")
DEFAULT_LENGTH = 2048
LONG = 5_000_000  # characters of a text that takes seconds to tokenize, about one for each million
LOGGER = logging.getLogger("compress.data.text")
TOKEN_INPUTS = ("input_ids", "decoder_input_ids")  # of a batch


@dataclass(frozen=True)
class Tokens:
    """Token ids [samples, length], the name of their source, and notes that the person should read."""

    ids: Tensor
    source: str
    notes: tuple[str, ...] = ()

    def fingerprint(self) -> str:
        return hashlib.sha256(self.ids.contiguous().numpy().tobytes()).hexdigest()

    def described(self) -> dict[str, Any]:
        """The entry about these tokens in the record of a run."""
        return {
            "source": shown(self.source),
            "samples": len(self.ids),
            "length": self.ids.shape[1],
            "sha256": self.fingerprint(),
        }


def read_text(source: str, what: str) -> str:
    """The text of a .txt, .jsonl (field `text`) or .parquet (column `text`) file, a `datasets` id, or `demo`.

    what: `calibration` or `held-out`, which chooses the demo text. Documents are joined by blank lines.
    """
    if source == "demo":
        return (DEMO / ("calibration.txt" if what == "calibration" else "heldout.txt")).read_text(encoding="utf-8")
    path = path_of(source, "text")
    if not path.is_dir():
        regular(path, "text")
    if path.suffix not in TEXT_FORMATS:
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
            return _join(_parquet(path), source)
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{source} is not UTF-8 (byte {error.start}); convert it first") from None
    except OSError as error:
        raise InputError(f"{source} cannot be read: {error.strerror}") from None
    return _join(_jsonl(text, source), source) if path.suffix == ".jsonl" else text


def _join(documents: Iterable[str], source: str) -> str:
    text = "\n\n".join(d for d in documents if d.strip())
    if not text:
        raise InputError(f"{source} holds no text")
    return text


def _jsonl(text: str, source: str) -> Iterable[str]:
    # Not splitlines(): a JSON string may hold other line separators, like U+2028.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        record = json_line(line, f"{source} line {number}")
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise InputError(f"{source} line {number} has no string field 'text'")
        yield record["text"]


def _parquet(path: Path) -> Iterable[str]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path, columns=["text"])
        return [t for t in table.column("text").to_pylist() if isinstance(t, str)]
    except (pa.ArrowException, KeyError) as error:
        raise InputError(f"{path} is not a parquet file with a column 'text' ({first_line(error)})") from None


def _from_hub(source: str) -> str:
    import datasets

    name, _, configuration = source.partition(":")
    try:
        loaded: Any = datasets.load_dataset(name, configuration or None, split="train")  # runs no scripts since 4.0
    except Exception as error:  # noqa: BLE001 - every failure of the hub client means the same to the person
        raise InputError(
            f"text {source!r} is no file and no datasets id that can be had ({first_line(error)}); allowed: "
            f"{', '.join(TEXT_FORMATS + TOKEN_FORMATS)}, a datasets id (name or name:configuration), 'demo'"
        ) from None
    if "text" not in loaded.column_names:
        raise InputError(f"dataset {source!r} has no column 'text'; it has {', '.join(loaded.column_names)}")
    return _join(loaded["text"], source)


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


def check_vocabulary(ids: Tensor, source: str, vocabulary: int | None) -> None:
    """Raises InputError for token ids outside a vocabulary of this size. vocabulary: None where it is not known."""
    if int(ids.min()) < 0 or (vocabulary is not None and int(ids.max()) >= vocabulary):
        raise InputError(
            f"{source} holds token ids from {int(ids.min())} to {int(ids.max())}; the vocabulary is "
            f"0 to {'...' if vocabulary is None else vocabulary - 1}: tokenize with this model's tokenizer"
        )


def _unusual(tensor: Tensor) -> str | None:
    """The kind of a tensor that is not plain: nested, sparse, quantized or meta. None for a plain tensor."""
    kinds = {
        "nested": tensor.is_nested,
        "sparse": tensor.layout is not torch.strided,
        "quantized": tensor.is_quantized,
        "meta": tensor.is_meta,
    }
    return next((kind for kind, so in kinds.items() if so), None)


def checked_ids(value: Any, source: str, vocabulary: int | None = None) -> Tensor:
    """int64 [samples, length] token ids inside the vocabulary. Raises InputError for anything else."""
    if isinstance(value, Tensor) and (kind := _unusual(value)) is not None:
        raise InputError(f"{source} holds a {kind} tensor; token ids must be integers of shape [samples, length]")
    if (
        not isinstance(value, Tensor)
        or value.ndim != 2
        or value.is_floating_point()
        or value.is_complex()
        or value.dtype == torch.bool
    ):
        found = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"{source} holds {found}; token ids must be integers of shape [samples, length]")
    if value.numel() == 0:
        raise InputError(f"{source} holds no tokens")
    value = value.to(torch.int64)  # small unsigned types have no minimum
    if value.shape[1] < 2:
        raise InputError(f"{source} holds rows of one token; rows of 2 or more are needed")
    check_vocabulary(value, source, vocabulary)
    return value


def tokenized(text: str, tokenizer: PreTrainedTokenizerBase, source: str) -> Tensor:
    """Ids [N] of a text, with the special tokens that the tokenizer adds. Raises InputError for an empty text."""
    if not text.strip():
        raise InputError(f"{source} is empty")
    if len(text) >= LONG:
        LOGGER.info("tokenizing %s: %d million characters", source, round(len(text) / 1e6))
    return tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0].to(torch.int64)


def windows(text: str, tokenizer: PreTrainedTokenizerBase, length: int, source: str) -> Tensor:
    """Non-overlapping windows [samples, length] of the tokenized text; a last partial window is dropped."""
    ids = tokenized(text, tokenizer, source)
    if len(ids) < length:
        raise InputError(
            f"{source} has {len(ids)} tokens; at least one window of {length} is needed: give more text or a "
            "shorter --length"
        )
    return ids[: len(ids) // length * length].view(-1, length)


def check_windows(length: int | None, samples: int | None) -> None:
    """Raises InputError for windows below 2 tokens, which hold nothing to predict, and for fewer than 1 sample."""
    if length is not None and length < 2:
        raise InputError(f"length {length}; allowed: 2 or more tokens")
    if samples is not None and samples < 1:
        raise InputError(f"samples {samples}; allowed: 1 or more")


def default_length(config: Any) -> int:
    """The window length where none is asked for: the model's context, at most 2048."""
    longest = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or DEFAULT_LENGTH
    return min(int(longest), DEFAULT_LENGTH)


def check_context(name: str, length: int, config: Any) -> None:
    """Raises InputError for windows longer than the context of a model."""
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise InputError(f"{name} has windows of {length} tokens; the model reads at most {longest}")


def load_tokens(
    source: str | Tensor,
    tokenizer: Any,
    config: Any,
    *,
    what: str,
    length: int | None = None,
    samples: int | None = None,
) -> Tokens:
    """Token windows of anything a person may give: text, a token file, or a tensor of ids.

    tokenizer: a tokenizer, or a function that loads it (called for text only). length: tokens per window of text.
    samples: at most so many windows, spread evenly over the text; the first rows of a token file.
    """
    vocabulary = getattr(config, "vocab_size", None)
    check_windows(length, samples)
    notes: list[str] = []
    if isinstance(source, Tensor) or Path(source).suffix in TOKEN_FORMATS:
        name = "token tensor" if isinstance(source, Tensor) else source
        ids = checked_ids(source if isinstance(source, Tensor) else read_tokens(source), name, vocabulary)
        if length is not None and length != ids.shape[1]:
            raise InputError(
                f"{name} has rows of {ids.shape[1]} tokens; --length {length} does not apply to token files"
            )
        picked = ids[:samples]
    else:
        name = source
        text = read_text(source, what)
        wanted = length or default_length(config)
        ids = windows(
            text, tokenizer() if not isinstance(tokenizer, PreTrainedTokenizerBase) else tokenizer, wanted, name
        )
        checked_ids(ids, name, vocabulary)
        count = len(ids) if samples is None else min(samples, len(ids))
        picked = ids[torch.linspace(0, len(ids) - 1, count).round().to(torch.int64)]
    if samples is not None and len(picked) < samples:
        notes.append(
            f"{what} text {name!r} gives {len(picked)} samples of {picked.shape[1]} tokens, fewer than the "
            f"{samples} asked for"
        )
    check_context(name, picked.shape[1], config)
    return Tokens(picked, name, tuple(notes))


def batches_of(data: Tensor | Sequence[Mapping[str, Tensor]], size: int, vocabulary: int | None = None) -> list[Batch]:
    """Micro-batches: rows of a tensor of ids, or dictionaries of model inputs as they are.

    Raises InputError for no batches, for batches without model inputs or with all tokens masked, for `use_cache`, and
    for token ids outside the vocabulary.
    """
    if isinstance(data, Tensor):
        return [{"input_ids": part} for part in data.split(size)]
    if not isinstance(data, Iterable):
        raise InputError(f"calibration is {data!r}; give text, token ids [samples, length] or a list of batches")
    batches = list(data)
    if not batches:
        raise InputError("calibration holds no batch")
    for batch in batches:
        if not isinstance(batch, Mapping) or not batch:
            raise InputError(
                f"a calibration batch is {type(batch).__name__}; give token ids [samples, length] or "
                "dictionaries of the model's inputs"
            )
        if batch.get("use_cache"):
            raise InputError("a calibration batch asks for use_cache; leave it out: calibration fills no cache")
        for name in TOKEN_INPUTS:
            ids = batch.get(name)
            if vocabulary is not None and isinstance(ids, Tensor) and not ids.is_floating_point() and ids.numel():
                check_vocabulary(ids, f"{name} of a calibration batch", vocabulary)
    masks = [batch.get("attention_mask") for batch in batches]
    if all(isinstance(mask, Tensor) and mask.ndim == 2 and not mask.any() for mask in masks):
        raise InputError("every token of the calibration batches is masked (attention_mask is 0 throughout)")
    return batches
