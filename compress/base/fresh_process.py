"""The words and environment of this program in a process of its own, outside any process group."""

import os
import sys
from collections.abc import Iterable
from pathlib import Path

DISTRIBUTED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "LOCAL_WORLD_SIZE")


def fresh(*words: str, folders: Iterable[str] = ()) -> tuple[list[str], dict[str, str]]:
    """(Command line, environment) of `compress WORDS` in another process. folders: more of PYTHONPATH, for plugins."""
    environment = {k: v for k, v in os.environ.items() if k not in DISTRIBUTED and not k.startswith("TORCHELASTIC")}
    # Not from the current directory, unless that is where this package is: what lies there is anybody's.
    home = Path(__file__).resolve().parents[2]
    first = [str(home)] if home == Path.cwd() else []
    known = [*dict.fromkeys(folders), *first, environment.get("PYTHONPATH") or ""]
    if path := os.pathsep.join(filter(None, known)):
        environment["PYTHONPATH"] = path
    return [sys.executable, "-P", "-m", "compress", *words], environment
