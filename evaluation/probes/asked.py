"""The probes of an evaluation, and their texts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from compress.base.errors import InputError
from compress.data.rows import Row
from compress.evaluation.probes.answers import TOKENS, Prompts, pieces_of
from compress.evaluation.probes.recall import recall_text
from compress.evaluation.probes.tools import tools_text
from compress.evaluation.quality.prompts import prompt_tokens
from compress.evaluation.quality.texts import Text


@dataclass(frozen=True)
class Probes:
    """Measurements of `evaluate` beside a text.

    answers: so many prompts are answered by the reference, in at most answer_tokens tokens, and the model is asked at
    each of these (`probes.answers`). prompts: texts, or rows of messages; by default pieces of the held-out text.
    recall: windows of each kind of facts to recall, as long as those of the text (`probes.recall`). tools: also
    conversations with tool calls (`probes.tools`).
    """

    answers: int | None = None
    answer_tokens: int = TOKENS
    prompts: Sequence[Row] = ()
    recall: int | None = None
    tools: bool = False

    @property
    def need_no_text(self) -> bool:
        """True where all that is asked for can do without a text."""
        return self.recall is None and (self.tools or len(self.prompts) > 0)

    def check(self, has_reference: bool, has_text: bool) -> None:
        """Raises InputError for probes that have nothing to ask about."""
        for name, value in (("answers", self.answers), ("answer_tokens", self.answer_tokens), ("recall", self.recall)):
            if value is not None and value < 1:
                raise InputError(f"{name} {value}; allowed: 1 or more")
        if self.prompts and self.answers is None:
            raise InputError("prompts are for answers; say how many are to be answered (answers)")
        if self.prompts and len(self.prompts) < (self.answers or 0):
            raise InputError(
                f"answers {self.answers} to {len(self.prompts)} prompts; ask for fewer, or give more prompts"
            )
        if self.recall is not None and not has_text:
            raise InputError("facts to recall are hidden in a text; give one (text)")
        if self.answers is not None and not has_reference:
            raise InputError("answers are those of the original; give it (reference)")
        if self.answers is not None and not self.prompts and not has_text:
            raise InputError("answers are to prompts, or to pieces of a text; give one of them (prompts, text)")

    def texts(self, held_out: Text | None, tokenizer: Callable[[], Any], config: Any) -> list[Text]:
        """Facts to recall and tool calls, if they are asked for."""
        made = []
        if self.recall is not None and held_out is not None:
            made.append(recall_text(held_out.windows, tokenizer(), self.recall))
        if self.tools:
            made.append(tools_text(tokenizer(), config))
        return made

    def unwritten(self, held_out: Text | None, tokenizer: Callable[[], Any], config: Any) -> Prompts | None:
        """Prompts for the original to answer; None where no answers are asked for. Raises InputError for prompts that
        leave no room in the model's context."""
        if self.answers is None:
            return None
        if self.prompts:
            prompts = prompt_tokens(tokenizer(), self.prompts[: self.answers])
        else:
            assert held_out is not None
            prompts = pieces_of(held_out.windows, self.answers)
        if not all(prompts):
            raise InputError("a prompt holds no token; leave it out")
        context = getattr(config, "max_position_embeddings", None)
        longest = max(map(len, prompts)) + self.answer_tokens
        if context is not None and longest > context:
            raise InputError(
                f"prompts and answers of up to {longest} tokens; the model reads at most {context}: ask for shorter "
                "answers (answer_tokens), or give shorter prompts"
            )
        return Prompts(tuple(prompts), self.answer_tokens, None if held_out is None else held_out.shared)
