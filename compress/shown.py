"""How a file or a command is named in what other people will read: without the folders of this machine."""

import sys
from collections.abc import Sequence
from pathlib import Path


def shown(name: str) -> str:
    """A name as it was given; of an absolute path the last part alone."""
    return Path(name).name if Path(name).is_absolute() else name


def command(arguments: Sequence[str] | None = None) -> str:
    """The command line of this process (or another one), ready to be typed where the files are."""
    program, *rest = sys.argv if arguments is None else arguments
    words = ["compress" if Path(program).name in ("compress", "__main__.py") else shown(program)]
    for word in rest:
        option, equals, value = word.partition("=")
        words.append(f"{option}={shown(value)}" if word.startswith("-") and equals else shown(word))
    return " ".join(words)
