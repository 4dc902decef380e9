"""The measurements of a training, one JSON line each: written while it runs, so that a killed run keeps its curve, and
stored beside the checkpoint when it is done.

    {"step": 7, "loss": 1.25, "logits": 1.25, "rate": 1e-4, "gradient": 0.8, "scale_gradient": 0.1, "per_second": 900.0}
    {"step": 100, "held_out": {"logits": 1.31}}
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compress.base.errors import WriteError

METRICS = "metrics.jsonl"  # of one training, while it goes on
RATE = "rate.json"  # beside it: the chosen learning rate, for a resumed run
UNFINISHED = ".part"
TRAINING = "training.jsonl"  # of all of a run, beside the checkpoint

Line = dict[str, Any]


class Log:
    """Appends lines to a file in `place` (None: nowhere). resumed: the step that training continues from; later lines
    in the file are dropped, since their steps are taken again."""

    def __init__(self, place: Path | None, resumed: int) -> None:
        self.path = None if place is None else place / METRICS
        self.earlier: list[Line] = []
        if self.path is None:
            return
        if resumed and self.path.exists():
            self.earlier = [line for line in whole_lines(self.path) if line["step"] <= resumed]
        with self._writing():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(text_of(self.earlier), encoding="utf-8")

    def step(self, line: Mapping[str, float | int]) -> None:
        """Append the measurements of a step."""
        self._append(dict(line))

    def held_out(self, line: Mapping[str, float | int]) -> None:
        """Append the losses on held-out samples; at most once for each step."""
        noted = held_out_line(line)
        if not any("held_out" in before and before["step"] == noted["step"] for before in self.earlier):
            self._append(noted)

    def _append(self, line: Line) -> None:
        if self.path is not None:
            with self._writing(), self.path.open("a", encoding="utf-8") as file:
                file.write(text_of([line]))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise WriteError(f"cannot write {self.path}: {error.strerror}") from None


def held_out_line(line: Mapping[str, float | int]) -> Line:
    """A line with the losses on held-out samples."""
    return {"step": line["step"], "held_out": {name: value for name, value in line.items() if name != "step"}}


def text_of(lines: Sequence[Line]) -> str:
    """The text of a file with these lines."""
    return "".join(json.dumps(line) + "\n" for line in lines)


def whole_lines(path: Path) -> list[Line]:
    """The complete lines of a file; a truncated line and everything after it are dropped."""
    lines: list[Line] = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            break
        if not isinstance(line, dict) or not isinstance(line.get("step"), int):
            break
        lines.append(line)
    return lines


def lines_of(history: Mapping[str, Any]) -> list[Line]:
    """All lines of a training in the order of its steps, each measurement behind its step."""
    lines = {(line["step"], "held_out" in line): line for line in history["earlier"]}
    lines |= {(line["step"], False): dict(line) for line in history["steps"]}
    for line in history["held_out"]:
        lines.setdefault((line["step"], True), held_out_line(line))
    return [lines[key] for key in sorted(lines)]


def ends(history: Mapping[str, Any]) -> tuple[Line, Line] | None:
    """(Losses on held-out samples before the first step, those with the parameters that were kept); None where they
    were not measured."""
    found = {line["step"]: line["held_out"] for line in lines_of(history) if "held_out" in line}
    kept = history["kept"]
    return (found[min(found)], found[kept]) if kept in found else None


def summary(history: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of a training in the record: its options, how many steps, the test that chose its rate, the step whose
    parameters were kept, and the losses on held-out samples before the first step and with these."""
    lines = lines_of(history)
    first = min((line["step"] for line in lines if "held_out" in line), default=0)
    measured = zip((first, history["kept"]), ends(history) or (), strict=False)
    return {
        "options": history["options"],
        "steps": sum("held_out" not in line for line in lines),
        "range_test": history["range_test"],
        "kept": history["kept"],
        "held_out": [{"step": step, "held_out": losses} for step, losses in measured],
        "seconds": round(history["seconds"], 3),
        "measuring": round(history["measuring"], 3),
        "resumed": history["resumed"],
    }


def training_file(histories: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """{name: text} of the file beside a checkpoint; none where nothing was trained."""
    lines = [{"training": i, **line} for i, history in enumerate(histories) for line in lines_of(history)]
    return {TRAINING: text_of(lines)} if lines else {}
