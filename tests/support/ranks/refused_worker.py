"""What two ranks are refused, with the message of each: refused_worker.py FOLDER."""

import json
from pathlib import Path

from forked import fork, join, part
from mixtures import tokens

import compress
from compress.base.collectives import Comm
from compress.base.errors import InputError
from compress.engine.plan.batches import ChainBrokenError
from compress.engine.walk import capture

WORDS = {"more than there are": "2x2", "none": "0x2", "no shape": "demo"}


def broken(*call):
    raise ChainBrokenError("the hidden state changes between two blocks")


def refusal(folder: Path, fsdp: bool | str) -> str:
    try:
        how = {"calibration": tokens(2), "batch_size": 1, "output": folder / "out", "fsdp": fsdp}
        compress.quantize(folder / "model", compress.GPTQ(), **how)
    except InputError as error:
        return str(error)
    return ""


def run(rank: int, world: int, folder: Path) -> None:
    join(rank, world, folder)
    said = {name: refusal(folder, fsdp) for name, fsdp in WORDS.items()}
    capture._hidden_key = broken
    said["no chain"] = refusal(folder, True)
    found = Comm().gather_objects(said)
    if rank == 0:
        (folder / "said.json").write_text(json.dumps(found))
    part()


if __name__ == "__main__":
    fork(run, (2,))
