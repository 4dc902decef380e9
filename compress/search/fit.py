"""`fit`: from a size or a loss that is asked for to a checkpoint, the recipe that makes it again, and the proof.

    rotate the model, if that helps -> measure layers (Fisher-weighted losses) and the embedding -> choose -> quantize,
    evaluate -> correct, again -> train, if asked to -> the uniform model of about as many bytes -> paired difference
    -> OUT

    OUT                      the checkpoint
    OUT.fit/recipe.yaml      for `compress quantize --recipe`
    OUT.fit/fit.json, .md    target, front that was searched, choice, intervals, a paragraph in words
    OUT.fit/report.html      all recipes that were run, beside each other (`search.sweep`); NAME/evaluation.json of each

Layers are measured with GPTQ's sweep alone and trellis codes of fewer states, which rank schemes as its searches do and
take a fraction of their time; recipes are run with all of it. A run that was stopped goes on: measurements are cached,
and finished recipes are kept.
"""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from compress.base.collectives import Comm
from compress.base.errors import InputError
from compress.base.progress import Reporter, Silent
from compress.base.shown import Shown, plain
from compress.checkpoint.files import write_json, write_whole
from compress.checkpoint.ownership import check_places, check_replaceable, marked_text
from compress.checkpoint.write.directory import Directory, claim
from compress.evaluation.document import Evaluation, flat
from compress.evaluation.json_document import as_document, summarize
from compress.evaluation.quality.gates import GateResult
from compress.evaluation.report.runs import EVALUATION, open_runs
from compress.jobs.request import Request
from compress.passes.protocol.recipe import describe
from compress.passes.train import Train, recovery
from compress.search.budget import write_recipe
from compress.search.fitting.choose import FitChoice
from compress.search.fitting.duration import Deadline, within_time
from compress.search.fitting.measure import Measured, measure
from compress.search.fitting.prove import FitProof, markdown_of, paragraph_of, prove
from compress.search.fitting.recipe_space import Wishes, check_reach, recipe_space
from compress.search.fitting.request import FitRequest, fit_target
from compress.search.fitting.runs import CHECKPOINTS, RecipeRuns, Remarks, choose, recover_loss, search
from compress.search.sweep import REPORTS, write_reports

RECIPE, PROOF, PAGE = "recipe.yaml", "fit.json", "fit.md"


