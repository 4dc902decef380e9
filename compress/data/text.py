"""Text and tokens: converts text, token files and tensors that a person gives to micro-batches of token ids."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from compress.base.errors import InputError
from compress.checkpoint.read.source import path_of
from compress.checkpoint.read.tokenizer_check import tokenizing
from compress.data.bos import Bos, bos_of
from compress.data.documents import TOKEN_FORMATS, Documents, read_documents, read_folder, read_tokens
from compress.data.packing import EMPTY, pack_tokens
from compress.data.tokens import Origin, Tokens, check_ids, check_vocabulary, unusual_kind
from compress.model.calls import Batch

DEFAULT_LENGTH = 2048
LONG = 5_000_000  # characters of a text that takes seconds to tokenize, about one for each million
LOGGER = logging.getLogger("compress.data.text")
TOKEN_INPUTS = ("input_ids", "decoder_input_ids")  # of a batch
ALWAYS_TENSORS = (*TOKEN_INPUTS, "attention_mask", "decoder_attention_mask", "position_ids", "token_type_ids")


def tokenize(documents: Documents, tokenizer: PreTrainedTokenizerBase, bos: Bos) -> Tensor:
    """Ids [N] of all texts one after another, with the special tokens that the tokenizer adds. Texts without BOS before
    each are joined by blank lines. Raises InputError where there is none."""
    texts = documents.texts() if bos.place == "row" else [documents.text()]
    if (size := sum(map(len, texts))) >= LONG:
        LOGGER.info("tokenizing %s: %d million characters", documents.name, round(size / 1e6))
    with tokenizing(tokenizer, documents.name, texts):
        rows = tokenizer(texts, verbose=False)["input_ids"]
    return torch.tensor([token for row in rows for token in bos.row(row)], dtype=torch.int64)


def bare_tokens(tokenizer: Any, text: str) -> list[int]:
    """Ids of a piece of a text, without the special tokens that the tokenizer puts around a whole one."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def windows(ids_N: Tensor, length: int, source: str, bos: Bos) -> Tensor:
    """Non-overlapping windows [samples, length] of ids; a last partial window is dropped."""
    before = torch.tensor(bos.before_windows, dtype=torch.int64)
    size = length - len(before)
    if len(ids_N) < size:
        raise InputError(
            f"{source} has {len(ids_N)} tokens; at least one window of {size} is needed: give more text or a "
            "shorter --length"
        )
    cut = ids_N[: len(ids_N) // size * size].view(-1, size)
    return torch.cat([before.expand(len(cut), -1), cut], 1)


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
    packing: bool = False,
    bos: str | None = None,
) -> Tokens:
    """Token windows of anything a person may give: text, a token file, or a tensor of ids; with `packing` also
    conversations, and a folder of text files, whose windows may end in padding.

    tokenizer: a tokenizer, or a function that loads it (called for text only). length: tokens per window of text.
    samples: at most so many windows, spread evenly over the text; the first rows of a token file. bos: the place of BOS
    in windows of text, as in `data.bos`.
    """
    vocabulary = getattr(config, "vocab_size", None)
    check_windows(length, samples)
    if isinstance(source, Tensor) or Path(source).suffix in TOKEN_FORMATS:
        name = "token tensor" if isinstance(source, Tensor) else source
        ids = check_ids(source if isinstance(source, Tensor) else read_tokens(source), name, vocabulary)
        if length is not None and length != ids.shape[1]:
            raise InputError(
                f"{name} has rows of {ids.shape[1]} tokens; --length {length} does not apply to token files"
            )
        if bos is not None:
            raise InputError(f"{name} has its tokens already, to which bos {bos!r} does not apply; give text")
        tokens = Tokens(ids[:samples], name)
    else:
        wanted = length or default_length(config)
        loaded = tokenizer if isinstance(tokenizer, PreTrainedTokenizerBase) else tokenizer()
        tokens = _of_text(source, loaded, what, wanted, samples, vocabulary, packing, bos)
    notes = tokens.notes
    if samples is not None and len(tokens.ids) < samples:
        notes += (
            f"{what} text {tokens.source!r} gives {len(tokens.ids)} samples of {tokens.ids.shape[1]} tokens, fewer "
            f"than the {samples} asked for",
        )
    check_context(tokens.source, tokens.ids.shape[1], config)
    return replace(tokens, notes=notes)


