"""Python in processes of their own."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from places import RANKS, SUPPORT

TIMEOUT_S = 250


def python(*words: object) -> subprocess.CompletedProcess[str]:
    """`python WORDS` with the modules of this folder; its import of transformers takes longer than most tests."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env=_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )


def torchruns(*words: object, count: int = 2) -> list[tuple[int, str]]:
    """(Exit code, standard error) of each `torchrun --nnodes COUNT WORDS`, started as on so many machines."""
    group = ["--nnodes", count, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}"]
    return together([[sys.executable, "-m", "torch.distributed.run", *map(str, (*group, *words))]] * count)


def together(commands: Sequence[Sequence[str]], settings: Mapping[str, str] = {}) -> list[tuple[int, str]]:
    """(Exit code, standard error) of commands that run at the same time. settings: of their environment."""
    environment = {**_environment(), **settings}
    started = [
        subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for words in commands
    ]
    said = [process.communicate(timeout=TIMEOUT_S)[1] for process in started]
    return [(process.returncode, err) for process, err in zip(started, said, strict=True)]


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def _environment() -> dict[str, str]:
    paths = [str(SUPPORT), str(SUPPORT / "images"), str(RANKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
