"""Starting values of the weights behind codes: as close to the original as their codes let them.

    original / s + z = q + o        begins at (q - z + clip(o, -r, r)) s        r: 0.45 where codes were rounded to, 0.2
                                                                                where a method has chosen them together

In the middle of its code (o = 0) a weight looks to LSQ's gradient of a scale, round(v) - v, as if it did not care about
the scale: what is left is noise, which an optimizer that divides by the size of gradients makes as fast as any other.
At the end of it the code changes with the first steps. Of a solution like GPTQ's, in which the errors of codes make up
for each other, that takes much away: at 2 bits the divergence doubled in ten steps, from any r = 0.45.

o is kept in 127ths of its range, an int8 per weight, until the model is there in the numbers that it is trained in: at
8 bits, 16-bit numbers cannot tell the middle of a code from its end.
"""

import torch
from torch import Tensor

from compress.weights.decision import Decision
from compress.weights.grid import Quantized, grouped
from compress.weights.matrix import Term
from compress.weights.terms import StoredTerm

ROOM = 0.45  # of a step, on either side of a code: what is rounded to it, and not to its neighbour by the next step
TOGETHER = 0.2
NEAREST = 0.5
MOVED = 0.01  # share of the codes that are not the nearest, above which they were chosen together
PARTS = 127


def codes_with_room(decision: Decision) -> tuple[Quantized, list[Term]] | None:
    """(The decided codes, the terms that are added to them); None for signs, floats and levels, whose codes have no
    room for several weights."""
    first, *others = decision.weight.terms
    found = first.on_grid() if isinstance(first, StoredTerm) else None
    codes, *others = [*(first if found is None else found).terms, *others]
    if not isinstance(codes, Quantized) or codes.grid.levels is not None or codes.grid.signs or codes.grid.floating:
        return None
    return codes, others


@torch.no_grad()
def places_of(decision: Decision, original_NK: Tensor) -> Tensor | None:
    """int8 [N, K], the position of the original within each decided code: -127 and 127 are the code's ends (`ROOM`).
    None where there are no such codes."""
    found = codes_with_room(decision)
    if found is None:
        return None
    codes, others = found
    wanted = original_NK.to(torch.promote_types(original_NK.dtype, torch.float32))
    for other in others:
        wanted = wanted - other.dequantize().to(wanted)
    code, scale, zero = _in_groups(codes, wanted)
    offset = grouped(wanted, codes.grid) / scale + zero - code
    clipped = torch.where(offset < 0, code == codes.grid.qmin, code == codes.grid.qmax)
    moved = (offset.abs() > NEAREST) & ~clipped
    if decision.kept is not None:
        kept = grouped(decision.kept.to(offset.device), codes.grid)
        offset, moved = torch.where(kept, offset, 0.0), moved & kept
    room = TOGETHER if moved.double().mean() > MOVED else ROOM
    places = torch.round(offset.nan_to_num().clamp(-room, room) * (PARTS / ROOM))
    return places.reshape(wanted.shape).to(torch.int8)


@torch.no_grad()
def start_weight(decision: Decision, places_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, K] the weight that training starts from: it rounds to the decided codes and lies at its place within them.
    Raises AssertionError where there are no codes."""
    decided = codes_with_room(decision)
    assert decided is not None
    codes, others = decided
    places = grouped(places_NK.to(codes.codes.device, dtype), codes.grid)
    code, scale, zero = _in_groups(codes, places)
    found = ((code - zero + places * (ROOM / PARTS)) * scale).reshape(places_NK.shape)
    for other in others:
        found = found + other.dequantize().to(found)
    return found


def _in_groups(codes: Quantized, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(Codes [..., G, g], scale and zero point [..., G, 1]) in the dtype and on the device of another tensor."""
    code = grouped(codes.codes.to(like), codes.grid)
    shape = (*code.shape[:-1], 1)
    scale = codes.scale.to(like).reshape(shape)
    zero = torch.zeros_like(scale) if codes.zero_point is None else codes.zero_point.to(like).reshape(shape)
    return code, scale, zero
