"""`sweep`: many recipes on one model, each quantized and evaluated against the original, and what they are worth beside
each other.

    DIR/NAME/model            the checkpoint
    DIR/NAME/evaluation.json  what `compress evaluate --json` writes
    DIR/NAME/run.json         of what content these are: model, recipe, texts, version
    DIR/sweep.json            a row for each recipe
    DIR/report.html, .md      the report on all of them

A recipe that is done, by its content, is not run again; one that was stopped goes on behind its last finished block.
"""

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compress.api import quantize
from compress.checkpoint.files import fingerprint, read_json, write_json
from compress.checkpoint.shown import shown
from compress.checkpoint.source import find_source
from compress.data import TOKEN_FORMATS
from compress.errors import CheckpointError, CompressError, InputError, first_line
from compress.evaluation.document import Evaluation
from compress.evaluation.evaluate import evaluate
from compress.evaluation.showing.runs import EVALUATION
from compress.evaluation.stored import read_evaluation
from compress.passes.base import Pass
from compress.passes.stages import Learn
from compress.progress import Reporter, Silent
from compress.recipe import describe
from compress.version import VERSION

INDEX, RUN, MODEL = "sweep.json", "run.json", "model"
PAGE, TEXT = "report.html", "report.md"
FORMAT = 1


@dataclass(frozen=True)
class Row:
    """One recipe. problem: why it has no figures. front: no other recipe has fewer bytes and a lower KL. evaluation:
    the file, beside the index."""

    name: str
    recipe: dict[str, Any]
    bytes: int | None = None
    bits_per_weight: float | None = None
    perplexity: float | None = None
    kl_mean: float | None = None
    same_top: float | None = None
    front: bool = False
    evaluation: str | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Sweep:
    """All rows, in the order of their bytes, those without figures last."""

    model: str
    text: str
    rows: list[Row]
    format: int = FORMAT

    @property
    def failed(self) -> list[Row]:
        """Recipes that came to nothing."""
        return [row for row in self.rows if row.problem is not None]


@dataclass(frozen=True)
class Shown:
    """What every recipe of a sweep is shown, and evaluated on: texts or token files, and how much of each."""

    calibration: str | None
    text: str
    training: str | None = None
    samples: int | None = None
    length: int | None = None
    text_samples: int | None = None
    text_length: int | None = None
    batch_size: int = 8


def sweep(
    model: str | Path,
    recipes: Mapping[str, Sequence[Pass]],
    shown_texts: Shown,
    output: str | Path,
    *,
    device: str | None = None,
    keep: bool = True,
    trust_remote_code: bool = False,
    reporter: Reporter | None = None,
) -> Sweep:
    """Run recipes {name: passes} and evaluate each. keep: whether checkpoints stay once they are evaluated.

    A recipe that fails has a row that says why, and does not end the sweep. Raises InputError, before any work, for a
    model or text that is not there, and for names that cannot be directories.
    """
    check_names(recipes)
    place, reporter = Path(output), reporter or Silent()
    if place.exists() and not place.is_dir():
        raise InputError(f"output {str(output)!r} is a file; give a directory")
    source = find_source(str(model), trust_remote_code)
    if shown_texts.calibration is None and (needing := [n for n, r in recipes.items() if any(p.calibrated for p in r)]):
        raise InputError(f"recipe {needing[0]!r} needs calibration data ({len(needing)} do); give text or token ids")
    about = {
        "model": source.fingerprint(),
        "version": VERSION,
        "texts": {key: _content(value) for key, value in asdict(shown_texts).items()},
    }
    rows = []
    for done, (name, passes) in enumerate(recipes.items()):
        reporter.step(done, len(recipes), "")
        one = _One(
            str(model), name, tuple(passes), shown_texts, place / name, device, trust_remote_code, keep, reporter
        )
        rows.append(one.row(fingerprint({**about, "recipe": describe(one.passes)})))
        reporter.step(done + 1, len(recipes), name)
        found = Sweep(shown(source.name), shown(shown_texts.text), ranked(rows))
        write_json(place / INDEX, asdict(found))
    return found


def check_names(recipes: Mapping[str, Sequence[Pass]]) -> None:
    """Raises InputError for no recipe, and for a name that is no name of a directory of its own."""
    if not recipes:
        raise InputError("no recipe given; give at least one .yaml file, or a name from `compress recipes`")
    for name in recipes:
        if not name or name in (".", "..", INDEX, PAGE, TEXT) or "/" in name or "\0" in name:
            raise InputError(f"recipe name {name!r}; each is the name of a directory: give one without slashes")