def _of_text(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    what: str,
    length: int,
    samples: int | None,
    vocabulary: int | None,
    packing: bool,
    asked: str | None,
) -> Tokens:
    """At most so many windows of text or conversations."""
    folder = packing and source != "demo" and path_of(source, "text").is_dir()
    documents = read_folder(source) if folder else [read_documents(source, what)]
    bos = bos_of(tokenizer, asked, source)
    if packing and (len(documents) > 1 or documents[0].chat):
        found = pack_tokens(documents, tokenizer, source, length, samples, bos)
        check_ids(found.ids, source, vocabulary)
        return found
    ids_N = tokenize(documents[0], tokenizer, bos)
    ids = check_ids(windows(ids_N, length, source, bos), source, vocabulary)
    count = len(ids) if samples is None else min(samples, len(ids))
    picked = ids[torch.linspace(0, len(ids) - 1, count).round().to(torch.int64)]
    (file,) = documents
    origin = Origin(file.name, len(file.rows), None, picked.numel(), dropped={EMPTY: file.empty} if file.empty else {})
    return Tokens(picked, source, (*file.said_of_fields(what), *file.said_of_empty(what)), origins=(origin,), bos=bos)


def _check_inputs(batch: Batch) -> None:
    """Raises InputError for inputs of tokens that are no tensors, or hold nothing, for tensors that are not plain, and
    for a mask of other rows."""
    for name in ALWAYS_TENSORS:
        value = batch.get(name)
        if value is not None and not (isinstance(value, Tensor) and value.ndim and value.numel()):
            found = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise InputError(f"{name} of a calibration batch is {found}; give a tensor with a number for each token")
    for name, value in batch.items():
        if isinstance(value, Tensor) and (kind := unusual_kind(value)) is not None:
            raise InputError(f"{name} of a calibration batch is a {kind} tensor; give a plain one")
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if ids is not None and mask is not None and mask.ndim == 2 and mask.shape[0] != ids.shape[0]:
        raise InputError(
            f"attention_mask of a calibration batch has {mask.shape[0]} rows and input_ids {ids.shape[0]}; give as many"
        )


def batches_of(data: Tensor | Sequence[Mapping[str, Tensor]], size: int, vocabulary: int | None = None) -> list[Batch]:
    """Micro-batches: rows of a tensor of ids, or dictionaries of model inputs as they are.

    Raises InputError for no batches, for batches without model inputs or with all tokens masked, for `use_cache`, and
    for token ids outside the vocabulary.
    """
    if isinstance(data, Tensor):
        return Tokens(data, "token tensor").batches(size)
    if not isinstance(data, Iterable):
        raise InputError(f"calibration is {data!r}; give text, token ids [samples, length] or a list of batches")
    batches = list(data)
    if not batches:
        raise InputError("calibration holds no batch")
    for batch in batches:
        if not isinstance(batch, Mapping) or not batch:
            raise InputError(
                f"a calibration batch is {type(batch).__name__}; give token ids [samples, length] or dictionaries of "
                "the model's inputs (tuples of them for a model in memory)"
            )
        asked: Any = batch.get("use_cache")
        if asked is not None and asked is not False:  # a tensor has no one truth
            raise InputError("a calibration batch asks for use_cache; leave it out: calibration fills no cache")
        _check_inputs(batch)
        for name in TOKEN_INPUTS:
            ids = batch.get(name)
            if (
                vocabulary is not None
                and isinstance(ids, Tensor)
                and ids.numel()
                and not (ids.is_floating_point() or ids.is_complex())
            ):
                check_vocabulary(ids.to(torch.int64), f"{name} of a calibration batch", vocabulary)
    masks = [batch.get("attention_mask") for batch in batches]
    if all(isinstance(mask, Tensor) and mask.ndim == 2 and not mask.any() for mask in masks):
        raise InputError("every token of the calibration batches is masked (attention_mask is 0 throughout)")
    return batches
