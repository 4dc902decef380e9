"""Words of the former release: they work once more, and the words of today are said."""

from collections.abc import Callable, Iterator, Sequence

import click

Words = list[str]
# Options that a pass of an allocation gets by --set.
BY_SETTING = ("--grid", "--activations", "--calibrator")


def reworded(words: Sequence[str]) -> Words:
    """The arguments of `compress` in the words of today; says so on standard error where they differ."""
    for command, marks, translate, today in TRANSLATED:
        if words[:1] == [command] and (mark := next((m for m in marks if has(words, m)), None)) is not None:
            click.echo(f"note: `compress {command} {mark}` will go in the next release; write `{today}`", err=True)
            return translate(words[1:])
    return list(words)


def has(words: Sequence[str], option: str) -> bool:
    """True if an option is among the arguments."""
    return any(word == option or word.startswith(f"{option}=") for word in words)


def split(words: Sequence[str]) -> Iterator[str]:
    """The arguments with `--option=value` as two."""
    for word in words:
        yield from word.split("=", 1) if word.startswith("--") and "=" in word else (word,)


def cached(words: Sequence[str]) -> Words:
    """`distill TEACHER --cache-logits FILE` as `cache-logits TEACHER --output FILE`."""
    names = {"--cache-logits": "--output", "--training": "--calibration"}
    rest, made = list(split(words)), ["cache-logits"]
    while rest:
        word = rest.pop(0)
        if word == "--calibration" and has(words, "--training"):
            del rest[:1]  # the former command asked about --training alone
        elif word == "--train" and rest:
            name, _, value = rest.pop(0).partition("=")
            if name != "temperature":
                raise click.UsageError(f"--cache-logits trains nothing; drop --train {name} (temperature alone counts)")
            made += ["--temperature", value]
        else:
            made.append(names.get(word, word))
    return made


def allocated(words: Sequence[str]) -> Words:
    """`quantize MODEL --budget SIZE --output OUT` as `allocate MODEL --budget SIZE --run OUT`."""
    names = {"--output": "--run", "--group-size": "--group-sizes"}
    rest, made = list(split(words)), ["allocate"]
    while rest:
        word = rest.pop(0)
        made += ["--set", f"{word[2:]}={rest.pop(0)}"] if word in BY_SETTING and rest else [names.get(word, word)]
    return made


# Command, options that mark its former words, translation, words of today.
TRANSLATED: tuple[tuple[str, tuple[str, ...], Callable[[Sequence[str]], Words], str], ...] = (
    ("distill", ("--cache-logits",), cached, "compress cache-logits TEACHER --calibration TEXT --output FILE"),
    ("quantize", ("--budget", "--max-kl"), allocated, "compress allocate MODEL --run OUT"),
)
