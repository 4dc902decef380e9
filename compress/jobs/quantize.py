"""`quantize`: from a model and passes to a compressed model, a checkpoint, or both."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.base.collectives import Comm
from compress.base.errors import InputError
from compress.base.lost_ranks import watching
from compress.base.progress import Reporter, Silent
from compress.checkpoint.write.directory import Directory, claim, is_checkpoint
from compress.checkpoint.write.manifest import read_record, restore_run
from compress.jobs.job import Result
from compress.jobs.prepare import prepare
from compress.jobs.request import Calibration, Request
from compress.kernels.spill import spilling
from compress.passes.protocol.base import Pass


@torch.inference_mode(False)  # where it is on, no weight can be changed
def quantize(
    model: nn.Module | str | Path,
    passes: Pass | Sequence[Pass],
    *,
    calibration: Calibration | None = None,
    training: Calibration | None = None,
    output: str | Path | None = None,
    ignore: Sequence[str] = (),
    samples: int | None = None,
    length: int | None = None,
    bos: str | None = None,
    batch_size: int = 8,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    resume: bool = False,
    overwrite: bool = False,
    verify: bool | None = None,
    store: str | None = None,
    shard_size: int | str | None = None,
    fsdp: bool | str = False,
    one_block: bool = False,
    convolutions: bool | None = None,
    experts: bool = False,
    drop_zeros: bool = False,
    restore: bool = True,
    keep_codes: bool = False,
    spill: str | Path | None = None,
    trust_remote_code: bool = False,
    reporter: Reporter | None = None,
) -> Result:
    """Compress a model with one or more passes.

    model: a directory, hub id or 'demo', or a model in memory (changed in place). calibration: text ('demo', a file, a
    datasets id), token ids [samples, length], a .pt/.npy file of them, a list of dictionaries of model inputs, or
    'self': what the model itself writes (`compress.jobs.own_text`). training: data of passes that train, all of it, in
    the same forms (with `labels` for a task other than the next token); by default the calibration data. output: a
    directory to write (None: only return the model). ignore: shell-style or re: patterns of layers to skip. samples,
    length: windows of text (128 of the model's context, at most 2048). bos: BOS before every "row" of text, before
    every "window", or "none" (by default as its tokenizer does). device: where blocks are worked on (a CUDA device if
    there is one). dtype: of that work (the model's own on a GPU, float32 on a CPU). verify: reload the output in a
    fresh process and compare (by default for models up to 2 GiB). store: "2:4" writes layers that are pruned so without
    their zeros, for `load` alone, and fails at the first that is not. shard_size: largest weight file, bytes or words
    like "2GB" (by default 5 GB). fsdp: shard the model over the ranks of the initialised process group; "2x8": two
    replicas, each sharded over 8 ranks. one_block: run the model as a whole; also where its blocks are no chain.
    convolutions: whether they are layers, too (by default only in CNNs). experts: each of fused experts is a layer,
    too, in memory (see `split_experts`). drop_zeros: let go of the zeros of a model that comes pruned (a layer of which
    more than 5 % are exactly zero, or as many as its compress.json says); by default they stay, and passes that keep
    none are refused. spill: a folder on a disk for CPU tensors of 4 MiB or more (`kernels.spill`). trust_remote_code:
    run Python code that comes with a model given by name. restore: undo all changes of a model in memory after an
    exception, which takes the memory of its blocks; False: the exception names the changed blocks. keep_codes: the
    result has all codes, for `export_onnx`.

    Raises InputError before any work for input that cannot work, CompressError for work that failed or did nothing.
    """
    request, comm, reporter = Request.of(locals()), Comm(), reporter or Silent()
    if (done := find_completed(request, comm, reporter)) is not None:
        return done
    how: dict[str, Any] = {"resume": resume, "overwrite": overwrite, "shard_bytes": request.shard_bytes}
    with spilling(spill), claim(output, comm, model=request.folder, **how) as place, watching(comm):
        return prepare(request, place, comm, reporter).finish()


def find_completed(request: Request, comm: Comm, reporter: Reporter) -> Result | None:
    """The result of the run of a request that is to be resumed, from its record; None where it is not complete or may
    be replaced, of a model in memory, and with several processes. Raises InputError where another run made the
    output."""
    wanted = request.resume and not request.overwrite and request.output is not None
    if not wanted or comm.world > 1 or isinstance(request.model, nn.Module):
        return None
    assert request.output is not None
    output = Path(request.output).absolute()
    if not is_checkpoint(output):
        return None
    record = read_record(output)
    identity = json.loads(json.dumps(prepare(replace(request, output=None), None, comm, Silent()).identity))
    if "bytes" not in record or record["identity"] != identity:
        other = ", ".join(key for key in identity if record["identity"].get(key) != identity[key])
        raise InputError(
            f"{request.output} exists, complete, of a run that differs ({other or 'its record'}); choose another "
            "output or pass --overwrite"
        )
    Directory(output).tidy()
    reporter.note(f"{request.output} is complete: nothing of it is left to do")
    return Result(restore_run(record), output=output, verification=record["verification"])
