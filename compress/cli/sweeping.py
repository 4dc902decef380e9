"""`sweep`: many recipes on one model, each quantized and evaluated against the original, and what they are worth beside
each other.

    DIR/NAME/model            the checkpoint
    DIR/NAME/evaluation.json  what `compress evaluate --json` writes
    DIR/NAME/run.json         of what content these are: model, recipe, texts, version; what was asked beside texts
    DIR/sweep.json            a row for each recipe
    DIR/original.json         the original's speed, where that is asked for
    DIR/report.html, .md      the report on all of them

A recipe that is done, by its content, is not run again; one that was stopped goes on behind its last finished block,
and one that was asked less than is asked now is only evaluated again. What the original says of texts and answers to
tasks is kept where `evaluate` keeps it, and its speed is taken once: none of it is measured for the next recipe again.
"""

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from compress.api import quantize
from compress.checkpoint.files import fingerprint, read_json, write_json
from compress.checkpoint.shown import shown
from compress.checkpoint.source import find_source
from compress.data import TOKEN_FORMATS
from compress.device import find_device
from compress.errors import CheckpointError, CompressError, InputError, first_line
from compress.evaluation.asked import Asked, speed_alone, with_asked
from compress.evaluation.document import Evaluation, SpeedResult, TaskResult
from compress.evaluation.evaluate import check_asked, evaluate
from compress.evaluation.showing.runs import EVALUATION
from compress.evaluation.speed.side_by_side import surroundings
from compress.evaluation.stored import read_evaluation
from compress.passes.base import Pass
from compress.passes.stages import Learn
from compress.progress import Reporter, Silent
from compress.recipe import describe
from compress.schema import built, fits
from compress.version import VERSION

INDEX, RUN, MODEL, ORIGINAL = "sweep.json", "run.json", "model", "original.json"
PAGE, TEXT = "report.html", "report.md"
RESERVED = (".", "..", INDEX, ORIGINAL, PAGE, TEXT)
FORMAT = 1


@dataclass(frozen=True)
class Row:
    """One recipe. problem: why it has no figures. front: no other recipe has fewer bytes and a lower KL. evaluation:
    the file, beside the index. tasks: by their names accuracy and, less the original's, difference. decode: tokens a
    second."""

    name: str
    recipe: dict[str, Any]
    bytes: int | None = None
    bits_per_weight: float | None = None
    perplexity: float | None = None
    kl_mean: float | None = None
    same_top: float | None = None
    tasks: dict[str, dict[str, float]] = field(default_factory=dict)
    decode: float | None = None
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

    @property
    def window(self) -> int | None:
        """Tokens per window of held-out text; rows of a token file are as long as they are."""
        return None if self.text.endswith(TOKEN_FORMATS) else self.text_length


@dataclass(frozen=True)
class Beside:
    """What is measured beside texts, as in `compress evaluate`: tasks, of each at most so many questions, and speed."""

    tasks: tuple[str, ...] = ()
    questions: int | None = None
    speed: bool = False

    def words(self, fingerprints: Sequence[str | None]) -> list[str]:
        """Each of it by its content. fingerprints: of the tasks, None where a task has none: its name must do."""
        found = [
            f"task {content or f'{name}, questions {self.questions}'}"
            for name, content in zip(self.tasks, fingerprints, strict=True)
        ]
        return [*found, "speed"] if self.speed else found


def sweep(
    model: str | Path,
    recipes: Mapping[str, Sequence[Pass]],
    shown_texts: Shown,
    output: str | Path,
    *,
    beside: Beside | None = None,
    device: str | None = None,
    keep: bool = True,
    trust_remote_code: bool = False,
    reporter: Reporter | None = None,
) -> Sweep:
    """Run recipes {name: passes} and evaluate each. beside: what is measured beside texts. keep: whether checkpoints
    stay once they are evaluated.

    A recipe that fails has a row that says why, and does not end the sweep. Raises InputError, before any work, for a
    model, text or task that is not there or cannot be used, and for names that cannot be directories.
    """
    check_names(recipes)
    place, reporter, beside = Path(output), reporter or Silent(), beside or Beside()
    if place.exists() and not place.is_dir():
        raise InputError(f"output {str(output)!r} is a file; give a directory")
    source = find_source(str(model), trust_remote_code)
    if shown_texts.calibration is None and (needing := [n for n, r in recipes.items() if any(p.calibrated for p in r)]):
        raise InputError(f"recipe {needing[0]!r} needs calibration data ({len(needing)} do); give text or token ids")
    words = _checked(model, shown_texts, beside, trust_remote_code)
    about = {
        "model": source.fingerprint(),
        "version": VERSION,
        "texts": {key: _content(value) for key, value in asdict(shown_texts).items()},
    }
    rows, original = [], OriginalSpeed(place / ORIGINAL, str(model), device, trust_remote_code, reporter)
    for done, (name, passes) in enumerate(recipes.items()):
        reporter.step(done, len(recipes), "")
        one = _One(
            str(model),
            name,
            tuple(passes),
            shown_texts,
            beside,
            place / name,
            device,
            trust_remote_code,
            keep,
            reporter,
        )
        rows.append(one.row(fingerprint({**about, "recipe": describe(one.passes)}), words, original))
        reporter.step(done + 1, len(recipes), name)
        found = Sweep(shown(source.name), shown(shown_texts.text), ranked(rows))
        write_json(place / INDEX, asdict(found))
    return found


