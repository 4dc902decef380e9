"""What the recipes of a sweep are shown, and what is measured of them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from compress.checkpoint.files import checksum
from compress.data.text import TOKEN_FORMATS

Text = str | Path | Tensor


@dataclass(frozen=True)
class Texts:
    """Texts, token files or token ids [samples, length], and how much of each."""

    calibration: Text | None
    text: Text
    training: Text | None = None
    samples: int | None = None
    length: int | None = None
    text_samples: int | None = None
    text_length: int | None = None
    batch_size: int = 8

    @property
    def held_out(self) -> str | Tensor:
        """The held-out text as `evaluate` takes it."""
        return self.text if isinstance(self.text, Tensor) else str(self.text)

    @property
    def window(self) -> int | None:
        """Tokens per window of held-out text; rows of token ids are as long as they are."""
        return None if in_rows(self.text) else self.text_length

    def content(self) -> dict[str, Any]:
        """All of it by what it holds."""
        return {name: _content(value) for name, value in vars(self).items()}


@dataclass(frozen=True)
class Beside:
    """What is measured beside texts, as in `compress evaluate`: tasks, of each at most so many questions, and speed."""

    tasks: tuple[str, ...] = ()
    questions: int | None = None
    speed: bool = False

    def words(self, fingerprints: Sequence[str | None]) -> list[str]:
        """Each of it by its content. fingerprints: of the tasks, None where a task has none: its name must do."""
        found = [
            f"task {content or f'{name}, questions {self.questions}'}"
            for name, content in zip(self.tasks, fingerprints, strict=True)
        ]
        return [*found, "speed"] if self.speed else found


def in_rows(text: Text | None) -> bool:
    """Whether a text is rows of token ids, which have their length."""
    return isinstance(text, Tensor) or str(text).endswith(TOKEN_FORMATS)


def _content(value: Any) -> Any:
    """Token ids and files as hashes of what is in them; anything else as it is."""
    if isinstance(value, Tensor):
        return checksum(value)
    if isinstance(value, str | Path) and Path(value).is_file():
        return hashlib.sha256(Path(value).read_bytes()).hexdigest()
    return str(value) if isinstance(value, Path) else value
