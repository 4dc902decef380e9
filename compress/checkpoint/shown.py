"""How a file or a command is named in what other people will read: without the folders of this machine."""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path


def shown(name: str) -> str:
    """A name as it was given; of an absolute path the last part alone."""
    return Path(name).name if Path(name).is_absolute() else name


def command(arguments: Sequence[str] | None = None) -> str | None:
    """The `compress` command of this process (or another one), ready to be typed where the files are; None in any other
    program, whose arguments are its own business."""
    program, *rest = sys.argv if arguments is None else arguments
    ours = Path(program).name == "compress" or Path(program) == Path(__file__).parents[1] / "__main__.py"
    return shlex.join(["compress", *("=".join(map(shown, word.split("="))) for word in rest)]) if ours else None
