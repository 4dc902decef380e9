"""A tokenizer tried with limits before it is used: its file may ask for any number of tokens of a letter."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from compress.base.errors import InputError, first_line
from compress.base.sandbox import Limited

CHARACTERS = 2**14  # of a text that a tokenizer is tried on
MOST_TOKENS, SPARE = 16, 2**16  # for each character, and more: some pad every text to one length
PROBE = "".join(map(chr, range(32, 127))) + " The cats and dogs, 2 of each, aren't in the house.\n"


def check_tokenizer(tokenizer: Any, texts: Iterable[str] = (PROBE,)) -> None:
    """Raises InputError for a tokenizer that takes much time or memory for the beginning of texts, or makes far more
    tokens of it than it has characters."""
    text = ""
    for each in texts:
        text += each[: CHARACTERS - len(text)]
        if len(text) >= CHARACTERS:
            break
    limited = Limited(lambda given: len(tokenizer(given, verbose=False)["input_ids"]))
    try:
        for tried in ("a", text):
            if (tokens := limited(tried)) > SPARE + MOST_TOKENS * len(tried):
                raise InputError(f"it makes {tokens:,} tokens of {len(tried):,} characters")
    finally:
        limited.stop()


@contextmanager
def tokenizing(tokenizer: Any, name: str, texts: Sequence[str]) -> Iterator[None]:
    """Tries a tokenizer on texts of this name (`check_tokenizer`) before the body tokenizes them. Raises InputError for
    one that fails, also by a panic of the tokenizers library in the body, which is no Exception."""
    try:
        if texts:
            check_tokenizer(tokenizer, texts)
    except InputError as error:
        raise _splitting_error(name, error) from None
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of pyo3, which has no name to import
            raise
        raise _splitting_error(name, error) from None


def _splitting_error(name: str, error: BaseException) -> InputError:
    return InputError(
        f"the tokenizer cannot split {name} ({first_line(error)}); give another text, or mend the pattern in its "
        "tokenizer.json"
    )