@dataclass(frozen=True, repr=False)
class FitResult(Shown):
    """The result of `fit`. output: the checkpoint; beside: the folder of proof and recipe. With recipe_only output is
    the recipe, and there is nothing else but the choice with its predicted KL."""

    output: Path
    choice: FitChoice
    beside: Path | None = None
    proof: FitProof | None = None
    evaluation: Evaluation | None = None

    def _rows(self) -> list[dict[str, Any]]:
        """A row for each recipe that was run; with recipe_only for each layer, or layers of one kind, its scheme."""
        if self.proof is None:
            return [{"layers": name, "scheme": scheme} for name, scheme in self.choice.allocation.chosen.items()]
        sizes = ("name", "bytes", "bits_per_weight")
        return [{**{key: getattr(run, key) for key in sizes}, **flat(run.figures)} for run in self.proof.runs]

    def to_dict(self) -> dict[str, Any]:
        """The proof below a summary and the target as a gate, as in an evaluation; with recipe_only the choice."""
        if self.proof is not None:
            gate = GateResult(self.proof.target, self.proof.value, self.proof.limit, self.proof.met)
            measured = {} if self.evaluation is None else asdict(summarize(self.evaluation))
            summary = {**measured, "verdict": paragraph_of(self.proof)}
            return plain({"summary": summary, "gates": [asdict(gate)], **asdict(self.proof)})
        return {
            "recipe": str(self.output),
            "bytes": self.choice.bytes,
            "bits_per_weight": self.choice.allocation.bits_per_weight,
            "predicted_kl": self.choice.predicted_kl,
            "embedding": self.choice.table.name,
            "chosen": self.choice.allocation.chosen,
        }


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
    effort: str = "default",
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
    of llama.cpp alone, without the parts that follow. effort: best rounds for the loss, in two to three times the time.
    embeddings: the token embedding may be compressed, too. trellis: layers may have trellis codes of 2 to 4 bits,
    closer than grids and slower to decode. rotate: the model may be rotated, partly as it runs, where that lowers the
    KL of 3 bits by a fifth. Only `compress.load` reads these three. hours: the most that the work may take; it leaves
    the best recipe so far. recover: a time like 30min to train the recipe, taken if it is closer on held-out text.

    Raises InputError before any work: no or several targets, a size below any recipe's, too few hours for one recipe.
    """
    target, watch, remarks = fit_target(size, bits, kl, task_loss), Deadline(hours), Remarks(reporter or Silent())
    how: dict[str, Any] = {"samples": samples, "length": length, "bos": bos, "batch_size": batch_size, "ignore": ignore}
    how |= {"device": device, "trust_remote_code": trust_remote_code}
    wishes = Wishes(engine, method, effort, embeddings, trellis, rotate)
    training = None if recover is None else recovery(recover)
    request = FitRequest(Request(model=str(model), calibration=calibration, **how), target, text)
    request.asked.check()
    if recipe_only:
        path = _recipe_file(output, overwrite, hours, recover)
        return _choose(request, _measure(request, wishes, watch, remarks, runs=0), path)
    with claim(output, Comm(), resume=False, overwrite=overwrite, model=Path(model)) as place:
        assert place is not None
        beside = _proof_folder(place.output, overwrite)
        measured = _measure(request, wishes, watch, remarks, runs=2 if target.budget is not None else 3)
        return _run(RecipeRuns(request, measured, beside, watch, remarks), training, place, overwrite)


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


def _proof_folder(output: Path, overwrite: bool) -> Path:
    """The folder of recipe, proof and report. Raises InputError where it would replace what no `fit` wrote."""
    beside = output.with_name(f"{output.name}.fit")
    if beside.exists() and not beside.is_dir():
        raise InputError(f"{beside} is a file, where the proof is written; move it, or give another output")
    if not overwrite:
        check_places(beside / name for name in (RECIPE, PROOF, PAGE, *REPORTS))
    return beside


def _measure(request: FitRequest, wishes: Wishes, watch: Deadline, remarks: Remarks, runs: int) -> Measured:
    """Say how long it takes, for so many recipes that will be run, and measure what the choice depends on. Raises
    InputError for data that cannot be used, and a target that is out of reach."""
    _ = request.data
    space = recipe_space(request, wishes)
    check_reach(request, space)
    space, time = within_time(request, space, watch, runs)
    for note in (time, *space.notes):
        remarks.note(note)
    check_reach(request, space)  # without trellis codes, if these take too long
    measured = measure(request, space, remarks.reporter)
    for note in measured.notes:
        remarks.note(note)
    return measured


def _choose(request: FitRequest, measured: Measured, path: Path) -> FitResult:
    choice = choose(request, measured)
    _write_choice(request, measured, choice, path)
    return FitResult(path, choice)


def _run(runs: RecipeRuns, training: Train | None, place: Directory, overwrite: bool) -> FitResult:
    """Run recipes and prove the best, which becomes the output; recipe, proof and report are left beside it. training:
    tried behind the best, if any."""
    beside = runs.beside
    name = search(runs)
    if training is not None:
        name = recover_loss(runs, name, training.minutes)
    proof, chosen = prove(runs, name), runs.done[name]
    for name, run in runs.done.items():
        (beside / name).mkdir(exist_ok=True)
        write_json(beside / name / EVALUATION, as_document(run.evaluation))
    by_bytes = sorted(runs.done, key=lambda name: runs.done[name].evaluation.bytes or 0)
    write_reports(beside, open_runs([str(beside / name / EVALUATION) for name in by_bytes]))
    chosen.checkpoint.rename(place.model)
    _write_choice(runs.request, runs.measured, chosen.choice, beside / RECIPE)
    write_json(beside / PROOF, asdict(proof))
    write_whole(beside / PAGE, marked_text(markdown_of(proof)))
    shutil.rmtree(beside / CHECKPOINTS)
    place.take_name(overwrite)
    return FitResult(place.output, chosen.choice, beside, proof, chosen.evaluation)


def _write_choice(request: FitRequest, measured: Measured, choice: FitChoice, path: Path) -> None:
    """Write a recipe with all its parts."""
    before, behind = (
        describe(passes)["passes"] if passes else []
        for passes in (measured.rotation, (*choice.recovery, *choice.table.passes))
    )
    steps = [*before, *choice.allocation.recipe["passes"], *behind]
    about = f"{request.name}: {request.target}, {choice.bytes:,} bytes"
    write_recipe(path, replace(choice.allocation, recipe={"passes": steps}), about)
