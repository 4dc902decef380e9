"""One recipe on a model: quantizes it, and evaluates the checkpoint against the original."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from compress.base.collectives import Comm
from compress.base.progress import Reporter, tell
from compress.base.version import VERSION
from compress.checkpoint.files import fingerprint
from compress.checkpoint.read.source import find_source
from compress.evaluation.document import Evaluation
from compress.evaluation.evaluate import evaluate
from compress.evaluation.optional_measurements import Asked, with_asked
from compress.jobs.calibration_data import calibration_data, training_rows
from compress.jobs.model_source import find_model
from compress.jobs.quantize import quantize
from compress.jobs.request import Request
from compress.jobs.teachers import fingerprints
from compress.passes.protocol.base import Pass
from compress.passes.protocol.recipe import describe
from compress.passes.protocol.stages import Learn
from compress.search.original import OriginalSpeed
from compress.search.texts import NOTHING, Beside, Texts, in_rows

MODEL = "model"  # the folder of a checkpoint


@dataclass(frozen=True)
class TrialSettings:
    """Settings that all recipes on a model share. beside: other measurements than those on texts; original: its speed,
    where that is one of them. trust_remote_code: code of the model's repository may run."""

    model: str
    texts: Texts
    device: str | None
    trust_remote_code: bool
    beside: Beside = NOTHING
    original: OriginalSpeed | None = None

    def identity(self, passes: Sequence[Pass]) -> str:
        """A hash of everything that the checkpoint of a recipe depends on."""
        taught = fingerprints(passes, self.trust_remote_code, Comm())
        return fingerprint({**self._about, **({"teachers": taught} if taught else {}), "recipe": describe(passes)})

    def data_of(self, passes: Sequence[Pass]) -> dict[str, Any]:
        """The data that a recipe is shown, and where, as `quantize` takes it."""
        texts = self.texts
        trains = any(p.stage(Learn) for p in passes)
        reads = any(p.calibrated for p in passes) or (trains and texts.training is None)
        shown = texts.calibration if reads else texts.training
        return {
            "calibration": _given(texts.calibration) if reads else None,
            "training": _given(texts.training) if trains else None,
            "samples": texts.samples if reads else None,
            "length": texts.length if (reads or trains) and not in_rows(shown) else None,
            "bos": texts.bos_of(shown) if reads or trains else None,
            "batch_size": texts.batch_size,
            "device": self.device,
            "trust_remote_code": self.trust_remote_code,
        }

    def check_data(self, recipes: Iterable[Sequence[Pass]]) -> None:
        """Read the data that the recipes are shown. Raises InputError for data that cannot be used."""
        model = find_model(self.model, self.device, self.trust_remote_code)
        asked = [Request(model=self.model, **self.data_of(passes)) for passes in recipes]
        for request in asked:
            request.check()
        if (reads := next((each for each in asked if each.calibration is not None), None)) is not None:
            calibration_data(reads, model, "a recipe")
        if (trains := next((each for each in asked if each.training is not None), None)) is not None:
            training_rows(trains, model)

    @cached_property
    def _about(self) -> dict[str, Any]:
        source = find_source(self.model, self.trust_remote_code)
        return {"model": source.fingerprint(), "version": VERSION, "texts": self.texts.content()}


def trial(
    settings: TrialSettings, passes: Sequence[Pass], output: Path, reporter: Reporter, *, name: str, resume: bool
) -> Evaluation:
    """The evaluation of a recipe of this name, whose checkpoint is written to output. resume: what lies there is of the
    same identity, and goes on or stays."""
    if not (resume and output.exists()):
        tell(reporter, "phase", "quantize", "unknown", name)
        _quantize(settings, passes, output, reporter, resume)
    tell(reporter, "phase", "evaluate", "unknown", name)
    return _evaluate(settings, output, reporter)


def _quantize(settings: TrialSettings, passes: Sequence[Pass], output: Path, reporter: Reporter, resume: bool) -> None:
    how: dict[str, Any] = {"resume": resume, "overwrite": not resume, "reporter": reporter}
    quantize(settings.model, passes, output=output, **settings.data_of(passes), **how)


def _evaluate(settings: TrialSettings, output: Path, reporter: Reporter) -> Evaluation:
    texts, beside = settings.texts, settings.beside
    shared: dict[str, Any] = {"reference": settings.model, "device": settings.device, "reporter": reporter}
    shared["trust_remote_code"] = settings.trust_remote_code
    evaluation = evaluate(
        output,
        text=texts.held_out,
        samples=texts.text_samples,
        length=texts.window,
        bos=texts.bos_of(texts.text),
        tasks=beside.tasks,
        questions=beside.questions,
        **shared,
    )
    speed = None if settings.original is None or not beside.speed else settings.original.speed()
    asked = Asked(speed=beside.speed, beside=speed)
    return with_asked(evaluation, str(output), asked=asked, **shared)


def _given(text: Any) -> Any:
    return str(text) if isinstance(text, Path) else text
