"""One recipe of a sweep in its directory: an earlier result is found by a hash of all that it depends on."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from compress.base.errors import CheckpointError, CompressError, first_line
from compress.base.progress import Reporter
from compress.checkpoint.files import read_json, write_json
from compress.checkpoint.write.directory import drop_output
from compress.evaluation.document import Evaluation
from compress.evaluation.evaluation_file import read_evaluation
from compress.evaluation.json_document import as_document
from compress.evaluation.report.runs import EVALUATION
from compress.passes.protocol.base import Pass
from compress.passes.protocol.recipe import describe
from compress.search.sweep_rows import SweepRow, row_of
from compress.search.trial import MODEL, TrialSettings, trial

RUN = "run.json"


@dataclass(frozen=True)
class StoredTrial:
    """A recipe and its directory. asked: the other measurements (`Beside.words`). keep: keep the checkpoint after its
    evaluation."""

    name: str
    passes: tuple[Pass, ...]
    place: Path
    settings: TrialSettings
    asked: list[str]
    keep: bool
    reporter: Reporter

    def row(self) -> SweepRow:
        """The figures of the recipe, computed or from an earlier sweep; a row with the problem where it failed,
        whatever the error."""
        recipe = describe(self.passes)
        try:
            found = self._evaluation()
        except (CompressError, OSError, MemoryError) as error:
            return SweepRow(self.name, recipe, problem=str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, the other recipes are not to suffer from it
            return SweepRow(self.name, recipe, problem=f"unexpected {type(error).__name__}: {first_line(error)}")
        return row_of(self.name, recipe, found, f"{self.name}/{EVALUATION}")

    @cached_property
    def identity(self) -> str:
        """A hash of everything that the checkpoint depends on."""
        return self.settings.identity(self.passes)

    def _begun(self) -> list[str] | None:
        """The other measurements that the trial in the directory was begun with; None where the directory holds no
        trial of this identity."""
        try:
            found = read_json(self.place / RUN) if (self.place / RUN).is_file() else {}
            return list(found.get("asked", ())) if found.get("identity") == self.identity else None
        except (CheckpointError, AttributeError, TypeError):
            return None

    def _evaluation(self) -> Evaluation:
        """The evaluation, of an earlier sweep with this identity unless it lacks something that is asked for now."""
        before, target, file = self._begun(), self.place / MODEL, self.place / EVALUATION
        if before is not None and {*self.asked} <= {*before} and file.is_file():
            evaluation = read_evaluation(file)
            self.reporter.note(f"{self.name}: done before")
            return evaluation
        if before is None and target.exists():
            self.reporter.note(f"{self.name}: of another recipe, model or text, and made anew")
            drop_output(target)  # before run.json says that what is there is of this identity
        self.place.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        about = {"identity": self.identity, "recipe": describe(self.passes), "asked": self.asked}
        write_json(self.place / RUN, about)
        evaluation = trial(self.settings, self.passes, target, self.reporter, name=self.name, resume=before is not None)
        write_json(file, as_document(evaluation))
        if not self.keep:
            drop_output(target)
        return evaluation
