"""Prompts: texts to continue, or conversations to answer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compress.base.errors import InputError
from compress.base.regular_files import json_line, regular
from compress.checkpoint.read.tokenizer_check import tokenizing
from compress.data.chat import messages_of, template_of, tools_of
from compress.data.rows import Row, row_of

FORMS = "give a UTF-8 text file with a prompt on each line, or .jsonl with rows of text or messages"


def read_prompts(path: str) -> list[Row]:
    """The lines of a text file that are not empty, or the rows of a .jsonl file. Raises InputError where there are
    none."""
    file = regular(Path(path), "prompts")
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error}); {FORMS}") from None
    prompts: list[Row] = []
    for i, line in enumerate(lines, 1):
        if line and file.suffix == ".jsonl":
            row = row_of(json_line(line, f"{path}, line {i}"))
            if row is None:
                raise InputError(f"{path}, line {i} holds neither a text nor messages; {FORMS}")
            prompts += [row[1]] if row[1] else []
        elif line:
            prompts.append(line)
    if not prompts:
        raise InputError(f"{path} holds no prompt; {FORMS}")
    return prompts


def prompt_tokens(tokenizer: Any, prompts: Sequence[Row]) -> list[tuple[int, ...]]:
    """Prompts as token ids; conversations by the chat template, up to where the assistant speaks. Raises InputError for
    conversations without a template."""
    rows = []
    template = template_of(tokenizer, True) if getattr(tokenizer, "chat_template", None) else None
    for i, prompt in enumerate(prompts, 1):
        text, more = prompt, {}
        if isinstance(prompt, Mapping):
            if template is None:
                raise InputError("prompts hold chat messages, and the tokenizer has no chat template; give texts")
            text = template((messages_of(prompt, f"prompt {i}"), tools_of(prompt, f"prompt {i}")))
            more = {"add_special_tokens": False}  # the template writes them
        with tokenizing(tokenizer, "the prompt", [str(text)]):
            rows.append(tuple(tokenizer(text, verbose=False, **more)["input_ids"]))
    return rows