def _checked(model: str | Path, texts: Shown, beside: Beside, trusted: bool) -> list[str]:
    """What is measured beside texts, by its content. Raises InputError for what could not be asked of the model."""
    fingerprints = check_asked(
        model,
        text=texts.text,
        length=texts.window,
        samples=texts.text_samples,
        tasks=beside.tasks,
        questions=beside.questions,
        trust_remote_code=trusted,
    )
    return beside.words(fingerprints)


def check_names(recipes: Mapping[str, Sequence[Pass]]) -> None:
    """Raises InputError for no recipe, and for a name that is no name of a directory of its own."""
    if not recipes:
        raise InputError("no recipe given; give at least one .yaml file, or a name from `compress recipes`")
    for name in recipes:
        if not name or name in RESERVED or "/" in name or "\0" in name:
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
    beside: Beside
    place: Path
    device: str | None
    trusted: bool
    keep: bool
    reporter: Reporter

    def row(self, identity: str, asked: list[str], original: "OriginalSpeed") -> Row:
        """What it has come to, by work or as it was found. asked: what is measured beside texts, by its content."""
        recipe = describe(self.passes)
        try:
            found = self._found(identity, asked)
            if found is None:
                found = self._made(identity, asked, original)
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
            {each.name: _accuracy(each) for each in found.tasks},
            None if found.speed is None else found.speed.model.decode.value,
            evaluation=f"{self.name}/{EVALUATION}",
        )

    def _begun(self, identity: str) -> list[str] | None:
        """What was asked beside texts of what lies in the directory; None where that is of another content."""
        try:
            found = read_json(self.place / RUN) if (self.place / RUN).is_file() else {}
            return list(found.get("asked", ())) if found.get("identity") == identity else None
        except (CheckpointError, AttributeError, TypeError):
            return None

    def _found(self, identity: str, asked: Sequence[str]) -> Evaluation | None:
        """The evaluation of an earlier sweep of the same content, which has all that is asked now."""
        before = self._begun(identity)
        if before is None or not set(asked) <= {*before} or not (self.place / EVALUATION).is_file():
            return None
        return read_evaluation(self.place / EVALUATION)

    def _made(self, identity: str, asked: list[str], original: "OriginalSpeed") -> Evaluation:
        begun, target = self._begun(identity) is not None, self.place / MODEL
        if not begun:
            if target.exists():
                self.reporter.note(f"{self.name}: of another recipe, model or text, and made anew")
            self.place.mkdir(parents=True, exist_ok=True)
        (self.place / EVALUATION).unlink(missing_ok=True)
        write_json(self.place / RUN, {"identity": identity, "recipe": describe(self.passes), "asked": asked})
        if not begun or not target.exists():
            self._quantized(target, begun)
        found = self._evaluated(target, original)
        write_json(self.place / EVALUATION, asdict(found))
        if not self.keep:
            shutil.rmtree(target)
        return found

    def _quantized(self, target: Path, begun: bool) -> None:
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

    def _evaluated(self, target: Path, original: "OriginalSpeed") -> Evaluation:
        shared: dict[str, Any] = {"reference": self.model, "device": self.device, "reporter": self.reporter}
        shared["trust_remote_code"] = self.trusted
        found = evaluate(
            target,
            text=self.texts.text,
            samples=self.texts.text_samples,
            length=self.texts.window,
            tasks=self.beside.tasks,
            questions=self.beside.questions,
            **shared,
        )
        speed = Asked(speed=self.beside.speed, beside=original.speed() if self.beside.speed else None)
        return with_asked(found, str(target), asked=speed, text=self.texts.text, **shared)


def _accuracy(found: TaskResult) -> dict[str, float]:
    """What an index says of a task."""
    both = {"accuracy": found.accuracy, "difference": found.difference}
    return {name: figure.value for name, figure in both.items() if figure is not None}


@dataclass(frozen=True)
class _Kept:
    """original.json."""

    model: str
    speed: SpeedResult


@dataclass
class OriginalSpeed:
    """The original's speed, taken when it is first asked for, unless a sweep before this one took it here."""

    place: Path
    model: str
    device: str | None
    trusted: bool
    reporter: Reporter
    taken: SpeedResult | None = None

    def speed(self) -> SpeedResult | None:
        """None where it cannot be taken, for which every recipe then has the reason."""
        if self.taken is None:
            self.taken = self._before()
        if self.taken is None:
            self.reporter.note("measuring the original's speed")
            with suppress(InputError, CompressError):
                self.taken = speed_alone(self.model, self.device, self.trusted)
                write_json(self.place, asdict(_Kept(self._content(), self.taken)))
        return self.taken

    def _content(self) -> str:
        return find_source(self.model, self.trusted).fingerprint()

    def _before(self) -> SpeedResult | None:
        """What a sweep before this one has taken, of the same model in the same surroundings."""
        try:
            found = read_json(self.place) if self.place.is_file() else None
            fits(found, _Kept, self.place)
        except CheckpointError:
            return None
        kept: _Kept = built(found, _Kept)
        here = surroundings(find_device(self.device))
        return kept.speed if kept.model == self._content() and (kept.speed.device, kept.speed.threads) == here else None


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
