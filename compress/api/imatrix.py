"""`compress.imatrix`: the diagonals of all Hessians, as llama-quantize reads them.

MODEL --calibration--> mean squares of every layer's inputs --gguf-py--> FILE --llama-quantize --imatrix FILE-->
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from compress.api.prepare import prepare
from compress.api.request import Calibration, Data, Delivery, Extent, Request, Work
from compress.checkpoint.export.gguf.imatrix import holds_imatrix, names_of, why_not, write_imatrix
from compress.checkpoint.portable_names import shown
from compress.checkpoint.read.source import find_source
from compress.errors import InputError
from compress.model.calls import evaluating
from compress.run.input_squares import InputSquares, input_squares
from compress.system.comm import Comm
from compress.system.progress import Reporter, Silent


@dataclass(frozen=True)
class Importance:
    """An importance matrix that was written: of so many layers, by so many tokens."""

    output: Path
    layers: int
    tokens: int


def imatrix(
    model: str | Path,
    output: str | Path,
    calibration: Calibration,
    *,
    samples: int | None = None,
    length: int | None = None,
    bos: str | None = None,
    batch_size: int = 8,
    device: str | torch.device | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    reporter: Reporter | None = None,
) -> Importance:
    """Write the mean squares of the inputs of all linear layers in a model's blocks, for `llama-quantize --imatrix`.

    They are those of the original model, as llama-imatrix has them, under llama.cpp's names of the layers. output: a
    file; one that is there is replaced if it holds an importance matrix, and any with `overwrite`. Other arguments are
    those of `quantize`. Raises InputError for what cannot be read or written, before any work.
    """
    path, source = Path(output), find_source(str(model), trust_remote_code)
    check_imatrix(model, path, overwrite=overwrite, trust_remote_code=trust_remote_code)
    data = Data(calibration, samples, length, batch_size, bos=bos)
    request = Request(model, (InputSquares(),), data, Extent(), Delivery(), Work(device), trust_remote_code)
    data.check()
    job = prepare(request, None, Comm(), Silent())  # what it would note is about passes that decide
    if reporter is not None:
        reporter.note(f"looking at the inputs of the original model's layers, for {path}")
    with evaluating(job.run.model):
        squares = job.walk(input_squares)
    names = names_of(source, list(squares))
    tokens = max(count for _, count in squares.values())
    given = job.shown.tokens
    windows = (len(given.ids), given.ids.shape[1]) if given is not None else (len(job.run.batches), 0)
    texts = [] if given is None else [shown(given.source)]
    write_imatrix(path, {names[layer]: found for layer, found in squares.items()}, texts, *windows)
    return Importance(path, len(squares), tokens)


def check_imatrix(
    model: str | Path, output: str | Path, *, overwrite: bool = False, trust_remote_code: bool = False
) -> None:
    """Raises InputError for a model whose layers llama.cpp has no names for here, and for a file that cannot be
    written."""
    path = Path(output)
    if (line := why_not(find_source(str(model), trust_remote_code))) is not None:
        raise InputError(line)
    if path.is_dir() or not path.parent.is_dir():
        raise InputError(f"{str(output)!r} cannot be written; give a file in a directory that exists")
    if path.exists() and not overwrite and not holds_imatrix(path):
        raise InputError(f"{str(output)!r} exists and is no imatrix; give another file, or --overwrite")
