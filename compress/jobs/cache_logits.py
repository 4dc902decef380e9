"""A teacher is asked once, and what it says is kept for every training that follows."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compress.base.collectives import Comm
from compress.base.device import find_device
from compress.base.errors import InputError
from compress.base.progress import Reporter, Silent, tell
from compress.checkpoint.read.pretrained import read_config
from compress.checkpoint.read.source import find_source
from compress.data.teacher_file import holds_cached, write_cached
from compress.jobs.calibration_data import training_rows
from compress.jobs.model_source import FoundModel, fingerprint_of, mesh_shape
from compress.jobs.request import Calibration, Request
from compress.jobs.teachers import Teachers
from compress.model.calls import evaluating
from compress.train.inputs.samples import Rows, inputs_of, micro_batches
from compress.train.inputs.teacher_predictions import TopKRows
from compress.train.losses.options import CACHED, ORIGINAL
from compress.train.losses.top_k import TopK, top_k
from compress.train.objective.objective import predicting

TOP_K = 64  # what is left out of a distribution is then a percent or two of a large vocabulary's mass


@dataclass(frozen=True)
class Cached:
    """Figures of a cache that was written. mass: probability of the top k tokens together, the mean over all tokens."""

    output: Path
    samples: int
    tokens: int
    top_k: int
    mass: float


def cache_logits(
    teacher: str | Path,
    output: str | Path,
    training: Calibration,
    *,
    top_k: int = TOP_K,
    temperature: float = 1.0,
    length: int | None = None,
    bos: str | None = None,
    batch_size: int = 8,
    device: str | torch.device | None = None,
    fsdp: bool = False,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    reporter: Reporter | None = None,
) -> Cached:
    """Write what a teacher says of data, to be given to training as its teacher.

    output: a file that ends in .safetensors; one that is there is replaced if it holds cached logits, and any with
    `overwrite`. training, length, bos: as in `quantize`. top_k: 1 to the
    vocabulary, tokens whose log-probabilities are kept. temperature: of the training that is to come. All of it is held
    in memory: 8 bytes for each token and each of its k. Raises InputError for what cannot be asked or written.
    """
    path = Path(output)
    if path.suffix != CACHED:
        raise InputError(f"{str(output)!r}; a file of cached logits ends in {CACHED}")
    if path.is_dir() or not path.parent.is_dir():
        raise InputError(f"{str(output)!r} cannot be written; give a file in a directory that exists")
    if path.exists() and not overwrite and not holds_cached(path):
        raise InputError(f"{str(output)!r} exists and holds no cached logits; give another file, or --overwrite")
    if not temperature > 0:
        raise InputError(f"temperature {temperature}; allowed: above 0")
    request = Request(model=teacher, training=training, length=length, batch_size=batch_size, bos=bos)
    request.check()
    source = find_source(str(teacher), trust_remote_code)
    if fsdp:
        mesh_shape(fsdp)
    rows = training_rows(request, FoundModel(None, source, read_config(source), None))
    comm = Comm()
    known = fingerprint_of(source, comm)
    asked = Teachers(source, None, find_device(device), fsdp, trust_remote_code).model(ORIGINAL)
    said = _ask(asked, rows, top_k, temperature, batch_size, comm, reporter or Silent())
    if comm.rank == 0:
        write_cached(path, said, known, rows)
    comm.barrier()
    mass = float(said.log_probs_NTk.exp().sum(-1).mean())
    return Cached(path, len(rows), said.log_probs_NTk[..., 0].numel(), top_k, mass)


@torch.no_grad()
def _ask(
    teacher: nn.Module, rows: Rows, k: int, temperature: float, batch_size: int, comm: Comm, reporter: Reporter
) -> TopKRows:
    """The teacher's top k of all samples, in their order, on every rank."""
    device = next(teacher.parameters()).device
    parts: list[TopK] = []
    places: list[int] = []
    batches = list(micro_batches(range(len(rows)), batch_size, comm))
    vocabulary = 0
    with evaluating(teacher):
        ids = rows.tensors.get("input_ids")
        tell(reporter, "tokens", 0 if ids is None else ids.numel() / len(batches))
        for done, (part, counting) in enumerate(batches):
            reporter.step(done, len(batches), f"batch {done}" if done else "")
            batch = rows.take(part)
            logits: Any = getattr(teacher(**inputs_of(batch, device)), "logits", None)
            if logits is None:
                raise InputError(f"{type(teacher).__name__} returns no logits, of which nothing can be kept")
            vocabulary = logits.shape[-1]
            kept = top_k(predicting(teacher, logits, batch), k, temperature)
            own = part if counting else []
            parts.append(TopK(kept.log_probs_Tk[: len(own)], kept.indices_Tk[: len(own)], temperature))
            places += own
        reporter.step(len(batches), len(batches), "the last batch")
        tell(reporter, "tokens", 0)
    lengths = comm.gather_objects(places)
    order = torch.tensor([place for each in lengths for place in each]).argsort()

    def gather(name: str, dtype: torch.dtype) -> Tensor:
        mine = torch.cat([getattr(part, name) for part in parts]).to(dtype)
        return comm.gather_rows(mine, [len(each) for each in lengths]).cpu()[order]

    return TopKRows(gather("log_probs_Tk", torch.float32), gather("indices_Tk", torch.int32), temperature, vocabulary)
