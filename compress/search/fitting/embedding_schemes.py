"""The schemes of the token embedding that `fit` chooses among: their bytes, and the KL of the model with each alone."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compress.base.errors import InputError
from compress.base.progress import Reporter
from compress.checkpoint.sensitivity import header_bytes
from compress.data.text import batches_of
from compress.engine.walk.held_out_kl import divergence_between
from compress.inference.load.loading import load
from compress.jobs.forecast.forecast import plan
from compress.jobs.quantize import quantize
from compress.model.calls import evaluating
from compress.passes.embeddings import Embeddings
from compress.search.fitting.choice import TableOption

WIDTHS = (8, 6, 4)
AS_IT_IS = TableOption("as it is", (), 0, 0.0)
PARTS = 4  # tensors of a table's codes, at most, whose header entries take a place of their own
# A name longer than those of tables of embeddings, for an upper bound of their header entries.
LONG = "model.decoder.embed_tokens.weight_packed.and.more"


def possible_tables(model: str, trusted: bool) -> list[tuple[Embeddings, int]]:
    """(A scheme of the embedding, bytes of tensors that it saves), of those that save any; from headers alone. trusted:
    code of the model's repository may run."""
    found = []
    for bits in WIDTHS:
        made = Embeddings(scheme=f"w{bits}a16")
        try:
            saving = plan(model, made, trust_remote_code=trusted).saving
        except InputError:  # no table that codes could stand for
            return []
        saved = saving.before - saving.after - PARTS * header_bytes(LONG, (10**6, 10**6))
        if saved > 0:
            found.append((made, saved))
    return found


def table_options(
    model: str, rows: Tensor, possible: Sequence[tuple[Embeddings, int]], reporter: Reporter, **how: Any
) -> list[TableOption]:
    """All schemes of the embedding with their KL on held-out rows, the embedding as it is first. how: `device` and
    `trust_remote_code` of `quantize`."""
    if not possible:
        return [AS_IT_IS]
    original = load(model, torch.float32, trust_remote_code=how["trust_remote_code"])
    found = [AS_IT_IS]
    for p, saved in possible:
        reporter.note(f"measuring the embedding in {p.scheme}")
        made = quantize(model, p, dtype=torch.float32, **how).model
        assert made is not None
        other = made.float()
        with evaluating(original), evaluating(other):
            kl = divergence_between(original, other, batches_of(rows, 1))
        found.append(TableOption(p.scheme, (p,), saved, kl))
    return found
