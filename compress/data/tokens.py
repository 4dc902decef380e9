"""Token ids that a model is shown, where they came from, and the checks that they are token ids."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compress.base.errors import InputError
from compress.checkpoint.portable_names import portable
from compress.data.bos import Bos
from compress.model.calls import Batch


@dataclass(frozen=True)
class Origin:
    """A file of calibration data, and what of it is shown to the model.

    rows: documents, conversations or images that it holds. used: those that are shown, if only in part; None where
    windows run over all of them. tokens: shown. split: rows longer than a window, which go on in another one. dropped:
    {reason: rows}.
    """

    file: str
    rows: int
    used: int | None
    tokens: int
    split: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)

    def described(self) -> dict[str, Any]:
        """The entry about this file in the record of a run."""
        found = {"file": portable(self.file), "rows": self.rows, "tokens": self.tokens}
        found |= {} if self.used is None else {"used": self.used}
        found |= {"split": self.split} if self.split else {}
        return {**found, "dropped": dict(self.dropped)} if self.dropped else found


@dataclass(frozen=True)
class Tokens:
    """Token ids [samples, length], the name of their source, and notes that the person should read.

    mask: bool [samples, length], False for padding; None where there is none. origins: the files that they are from.
    start: the token with which the decoder of an encoder-decoder begins; None for a model that reads one sequence.
    bos: where BOS is in text; None for token ids as they were given.
    """

    ids: Tensor
    source: str
    notes: tuple[str, ...] = ()
    mask: Tensor | None = None
    origins: tuple[Origin, ...] = ()
    start: int | None = None
    bos: Bos | None = None

    def fingerprint(self) -> str:
        """SHA-256 of the ids, and of the mask and the decoder's first token where there are any."""
        digest = hashlib.sha256(self.ids.contiguous().numpy().tobytes())
        if self.mask is not None:
            digest.update(self.mask.contiguous().numpy().tobytes())
        if self.start is not None:
            digest.update(str(self.start).encode())
        return digest.hexdigest()

    def described(self) -> dict[str, Any]:
        """The entry about these tokens in the record of a run."""
        padding = {} if self.mask is None else {"padding": int((~self.mask).sum())}
        origins = {"files": [origin.described() for origin in self.origins]} if self.origins else {}
        return {
            "source": portable(self.source),
            "samples": len(self.ids),
            "length": self.ids.shape[1],
            **({} if self.bos is None else {"bos": self.bos.place}),
            **padding,
            **origins,
            "sha256": self.fingerprint(),
        }

    @property
    def before_rows(self) -> int | None:
        """BOS where it is before each of several rows."""
        several = sum(origin.rows for origin in self.origins) > 1
        return self.bos.before_rows if several and self.bos is not None else None

    def batches(self, size: int) -> list[Batch]:
        """Micro-batches of so many samples. A decoder is to write what the encoder reads: it is given that, a token
        later."""
        if self.start is not None:
            later = torch.cat([torch.full_like(self.ids[:, :1], self.start), self.ids[:, :-1]], 1)
            pairs = zip(self.ids.split(size), later.split(size), strict=True)
            return [{"input_ids": ids, "decoder_input_ids": shifted} for ids, shifted in pairs]
        if self.mask is None:
            return [{"input_ids": part} for part in self.ids.split(size)]
        masks = self.mask.long().split(size)
        return [{"input_ids": i, "attention_mask": m} for i, m in zip(self.ids.split(size), masks, strict=True)]

    def part(self, rows: slice) -> "Tokens":
        """Some of the samples, without notes."""
        return Tokens(self.ids[rows], self.source, mask=None if self.mask is None else self.mask[rows], bos=self.bos)


def check_vocabulary(ids: Tensor, source: str, vocabulary: int | None) -> None:
    """Raises InputError for token ids outside a vocabulary of this size. vocabulary: None where it is not known."""
    if int(ids.min()) < 0 or (vocabulary is not None and int(ids.max()) >= vocabulary):
        raise InputError(
            f"{source} holds token ids from {int(ids.min())} to {int(ids.max())}; the vocabulary is "
            f"0 to {'...' if vocabulary is None else vocabulary - 1}: tokenize with this model's tokenizer"
        )


def unusual_kind(tensor: Tensor) -> str | None:
    """The kind of a tensor that is not plain: nested, sparse, quantized or meta. None for a plain tensor."""
    kinds = {
        "nested": tensor.is_nested,
        "sparse": tensor.layout is not torch.strided,
        "quantized": tensor.is_quantized,
        "meta": tensor.is_meta,
    }
    return next((kind for kind, so in kinds.items() if so), None)


def check_ids(value: Any, source: str, vocabulary: int | None = None) -> Tensor:
    """int64 [samples, length] token ids inside the vocabulary. Raises InputError for anything else."""
    if isinstance(value, Tensor) and (kind := unusual_kind(value)) is not None:
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
