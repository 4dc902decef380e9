"""`measure_sensitivity`: measures the loss of each layer of a model under each candidate, and caches the result.

The cache directory is $COMPRESS_CACHE_DIR/sensitivity. The key is a hash of the model, both texts, the candidates and
everything else that the result depends on.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from compress.api.job import Job
from compress.api.prepare import prepare
from compress.api.request import Calibration, Data, Delivery, Request, Work
from compress.api.request import Extent as Asked
from compress.checkpoint.files import fingerprint
from compress.checkpoint.read.pretrained import tokenizer_of
from compress.checkpoint.sensitivity import (
    FORMAT,
    Sensitivity,
    Unit,
    folder,
    header_bytes,
    keep_sensitivity,
    kept_sensitivity,
)
from compress.checkpoint.shown import shown
from compress.data.text import Tokens, batches_of, load_tokens
from compress.errors import InputError, one_of
from compress.model.buffers import stored_buffers
from compress.model.calls import evaluating
from compress.passes.gptq import GPTQ
from compress.passes.protocol.where import only
from compress.run.walk.held_out import divergence_between
from compress.search.candidate import Candidate, described
from compress.search.swaps import Extent, measured
from compress.system.comm import Comm
from compress.system.progress import Reporter, Silent
from compress.system.version import VERSION

Score = Literal["kl", "loss"]
# A pass that suits any layer; it stands in for the candidates while layers are chosen and data are read.
PROBE = GPTQ(scheme="w8a16", group_size=-1, drift=0.0)
HELD_OUT = 16  # windows
LEAST = 4  # windows of calibration data for each held-out window, at least
# Bytes of a weight file besides its tensors and their header entries: header length, metadata and padding.
HEADER = 64


@dataclass(frozen=True)
class Measured:
    """A table of sensitivities and the held-out rows of its KLs. rows: None for a model that predicts no next token."""

    table: Sensitivity
    rows: Tokens | None


@torch.inference_mode(False)
def measure_sensitivity(
    model: nn.Module | str | Path,
    candidates: Sequence[Candidate],
    *,
    calibration: Calibration,
    text: str | Tensor | None = None,
    score: Score = "kl",
    fused: bool = True,
    samples: int | None = None,
    length: int | None = None,
    batch_size: int = 8,
    ignore: Sequence[str] = (),
    device: str | torch.device | None = None,
    cached: bool = True,
    trust_remote_code: bool = False,
    reporter: Reporter | None = None,
) -> Measured:
    """Apply every candidate to every layer of the original model, and measure the loss.

    calibration, samples, length, batch_size, ignore, device: as in `quantize`. text: held-out text, or token ids
    [samples, length], of which up to 16 windows are used. By default the last windows of the calibration data are held
    out, at most 16 and at most a fifth; no candidate sees them. score: `kl` measures, for each unit and candidate, the
    KL (nats per token) of a model with that unit replaced; `loss` measures the error of each layer's output and the KL
    of uniform models only. fused: layers that read one tensor get the same candidate. cached: reuse the result of an
    earlier call with equal inputs.

    Raises InputError for candidates that suit no layer, for a model without a next token and score="kl", and for more
    than one process.
    """
    one_of("score", score, get_args(Score))
    described(candidates)  # refuses two of one name
    reporter = reporter or Silent()
    data = Data(calibration, samples, length, batch_size)
    delivery = Delivery(None, False, False, None)
    work = Work(device, None, False, False)
    job = _job(Request(model, (PROBE,), data, Asked(ignore, False, None), delivery, work, trust_remote_code), reporter)
    candidates, words = _fitted(candidates, job)
    rows = _held_out(job, text, length, batch_size)
    if rows is None and score == "kl":
        raise InputError(f"{type(job.model).__name__} predicts no next token, so that there is no KL; give score=loss")
    about = {
        "model": job.identity["model"],
        "calibration": job.identity["calibration"] if job.tokens is None else job.tokens.fingerprint(),
        "held_out": None if rows is None else rows.fingerprint(),
        "settings": [FORMAT, batch_size, list(ignore), score, fused, job.identity["compute_dtype"], VERSION],
        "candidates": words,
    }
    path = folder() / f"{fingerprint(about)}.json"
    if cached and (found := kept_sensitivity(path)) is not None:
        reporter.note(f"sensitivities as measured before ({path})")
        return Measured(found, rows)
    held_out = [] if rows is None else batches_of(rows.ids, batch_size)
    found = _measured(job, candidates, words, Extent(held_out, score == "kl", fused), rows)
    if rows is not None:
        found = replace(found, run_kl=_run_kl(job, candidates, found, rows))
    keep_sensitivity(path, found)
    return Measured(found, rows)


def _job(request: Request, reporter: Reporter) -> Job:
    """Prepares a request: opens the model, reads the calibration data and plans the layers. Raises InputError."""
    comm = Comm()
    if comm.active:
        raise InputError("sensitivities are measured by one process; start it without torchrun")
    request.check()
    job = prepare(request, None, comm, Silent())
    job.reporter = reporter
    return job


def _measured(
    job: Job,
    candidates: Sequence[Candidate],
    words: dict[str, list[dict[str, Any]]],
    extent: Extent,
    rows: Tokens | None,
) -> Sensitivity:
    """Measure all candidates in one walk over the model. words: the candidates as recipes hold them."""
    with evaluating(job.model):
        made = job.walk(partial(measured, candidates=candidates, extent=extent))
    if not made.units:
        why = next(iter(made.left_out.values()), "there are none")
        raise InputError(f"no candidate suits any layer ({why}); give others")
    return Sensitivity(
        model={"name": _name(job), "fingerprint": job.identity["model"]},
        calibration={} if job.tokens is None else job.tokens.described(),
        held_out=None if rows is None else rows.described(),
        candidates=words,
        units=made.units,
        uniform_kl=made.uniform_kl,
        other_bytes=_other_bytes(job.model, made.units),
        left_out=made.left_out,
        notes=job.record.notes,
    )


def _fitted(candidates: Sequence[Candidate], job: Job) -> tuple[list[Candidate], dict[str, list[dict[str, Any]]]]:
    """(Candidates with options settled for all treated layers together, the same as recipes hold them). Raises
    InputError where none suits any layer."""
    treated = job.plan.treated
    layers = [layer for of_block in job.plan.layers.values() for layer in of_block if layer.name in treated]
    widths = {layer.shape[1] for layer in layers}
    found = [Candidate(c.name, tuple(p.fitted(widths) for p in c.passes)) for c in candidates]
    whys = [c.suits(layer.name, layer.shape, layer.has_format) for c in found for layer in layers]
    if all(whys):
        why = next(iter(whys), "there are none")
        raise InputError(f"no candidate suits any layer ({why}); give others")
    return found, described(found)


def _run_kl(job: Job, candidates: Sequence[Candidate], found: Sensitivity, rows: Tokens) -> dict[str, float]:
    """{candidate: KL} of one uniform model as `quantize` makes it, with compensation for earlier layers. The candidate
    is the one of median KL among those that use calibration data and suit every unit. Empty where there is none."""
    known = [c for c in candidates if found.uniform_kl.get(c.name) and any(p.needs() for p in c.passes)]
    known = [c for c in known if all(c.name in unit.tried for unit in found.units)]
    if not known:
        return {}
    middle = sorted(known, key=lambda c: -found.uniform_kl[c.name])[(len(known) - 1) // 2]
    whole = deepcopy(job.model)
    data = Data(_shown(job), None, None, job.request.data.batch_size)
    work = replace(job.request.work, device=job.residency.device)
    layers = [escape(layer) for unit in found.units for layer in unit.layers]
    passes = tuple(only(p, *layers) for p in middle.passes)
    request = replace(job.request, model=whole, passes=passes, data=data, work=work)
    made = prepare(request, None, job.comm, Silent()).run().model
    assert made is not None
    with evaluating(made), evaluating(job.model):
        return {middle.name: divergence_between(job.model, made, batches_of(rows.ids, data.batch_size))}


def _shown(job: Job) -> Calibration:
    """The calibration data of a job, as `quantize` takes them."""
    return list(job.batches) if job.tokens is None else job.tokens.ids


def _name(job: Job) -> str:
    return type(job.model).__name__ if job.source is None else shown(job.source.name)


def _held_out(job: Job, text: str | Tensor | None, length: int | None, batch_size: int) -> Tokens | None:
    """Rows that no candidate sees: windows of `text`, or without it the last calibration windows, which are removed
    from the job. None for a model that predicts no next token. Raises InputError."""
    config = getattr(job.model, "config", None)
    if not hasattr(job.model, "generate") or getattr(config, "is_encoder_decoder", False):
        if text is not None:
            raise InputError(f"{type(job.model).__name__} predicts no next token; leave the held-out text out")
        return None
    if text is not None:
        tokenizer = partial(tokenizer_of, job.source)
        return load_tokens(text, tokenizer, config, what="held-out", length=length, samples=_most(text))
    if job.tokens is None:
        raise InputError("calibration is ready-made batches; give held-out text, too: text or token ids")
    ids = job.tokens.ids
    count = min(HELD_OUT, len(ids) // (LEAST + 1))
    if not count:
        raise InputError(
            f"calibration has {len(ids)} samples, of which none can be held out; give {LEAST + 1} or more, or "
            "held-out text"
        )
    job.batches = batches_of(ids[:-count], batch_size)
    job.tokens = Tokens(ids[:-count], job.tokens.source)
    return Tokens(ids[-count:], job.tokens.source)


def _most(text: str | Tensor) -> int:
    return min(HELD_OUT, len(text)) if isinstance(text, Tensor) else HELD_OUT


def _other_bytes(model: nn.Module, units: Sequence[Unit]) -> int:
    """Bytes of the checkpoint's weight files without the tensors of its units."""
    inside = {f"{layer}.weight" for unit in units for layer in unit.layers}
    rest = {name: p for name, p in model.named_parameters() if name not in inside} | dict(stored_buffers(model))
    headers = sum(header_bytes(name, tensor.shape) for name, tensor in rest.items())
    return HEADER + headers + sum(t.numel() * t.element_size() for t in rest.values())
