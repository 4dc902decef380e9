"""The data of a sweep: texts for calibration, training and evaluation, and the other measurements."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from compress.checkpoint.files import checksum
from compress.checkpoint.read.content import content_of
from compress.data.documents import TOKEN_FORMATS

Text = str | Path | Tensor


@dataclass(frozen=True)
class Texts:
    """The texts of a sweep (text, token files or token ids [samples, length]), and how much of each to use."""

    calibration: Text | None
    text: Text
    training: Text | None = None
    samples: int | None = None
    length: int | None = None
    text_samples: int | None = None
    text_length: int | None = None
    batch_size: int = 8
    bos: str | None = None

    @property
    def held_out(self) -> str | Tensor:
        """The held-out text as `evaluate` takes it."""
        return self.text if isinstance(self.text, Tensor) else str(self.text)

    @property
    def window(self) -> int | None:
        """Tokens per window of held-out text; None for token ids, whose rows have a length already."""
        return None if in_rows(self.text) else self.text_length

    def bos_of(self, text: Text | None) -> str | None:
        """The place of BOS in a text; None for token ids, which have it or not."""
        return None if in_rows(text) else self.bos

    def content(self) -> dict[str, Any]:
        """Every field as JSON, with tensors and files as hashes of their content."""
        return {name: _content(value) for name, value in vars(self).items()}


@dataclass(frozen=True)
class Beside:
    """Measurements besides those on texts, as in `compress evaluate`. tasks: names or files; questions: the most of
    each task, None for all; speed: measure it."""

    tasks: tuple[str, ...] = ()
    questions: int | None = None
    speed: bool = False

    def words(self, fingerprints: Sequence[str | None]) -> list[str]:
        """A word for each measurement, equal for equal content. fingerprints: of the tasks; None for a task without
        one, which is named instead."""
        found = [
            f"task {content or f'{name}, questions {self.questions}'}"
            for name, content in zip(self.tasks, fingerprints, strict=True)
        ]
        return [*found, "speed"] if self.speed else found


NOTHING = Beside()


def in_rows(text: Text | None) -> bool:
    """True for rows of token ids, whose length is fixed."""
    return isinstance(text, Tensor) or str(text).endswith(TOKEN_FORMATS)


def _content(value: Any) -> Any:
    """The hash of token ids and of a file's content, in a folder of every file's; any other value as it is."""
    if isinstance(value, Tensor):
        return checksum(value)
    if isinstance(value, str | Path) and Path(value).is_file():
        return hashlib.sha256(Path(value).read_bytes()).hexdigest()
    if isinstance(value, str | Path) and Path(value).is_dir():
        return {str(path.relative_to(value)): content_of(path) for path in Path(value).rglob("*") if path.is_file()}
    return str(value) if isinstance(value, Path) else value
