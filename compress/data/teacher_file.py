"""Files of a teacher's predictions: log-probabilities of its k most probable tokens at every trained position.

One .safetensors file holds `log_probs` float32 [N, T, k] and `indices` int32 [N, T, k], for the N samples of a training
set and the T positions of each that have a next token. Its metadata holds the checksums of the teacher, of the training
set and of these two tensors.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from compress.base.errors import CheckpointError, InputError, first_line
from compress.base.regular_files import regular
from compress.base.schema import misfits
from compress.checkpoint.files import checksum, fingerprint, write_whole
from compress.checkpoint.read.source import path_of
from compress.train.inputs.samples import Rows
from compress.train.inputs.teacher_predictions import TopKRows
from compress.train.losses.options import LossOptions

ENTRY, VERSION = "compress.cached_logits", 1
ROUNDING = 1e-3  # how far above 0 rounding may put the logarithm of a probability of 1
HOW = "write it anew with compress cache-logits TEACHER"


class TeacherMetadata(TypedDict):
    """The metadata. teacher, training, values: checksums."""

    version: int
    teacher: str
    training: str
    values: dict[str, str]
    temperature: float
    vocabulary: int


def checksum_of(rows: Rows) -> str:
    """The checksum of a training set, over the tensors of its rows."""
    return fingerprint({name: checksum(tensor) for name, tensor in rows.tensors.items()})


def holds_cached(path: Path) -> bool:
    """True for a file whose metadata say that it holds cached logits."""
    try:
        with safe_open(path, framework="pt") as file:
            return ENTRY in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False


def write_cached(path: Path, said: TopKRows, teacher: str, rows: Rows) -> None:
    """Write a teacher's predictions of a training set. teacher: its checksum. Raises OSError."""
    tensors = {"log_probs": said.log_probs_NTk.contiguous(), "indices": said.indices_NTk.contiguous()}
    about = {
        "version": VERSION,
        "teacher": teacher,
        "training": checksum_of(rows),
        "values": {name: checksum(tensor) for name, tensor in tensors.items()},
        "temperature": said.temperature,
        "vocabulary": said.vocabulary,
    }
    write_whole(path, save(tensors, {ENTRY: json.dumps(about)}))


def read_cached(name: str, rows: Rows, options: LossOptions) -> TopKRows:
    """A teacher's predictions of a training set. Raises CheckpointError for a file that is damaged or of another kind,
    InputError for one that does not exist or was made of other data or at another temperature."""
    path = regular(path_of(name, "teacher"), "teacher")
    if not path.is_file():
        raise InputError(f"teacher file {name!r} does not exist; {HOW} {name}")
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get(ENTRY, "null"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no mapping
    except (SafetensorError, ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{name} cannot be read ({first_line(error)}); {HOW}") from None
    _check(name, about, tensors)
    if about["training"] != checksum_of(rows):
        raise InputError(
            f"{name} holds what a teacher said of other data than is trained on; give the same "
            f"--training and --length, or {HOW}"
        )
    if options.temperature != about["temperature"] and options.tail == "bucket":
        raise InputError(
            f"{name} was made at temperature {about['temperature']:g}, and temperature {options.temperature:g} is "
            "asked for; give the same, or tail=conditional"
        )
    if len(tensors["indices"]) != len(rows):
        raise CheckpointError(
            f"{name} is damaged (of {len(tensors['indices'])} samples; {len(rows)} are trained on); {HOW}"
        )
    return TopKRows(tensors["log_probs"], tensors["indices"], about["temperature"], about["vocabulary"])


def _check(name: str, about: Any, tensors: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError for a file of another kind or version, and for content that is not what was written."""
    wanted = {"log_probs": torch.float32, "indices": torch.int32}
    if not isinstance(about, dict) or {key: t.dtype for key, t in tensors.items()} != wanted:
        raise CheckpointError(f"{name} holds no cached logits; {HOW}")
    if about.get("version") != VERSION:
        raise CheckpointError(f"{name} is of version {about.get('version')!r}; this release reads {VERSION}: {HOW}")
    if (misfit := next(misfits(about, TeacherMetadata), None)) is not None:
        raise CheckpointError(f"{name} is damaged ({misfit}); {HOW}")
    if about["values"] != {key: checksum(tensor) for key, tensor in tensors.items()}:
        raise CheckpointError(f"{name} is damaged (its checksum differs); {HOW}")
    if (why := _nonsense(about, tensors["log_probs"], tensors["indices"])) is not None:
        raise CheckpointError(f"{name} is damaged ({why}); {HOW}")


def _nonsense(about: Mapping[str, Any], log_probs_NTk: Tensor, indices_NTk: Tensor) -> str | None:
    """The reason why values cannot be a teacher's predictions; None where they can."""
    if log_probs_NTk.ndim not in (2, 3) or log_probs_NTk.shape != indices_NTk.shape or 0 in log_probs_NTk.shape:
        shapes = f"{list(log_probs_NTk.shape)} and {list(indices_NTk.shape)}"
        return f"log_probs and indices have the shapes {shapes}; both must be [samples, tokens, k], or [samples, k]"
    if not (math.isfinite(about["temperature"]) and about["temperature"] > 0):
        return f"temperature is {about['temperature']}; it must be above 0"
    least, most = (int(end) for end in indices_NTk.aminmax())
    if least < 0 or most >= about["vocabulary"]:
        return f"indices are {least} to {most}; the vocabulary is 0 to {about['vocabulary'] - 1}"
    if not bool((log_probs_NTk <= ROUNDING).all()):
        return "log_probs hold what is no logarithm of a probability"
    return None
