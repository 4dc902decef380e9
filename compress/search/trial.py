"""One recipe of a sweep: quantizes, evaluates, and finds earlier results by a hash of all that they depend on."""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compress.base.collectives import Comm
from compress.base.errors import CheckpointError, CompressError, first_line
from compress.base.progress import Reporter
from compress.checkpoint.files import fingerprint, read_json, write_json
from compress.evaluation.document import Evaluation
from compress.evaluation.evaluate import evaluate
from compress.evaluation.evaluation_file import read_evaluation
from compress.evaluation.optional_measurements import Asked, with_asked
from compress.evaluation.report.runs import EVALUATION
from compress.jobs.quantize import quantize
from compress.jobs.teachers import fingerprints
from compress.passes.protocol.base import Pass
from compress.passes.protocol.recipe import describe
from compress.passes.protocol.stages import Learn
from compress.search.original import OriginalSpeed
from compress.search.sweep_rows import SweepRow, row_of
from compress.search.texts import Beside, Texts, in_rows

RUN, MODEL = "run.json", "model"


@dataclass(frozen=True)
class Common:
    """Settings that all recipes of a sweep share. about: hashes of the model and the texts, and the version. asked: the
    other measurements (`Beside.words`). trusted: code of the model's repository may run. keep: keep checkpoints after
    their evaluation."""

    model: str
    texts: Texts
    beside: Beside
    about: dict[str, Any]
    asked: list[str]
    original: OriginalSpeed
    device: str | None
    trusted: bool
    keep: bool
    reporter: Reporter


@dataclass(frozen=True)
class Trial:
    """A recipe and its directory."""

    name: str
    passes: tuple[Pass, ...]
    place: Path
    common: Common

    def row(self) -> SweepRow:
        """The figures of the recipe, computed or from an earlier sweep; a row with the problem where it failed,
        whatever the error."""
        recipe = describe(self.passes)
        try:
            found = self._found()
            if found is None:
                found = self._made()
            else:
                self.common.reporter.note(f"{self.name}: done before")
        except (CompressError, OSError, MemoryError) as error:
            return SweepRow(self.name, recipe, problem=str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, the other recipes are not to suffer from it
            return SweepRow(self.name, recipe, problem=f"unexpected {type(error).__name__}: {first_line(error)}")
        return row_of(self.name, recipe, found, f"{self.name}/{EVALUATION}")

    @property
    def identity(self) -> str:
        """A hash of everything that the checkpoint depends on."""
        taught = fingerprints(self.passes, self.common.trusted, Comm())
        about = {**self.common.about, **({"teachers": taught} if taught else {})}
        return fingerprint({**about, "recipe": describe(self.passes)})

    def _begun(self) -> list[str] | None:
        """The other measurements that the trial in the directory was begun with; None where the directory holds no
        trial of this identity."""
        try:
            found = read_json(self.place / RUN) if (self.place / RUN).is_file() else {}
            return list(found.get("asked", ())) if found.get("identity") == self.identity else None
        except (CheckpointError, AttributeError, TypeError):
            return None

    def _found(self) -> Evaluation | None:
        """The evaluation of an earlier sweep with this identity; None where there is none, or one that lacks something
        that is asked for now."""
        before = self._begun()
        if before is None or not {*self.common.asked} <= {*before} or not (self.place / EVALUATION).is_file():
            return None
        return read_evaluation(self.place / EVALUATION)

    def _made(self) -> Evaluation:
        """Quantize, unless the finished checkpoint exists, and evaluate."""
        begun, target = self._begun() is not None, self.place / MODEL
        if not begun and target.exists():
            self.common.reporter.note(f"{self.name}: of another recipe, model or text, and made anew")
        self.place.mkdir(parents=True, exist_ok=True)
        (self.place / EVALUATION).unlink(missing_ok=True)
        about = {"identity": self.identity, "recipe": describe(self.passes), "asked": self.common.asked}
        write_json(self.place / RUN, about)
        if not begun or not target.exists():
            self._quantize(target, begun)
        found = self._evaluated(target)
        write_json(self.place / EVALUATION, asdict(found))
        if not self.common.keep:
            shutil.rmtree(target)
        return found

    def _quantize(self, target: Path, begun: bool) -> None:
        common, texts = self.common, self.common.texts
        trains = any(p.stage(Learn) for p in self.passes)
        reads = any(p.calibrated for p in self.passes) or (trains and texts.training is None)
        shown = texts.calibration if reads else texts.training
        quantize(
            common.model,
            self.passes,
            calibration=_given(texts.calibration) if reads else None,
            training=_given(texts.training) if trains else None,
            output=target,
            samples=texts.samples if reads else None,
            length=texts.length if (reads or trains) and not in_rows(shown) else None,
            bos=texts.bos_of(shown) if reads or trains else None,
            batch_size=texts.batch_size,
            device=common.device,
            resume=begun,
            overwrite=not begun,
            trust_remote_code=common.trusted,
            reporter=common.reporter,
        )

    def _evaluated(self, target: Path) -> Evaluation:
        common = self.common
        shared: dict[str, Any] = {"reference": common.model, "device": common.device, "reporter": common.reporter}
        shared["trust_remote_code"] = common.trusted
        found = evaluate(
            target,
            text=common.texts.held_out,
            samples=common.texts.text_samples,
            length=common.texts.window,
            bos=common.texts.bos_of(common.texts.text),
            tasks=common.beside.tasks,
            questions=common.beside.questions,
            **shared,
        )
        speed = Asked(speed=common.beside.speed, beside=common.original.speed() if common.beside.speed else None)
        return with_asked(found, str(target), asked=speed, text=common.texts.held_out, **shared)


def _given(text: Any) -> Any:
    """A text as `quantize` takes it."""
    return str(text) if isinstance(text, Path) else text
