"""What a run needs that trains."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from compress.train.offline import TopKRows
from compress.train.rows import Rows


@dataclass(frozen=True)
class Lessons:
    """What a run needs that trains. rows: all samples, the same on every rank. micro: how many go through at once.
    teacher: the model of that name, ready to be called, or what a file of that name holds of one. place: where
    checkpoints are (None: nowhere)."""

    rows: Rows
    micro: int
    teacher: Callable[[str], nn.Module | TopKRows]
    place: Path | None
    resume: bool
