"""A cache of the reference's last hidden states on a text, from which its head computes the same logits again.

Hidden states are a row of D numbers a token where log-probabilities are V: 50 times fewer for Llama. They are stored
unchanged, so the logits are those of the reference bit for bit, multiplied in chunks of the same size. A text of N
predicted tokens has two files in the cache directory (`compress.kernels.cache_folder`), under `references`:

    KEY.states   [N, D] in the dtype of the arithmetic, no header
    KEY.json     {"format", "shape", "dtype", "sha256", "overflow"}; written last: without it, the states are not there

KEY is a hash of everything that the states depend on: the weights and the configuration (`Source.fingerprint`), the
dtype and the kind of device, the token ids and windows, the versions of torch and transformers. Damaged files, and
those that another user may have written, are computed anew, with a note. The folder can be deleted at any time: all of
it can be computed again.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor

from compress.base.errors import CheckpointError
from compress.base.regular_files import parse_json, special
from compress.base.schema import built, fits
from compress.checkpoint.files import fingerprint, write_json
from compress.checkpoint.read.source import Source
from compress.checkpoint.scratch import Scratch
from compress.evaluation.quality.overflow import Largest
from compress.evaluation.quality.predictor import Predictions, Predictor, logits_by
from compress.evaluation.quality.windows import Batch, Windows
from compress.kernels.cache_folder import cache_directory
from compress.kernels.private_folders import why_not_believed
from compress.train.objective.heads import OutputHead

FORMAT = 2
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
READ_BYTES = 2**24
Note = Callable[[str], None]


class KeptMetadata(TypedDict):
    """The content of KEY.json."""

    format: int
    shape: tuple[int, int]
    dtype: str
    sha256: str
    overflow: Largest


def folder() -> Path:
    """The folder of all cached references."""
    return cache_directory() / "references"


def model_key(source: Source, parameter: Tensor, *libraries: str) -> dict[str, Any]:
    """The entries of a cache key on which all that a model says depends. parameter: one of the model as it is asked.
    libraries: besides torch and transformers."""
    return {
        "model": source.fingerprint(),
        "dtype": str(parameter.dtype),
        "device": parameter.device.type,
        "versions": {name: version(name) for name in ("torch", "transformers", *libraries)},
    }


def place_of(source: Source, asked: Predictor, windows: Windows) -> Path:
    """The path KEY.json of this model's states on these windows."""
    about = model_key(source, next(asked.network.parameters()))
    key = {**about, "text": windows.sha256(), "format": FORMAT}
    return folder() / f"{fingerprint(key)}.json"


class CachedStates:
    """Replays cached states. Raises CheckpointError where they are damaged."""

    def __init__(self, place: Path, windows: Windows, head: OutputHead) -> None:
        about: KeptMetadata = parse_json(place)
        fits(about, KeptMetadata, place)
        dtype = DTYPES.get(about["dtype"])
        states = place.with_suffix(".states")
        if dtype is None or special(states) is not None or not states.exists():
            raise CheckpointError(f"{states} is not there, or not what {place} says")
        tokens, width = about["shape"]
        size = tokens * width * dtype.itemsize
        if about["format"] != FORMAT or tokens != windows.predicted or states.stat().st_size != size:
            raise CheckpointError(f"{states} is not as long as {place} says")
        if _sha256(states) != about["sha256"]:
            raise CheckpointError(f"{states} is not what was written")
        self.bytes = np.memmap(states, np.uint8, "r", shape=(tokens, width * dtype.itemsize))
        self.dtype, self.head = dtype, head
        self.overflow: Largest = built(about["overflow"], Largest)

    def states(self, batch: Batch) -> Tensor:
        """[P, D] the states of the tokens of a batch."""
        count = int(batch.scored_BL.sum())
        return torch.from_numpy(np.array(self.bytes[batch.first : batch.first + count])).view(self.dtype)

    @torch.no_grad()
    def logits(self, states_CD: Tensor) -> Tensor:
        """[C, V] logits by the reference's head."""
        return logits_by(self.head, states_CD)


def read_states(place: Path, windows: Windows, head: OutputHead, note: Note) -> CachedStates | None:
    """The cached states of a reference; None where there are none, or with a note where they are damaged."""
    if not place.exists():
        return None
    try:
        if (why := not_believed(place, place.with_suffix(".states"))) is not None:
            note(f"what was kept of the reference is made anew: {why}")
            return None
        return CachedStates(place, windows, head)
    except (CheckpointError, OSError) as error:
        note(f"what was kept of the reference is damaged and made anew ({error})")
        return None


def not_believed(*places: Path) -> str | None:
    """The reason why other users may have written one of these files; None when they cannot have."""
    return next((why for place in places if place.exists() and (why := why_not_believed(place)) is not None), None)


class StatesWriter:
    """Passes on a model's states and writes them to the cache, with what is seen of its overflow meanwhile. A disk
    error is noted, and ends only the writing."""

    def __init__(self, asked: Predictor, place: Path, overflow: Largest, note: Note) -> None:
        self.asked, self.place, self.overflow, self.note = asked, place, overflow, note
        self.scratch: Scratch | None = None
        self.digest, self.rows, self.width, self.dtype = hashlib.sha256(), 0, 0, ""
        self.writing = True

    def states(self, batch: Batch) -> Tensor:
        """The model's states of a batch."""
        states = self.asked.states(batch)
        self.width, self.dtype = states.shape[1], str(states.dtype).removeprefix("torch.")
        self.writing = self.writing and self.dtype in DTYPES
        if self.writing:
            content = states.contiguous().cpu().view(torch.uint8).numpy().tobytes()
            self.digest.update(content)
            self.rows += len(states)
            with self.reported():
                if self.scratch is None:
                    self.place.parent.mkdir(parents=True, exist_ok=True)
                    self.scratch = Scratch(self.place.with_suffix(".states"))
                self.scratch.file.write(content)
        return states

    def logits(self, states_CD: Tensor) -> Tensor:
        """The model's logits."""
        return self.asked.logits(states_CD)

    def finish(self) -> None:
        """Move the written file to its final name, and write KEY.json."""
        if not self.writing or self.scratch is None:
            return
        about = {
            "format": FORMAT,
            "shape": [self.rows, self.width],
            "dtype": self.dtype,
            "sha256": self.digest.hexdigest(),
            "overflow": asdict(self.overflow),
        }
        with self.reported():
            self.scratch.become()
            size = self.scratch.path.stat().st_size
            write_json(self.place, about)
            self.note(f"predictions of the original are cached in {self.place.parent} ({size / 2**20:.1f} MiB)")

    @contextmanager
    def reported(self) -> Iterator[None]:
        """Turn a disk error inside a context into a note, after which no more is written."""
        try:
            yield
        except OSError as error:
            self.writing = False
            self.note(f"predictions of the original are not cached in {self.place.parent}: {error.strerror}")


@contextmanager
def keep_states(asked: Predictor, place: Path, overflow: Largest, note: Note) -> Iterator[Predictions]:
    """A model whose states are cached, once everything inside the context has succeeded."""
    says = StatesWriter(asked, place, overflow, note)
    try:
        yield says
        says.finish()
    finally:
        if says.scratch is not None:
            with suppress(OSError):
                says.scratch.drop()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(READ_BYTES):
            digest.update(part)
    return digest.hexdigest()
