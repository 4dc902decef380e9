"""This program in a process of its own, outside any process group."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from compress.base.errors import CompressError

DISTRIBUTED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "LOCAL_WORLD_SIZE")


def verified(folder: Path, *more: str, folders: Iterable[str] = (), unread: str, wrong: str, instead: str) -> Any:
    """The answer of `compress verify` on an output. more, folders: options, and places of plugins. Raises
    CompressError: that it is `unread` where no process can be started (advice: make that possible, or do something
    `instead`), that it is `wrong` where it does not verify."""
    words, environment = fresh("verify", str(folder), "--json", "-", "--quiet", *more, folders=folders)
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", env=environment, check=False)
    except OSError as error:  # an interpreter that this user may not run, say
        raise CompressError(
            f"{unread}: {words[0]!r} does not start as a process of its own ({error.strerror}); make it one that this "
            f"user may run, or {instead}"
        ) from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise CompressError(f"{wrong}: {lines[-1] if lines else 'no message'}")
    return json.loads(done.stdout)


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
