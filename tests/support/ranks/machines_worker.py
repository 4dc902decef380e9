"""Three ranks that take themselves for three machines, of which the second ends: machines_worker.py FOLDER."""

import os
import socket
from pathlib import Path

from forked import fork, join

from compress.base.collectives import Comm
from compress.base.errors import RankLostError
from compress.base.lost_ranks import watching


def run(rank: int, world: int, folder: Path) -> None:
    os.environ["GROUP_RANK"] = str(rank)
    socket.gethostname = lambda: f"machine-{rank}"
    join(rank, world, folder)
    try:
        with watching(Comm()):
            if rank == 1:
                os._exit(0)
            Comm().barrier()
    except RankLostError as error:
        (folder / f"said-{rank}").write_text(str(error))
    os._exit(0)


if __name__ == "__main__":
    fork(run, (3,))
