"""`fit`: from a size or a loss that is asked for to a checkpoint, the recipe that makes it again, and the proof.

    rotate the model, if that helps -> measure layers (Fisher-weighted losses) and the embedding -> choose -> quantize,
    evaluate -> correct, again -> train, if asked to -> the uniform model of about as many bytes -> paired difference
    -> OUT

    OUT                      the checkpoint
    OUT.fit/recipe.yaml      for `compress quantize --recipe`
    OUT.fit/fit.json, .md    target, front that was searched, choice, intervals, a paragraph in words
    OUT.fit/report.html      all recipes that were run, beside each other (`search.sweep`)

Layers are measured with GPTQ's sweep alone and trellis codes of fewer states, which rank schemes as its searches do and
take a fraction of their time; recipes are run with all of it. A run that was stopped goes on: measurements are cached,
and finished recipes are kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from compress.base.collectives import Comm
from compress.base.errors import InputError
from compress.base.progress import Reporter, Silent
from compress.checkpoint.ownership import check_replaceable
from compress.checkpoint.portable_names import shown
from compress.checkpoint.read.pretrained import tokenizer_of
from compress.checkpoint.write.directory import Directory, claimed
from compress.data.text import load_tokens
from compress.evaluation.document import Evaluation
from compress.jobs.calibration_data import calibration_data
from compress.jobs.model_source import found_model
from compress.jobs.request import Request
from compress.passes.train import recovery
from compress.search.fitting.choice import FitChoice
from compress.search.fitting.deadline import Deadline
from compress.search.fitting.proof import FitProof
from compress.search.fitting.recipe_space import Offered, Wishes, offered
from compress.search.fitting.recovery import recovered
from compress.search.fitting.request import FitAsked, FitTexts
from compress.search.fitting.target import FitTarget, fit_target
from compress.search.fitting.work import Fitting, write_choice
from compress.search.texts import in_rows
from compress.search.trial import MODEL

HELD_OUT = 32  # windows, at most
LEAST = 4  # windows of calibration data for each held-out window, at least


@dataclass(frozen=True)
class FitResult:
    """The result of `fit`. output: the checkpoint; beside: the folder of proof and recipe. With recipe_only output is
    the recipe, and there is nothing else but the choice with its predicted KL."""

    output: Path
    choice: FitChoice
    beside: Path | None = None
    proof: FitProof | None = None
    evaluation: Evaluation | None = None


def fit(
    model: str | Path,
    *,
    size: str | None = None,
    bits: float | None = None,
    kl: float | None = None,
    task_loss: str | float | None = None,
    calibration: str | Tensor,
    output: str | Path,
    text: str | Tensor | None = None,
    recipe_only: bool = False,
    engine: str | None = None,
    method: str = "gptq",
    embeddings: bool = True,
    trellis: bool = True,
    rotate: bool = True,
    hours: float | None = None,
    recover: str | None = None,
    ignore: Sequence[str] = (),
    samples: int | None = None,
    length: int | None = None,
    bos: str | None = None,
    batch_size: int = 8,
    device: str | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    reporter: Reporter | None = None,
) -> FitResult:
    """Find the recipe that meets a target, run it, and measure what it cost on text that no weight was fitted to.

    One of: size, of all weight files, like 85MB, or of the layers, like 3.4bpw; bits, the same as a number; kl, nats
    per token; task_loss, the share by which the loss on held-out text may rise, like 0.01 or 1%. A size or bits are met
    with the least KL, a loss with the fewest bytes. calibration, ignore, samples, length, bos, batch_size, device: as
    in `quantize`. text: held-out text or token ids; by default the last fifth of the calibration data, up to 32
    windows, which is then kept from calibration. recipe_only: choose by predicted KL, and write the recipe to output, a
    .yaml file, without running it. engine: vllm or transformers: schemes that it runs. method: gptq, or k-quants: types
    of llama.cpp alone, without the parts that follow. embeddings: the token embedding may be compressed, too, for a
    size or a loss. trellis: layers may have trellis codes of 2 to 4 bits, which lose less than grids of as many bits
    and take longer to decode. rotate: the model may be rotated, partly as it runs, where that lowers the KL of 3 bits
    by a fifth. Only `compress.load` reads a checkpoint with any of the three, and an engine gets none. hours: the most
    that the work may take; it leaves the best recipe so far. recover: a time like 30min, in which the recipe that was
    found is trained on calibration data, within hours; the result is taken if it is closer on held-out text.

    Raises InputError before any work: no or several targets, a size below any recipe's, too few hours for one recipe.
    """
    minutes = None if recover is None else recovery(recover).minutes
    target, watch = fit_target(size, bits, kl, task_loss), Deadline(hours)
    how: dict[str, Any] = {"samples": samples, "length": length, "bos": bos, "batch_size": batch_size}
    data = Request(model=model, calibration=calibration, **how, ignore=ignore)
    data.check()
    shared = {"device": device, "trust_remote_code": trust_remote_code}
    wishes = Wishes(method, embeddings, trellis, rotate)
    begun = partial(_begun, str(model), target, data, text, ignore, engine, wishes, shared, watch, reporter or Silent())
    if recipe_only:
        return _chosen(begun(path := _recipe_file(output, overwrite, hours, recover)), path)
    with claimed(output, Comm(), resume=False, overwrite=overwrite, model=Path(model)) as place:
        assert place is not None
        made = _carried_out(begun(place.output), place, minutes)
        place.take_name(overwrite)
    return made


def _begun(
    model: str,
    target: FitTarget,
    data: Request,
    text: str | Tensor | None,
    ignore: Sequence[str],
    engine: str | None,
    wishes: Wishes,
    shared: dict[str, Any],
    watch: Deadline,
    reporter: Reporter,
    output: Path,
) -> Fitting:
    """The work, with its texts read and what recipes may have settled. Raises InputError."""
    asked = FitAsked(model, target, _texts(model, data, text, shared), ignore, data.batch_size, shared)
    found = offered(model, ignore, engine, wishes, shared["trust_remote_code"])
    _check_reach(asked, found)
    return Fitting(asked, found, output.with_name(f"{output.name}.fit"), watch, reporter)


def _recipe_file(output: str | Path, overwrite: bool, hours: float | None, recover: str | None) -> Path:
    """The path of a recipe to write. Raises InputError for another file's, and for options of a recipe that is run."""
    if hours is not None or recover is not None:
        raise InputError("hours and recover are of a recipe that is run; leave them out, or recipe_only")
    path = Path(output)
    if path.suffix not in (".yaml", ".yml"):
        raise InputError(f"output {str(output)!r}; a recipe is a file that ends in .yaml")
    if not overwrite:
        check_replaceable(path, "give another file, or --overwrite")
    return path


