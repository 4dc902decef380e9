"""The original's own answers: what it writes by itself, and where a compressed model would have written otherwise.

The original continues each prompt by its likeliest tokens. The model is then asked at every token of these answers.
Greedy decoding of the model writes the same answer up to the first token that is not its own first choice, so this one
forward says where its own answer would part, and KL is measured beyond that place, too.

Two runs agree if they round alike. Prompts are made `inference.continued.ROWS` at a time, whatever memory there is, so
they do not depend on a setting; the forward that asks rounds in another order than decoding did, so that the original
itself misses a token now and then where two are nearly as likely: `reference_exact` says how many of its own answers it
reproduces, and is the most that a model can reach.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from compress.base.errors import CheckpointError, InputError
from compress.base.regular_files import parse_json
from compress.base.schema import fits
from compress.checkpoint.files import fingerprint, write_json
from compress.checkpoint.read.source import Source
from compress.evaluation.probes.rows import rows_text
from compress.evaluation.quality import reference_states
from compress.evaluation.quality.texts import Text
from compress.evaluation.quality.windows import Windows
from compress.inference.continued import continue_rows

TOKENS = 128  # most tokens of an answer
BEGINNING = 32  # tokens of a text that are a prompt
Note = Callable[[str], None]


@dataclass(frozen=True)
class Prompts:
    """Prompts as tokens, which the original continues by at most so many. shared: as in `Text`."""

    prompts: tuple[tuple[int, ...], ...]
    tokens: int = TOKENS
    shared: int | None = None

    def answers(self, network: nn.Module, source: Source | None, note: Note) -> list[list[int]]:
        """The original's answers. source: of the network, if what it writes may be cached."""
        place = None
        if source is not None:
            about = reference_states.model_key(source, next(network.parameters()))
            key = {**about, "prompts": self.prompts, "tokens": self.tokens}
            place = reference_states.folder() / f"{fingerprint(key)}.written.json"
        answers = None if place is None else self._read(place, note)
        if answers is None:
            note(f"the original answers {len(self.prompts)} prompts")
            answers = continue_rows(network, self.prompts, self.tokens)
            if place is not None:
                self._keep(place, answers, note)
        return answers

    def text(self, answers: Sequence[Sequence[int]]) -> Text:
        """The prompts with their answers, of which only the answers are predicted."""
        rows = [[(prompt, False), (answer, True)] for prompt, answer in zip(self.prompts, answers, strict=True)]
        text = rows_text(f"{len(rows)} answers of the original", "answers", rows, ["answers"] * len(rows))
        return text if self.shared is None else text.among(self.shared)

    def _read(self, place: Path, note: Note) -> list[list[int]] | None:
        """Cached answers; None where there are none, or with a note where they are damaged."""
        if not place.exists():
            return None
        try:
            if (why := reference_states.not_believed(place)) is not None:
                raise CheckpointError(why)
            answers: list[list[int]] = parse_json(place)
            fits(answers, list[list[int]], place)
            if len(answers) != len(self.prompts) or not all(0 < len(row) <= self.tokens for row in answers):
                raise CheckpointError(f"{place} has not an answer for each prompt")
        except (CheckpointError, OSError) as error:
            note(f"what was kept of the original's answers is made anew: {error}")
            return None
        return answers

    def _keep(self, place: Path, answers: list[list[int]], note: Note) -> None:
        """Cache answers; a disk error is noted."""
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            write_json(place, answers)
        except OSError as error:
            note(f"the original's answers are not kept in {place.parent}: {error.strerror}")


def pieces_of(windows: Windows, count: int) -> list[tuple[int, ...]]:
    """Prompts: pieces of a text, spread over it, each behind BOS where rows begin with it. Raises InputError for a text
    that has not so many."""
    ids = windows.ids_N.tolist()
    if count * BEGINNING > len(ids):
        raise InputError(
            f"{count} answers to pieces of {BEGINNING} tokens of a text of {len(ids)}; give more text, or prompts"
        )
    before = () if windows.skipped is None else (windows.skipped,)
    begins = (i * len(ids) // count for i in range(count))
    return [(*before, *ids[begin : begin + BEGINNING]) for begin in begins]