def _content(value: Any) -> Any:
    """A file as the hash of what is in it; anything else as it is."""
    if isinstance(value, str) and Path(value).is_file():
        return hashlib.sha256(Path(value).read_bytes()).hexdigest()
    return value


@dataclass(frozen=True)
class _One:
    """One recipe of a sweep, and its directory."""

    model: str
    name: str
    passes: tuple[Pass, ...]
    texts: Shown
    place: Path
    device: str | None
    trusted: bool
    keep: bool
    reporter: Reporter

    def row(self, identity: str) -> Row:
        """What it has come to, by work or as it was found."""
        recipe = describe(self.passes)
        try:
            found = self._found(identity)
            if found is None:
                found = self._made(identity)
            else:
                self.reporter.note(f"{self.name}: done before")
        except (CompressError, OSError, MemoryError) as error:
            return Row(self.name, recipe, problem=str(error))
        except Exception as error:  # noqa: BLE001 - whatever it is, the other recipes are not to suffer from it
            return Row(self.name, recipe, problem=f"unexpected {type(error).__name__}: {first_line(error)}")
        return Row(
            self.name,
            recipe,
            found.bytes,
            found.bits_per_weight,
            found.perplexity,
            found.kl_mean,
            found.same_top,
            evaluation=f"{self.name}/{EVALUATION}",
        )

    def _begun(self, identity: str) -> bool:
        """Whether what lies in the directory is of this content."""
        try:
            return (self.place / RUN).is_file() and read_json(self.place / RUN).get("identity") == identity
        except (CheckpointError, AttributeError):
            return False

    def _found(self, identity: str) -> Evaluation | None:
        """The evaluation of an earlier sweep of the same content."""
        if not self._begun(identity) or not (self.place / EVALUATION).is_file():
            return None
        return read_evaluation(self.place / EVALUATION)

    def _made(self, identity: str) -> Evaluation:
        begun, target = self._begun(identity), self.place / MODEL
        if not begun:
            if target.exists():
                self.reporter.note(f"{self.name}: of another recipe, model or text, and made anew")
            self.place.mkdir(parents=True, exist_ok=True)
            (self.place / EVALUATION).unlink(missing_ok=True)
            write_json(self.place / RUN, {"identity": identity, "recipe": describe(self.passes)})
        if not begun or not target.exists():
            texts, trains = self.texts, any(p.stage(Learn) for p in self.passes)
            reads = any(p.calibrated for p in self.passes) or (trains and texts.training is None)
            whole = not reads or str(texts.calibration).endswith(TOKEN_FORMATS)
            quantize(
                self.model,
                self.passes,
                calibration=texts.calibration if reads else None,
                training=texts.training if trains else None,
                output=target,
                samples=texts.samples if reads else None,
                length=None if whole else texts.length,
                batch_size=texts.batch_size,
                device=self.device,
                resume=begun,
                overwrite=not begun,
                trust_remote_code=self.trusted,
                reporter=self.reporter,
            )
        found = evaluate(
            target,
            reference=self.model,
            text=self.texts.text,
            samples=self.texts.text_samples,
            length=None if self.texts.text.endswith(TOKEN_FORMATS) else self.texts.text_length,
            device=self.device,
            trust_remote_code=self.trusted,
            reporter=self.reporter,
        )
        write_json(self.place / EVALUATION, asdict(found))
        if not self.keep:
            shutil.rmtree(target)
        return found


def ranked(rows: Sequence[Row]) -> list[Row]:
    """Rows by their bytes, with those of the front marked."""
    known = [(row.bytes, row.kl_mean) for row in rows if row.bytes is not None and row.kl_mean is not None]
    found = []
    for row in rows:
        front = row.bytes is not None and row.kl_mean is not None
        if row.bytes is not None and row.kl_mean is not None:
            here = (row.bytes, row.kl_mean)
            front = not any(b <= here[0] and k <= here[1] and (b, k) != here for b, k in known)
        found.append(Row(**{**vars(row), "front": front}))
    return sorted(found, key=lambda row: (row.bytes is None, row.bytes or 0, row.name))