def _chosen(work: Fitting, path: Path) -> FitResult:
    """Measure and choose, and write the recipe."""
    _measure(work, recipe_only=True)
    choice = work.choose()
    write_choice(work, choice, path)
    return FitResult(path, choice)


def _measure(work: Fitting, recipe_only: bool = False) -> None:
    """Say how long it takes, and measure everything that the choice depends on."""
    work.tell_time(recipe_only)
    for note in work.offered.notes:
        work.note(note)
    _check_reach(work.asked, work.offered)  # without trellis codes, if these take too long
    work.choose_rotation()
    work.measure()


def _carried_out(work: Fitting, place: Directory, minutes: float | None) -> FitResult:
    """Measure, search, recover and prove; the checkpoint is left where it only needs its name."""
    _measure(work)
    chosen = work.search()
    if minutes is not None:
        chosen = recovered(work, chosen, minutes)
    proof = work.proof(chosen)
    (work.beside / chosen / MODEL).rename(place.model)
    work.leave(chosen, proof)
    return FitResult(place.output, work.choices[chosen], work.beside, proof, work.runs[chosen])


def _texts(model: str | Path, data: Request, text: str | Tensor | None, shared: dict[str, Any]) -> FitTexts:
    """Calibration data and held-out rows. Raises InputError for data that is not of tokens, or too little of it."""
    found = found_model(model, shared["device"], shared["trust_remote_code"])
    tokens = calibration_data(data, found, "fit").tokens
    if tokens is None:
        raise InputError("fit measures next tokens: give calibration text or token ids, not images or batches")
    windows = (len(tokens.ids), tokens.ids.shape[1])
    if text is not None:
        read = partial(tokenizer_of, found.source)
        most = min(HELD_OUT, len(text)) if isinstance(text, Tensor) else HELD_OUT
        held = load_tokens(
            text,
            read,
            found.config,
            what="held-out",
            length=data.length,
            samples=most,
            bos=None if in_rows(text) else data.bos,
        )
        how = {"samples": data.samples, "length": data.length, "bos": data.bos}
        assert isinstance(data.calibration, str | Tensor)
        return FitTexts(data.calibration, how, held.ids, held.source, windows)
    if tokens.mask is not None:
        raise InputError(f"{tokens.source} makes windows with padding, of which none are held out; give --text TEXT")
    count = min(HELD_OUT, len(tokens.ids) // (LEAST + 1))
    if count < 2:
        raise InputError(
            f"calibration has {len(tokens.ids)} windows, of which a fifth is held out: give {2 * (LEAST + 1)} or more, "
            "or --text TEXT"
        )
    seen, rows = tokens.ids[:-count], tokens.ids[-count:]
    return FitTexts(seen, {}, rows, f"{shown(tokens.source)}, held out", (len(seen), windows[1]))


def _check_reach(asked: FitAsked, found: Offered) -> None:
    """Raise InputError for a size or bits below those of the smallest recipe."""
    budget = asked.target.budget
    if budget is None:
        return
    tables = [] if budget.bytes is None else found.tables
    passes = [*found.schemes[0].passes, *(table for table, _ in tables[-1:])]
    least = asked.planned(passes)
    if budget.bytes is not None and least.saving.after > budget.bytes:
        raise InputError(f"size {budget}; the smallest recipe takes {least.saving.after:,} bytes: give that or more")
    if budget.bits_per_weight is not None and (least.bits_per_weight or 0.0) > budget.bits_per_weight:
        raise InputError(
            f"bits {budget.bits_per_weight:g}; the smallest recipe has {least.bits_per_weight:.4g}: give that or more"
        )
