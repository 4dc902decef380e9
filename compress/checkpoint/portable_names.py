"""Names files and commands in records that others will read: without the folders of this machine."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path


def portable(name: str) -> str:
    """A name as it was given, or the last part of an absolute path."""
    return Path(name).name if Path(name).is_absolute() else name


def command(arguments: Sequence[str] | None = None) -> str | None:
    """The `compress` command line of this process (or of the given arguments), without folders of absolute paths. None
    for any other program, whose arguments may be private."""
    program, *rest = sys.argv if arguments is None else arguments
    ours = Path(program).name == "compress" or Path(program) == Path(__file__).parents[1] / "__main__.py"
    return shlex.join(["compress", *("=".join(map(portable, word.split("="))) for word in rest)]) if ours else None
