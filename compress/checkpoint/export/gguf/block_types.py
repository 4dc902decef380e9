"""The type of block that holds a weight exactly, and the bytes of its blocks.

Nothing is quantized again: a code that has been decided is written as it is, with its scale. Integers take the smallest
block whose codes reach as far, and blocks within one group repeat its scale:

    q from -2 to 1            Q2_0, 2.25 bits   symmetric of 2 bits in groups of 64, or multiples of it
    q - z from -8 to 7        Q4_0, 4.5 bits    codes of 2 to 4 bits; asymmetric of 2 and 3
    q - z from -16 to 15      Q5_0, 5.5 bits    codes of 5 bits; asymmetric of 4, where float16 has not the minima
    q - z from -128 to 127    Q8_0, 8.5 bits    codes of 6 to 8 bits; asymmetric of 5 to 7
    d q + m                   Q4_1, 5 bits      asymmetric of 4 bits, where float16 has all minima m = -d z
    ternary                   TQ2_0, 2.06 bits  groups of 256, or multiples of it; narrow codes of 2 bits, too
    binary                    Q1_0, 1.13 bits   groups of 128, or multiples of it

MXFP4, NVFP4 and IQ4_NL have blocks of their name; the global scale of NVFP4 is a tensor of its own (`names`).
Super-blocks of llama.cpp's K-quants are stored as they are written.

A format that is not made of integer codes joins by a line in `HOLDERS`.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from compress.checkpoint.export.integers import why_not_one_in_order
from compress.checkpoint.gguf import blocks
from compress.checkpoint.gguf.blocks import Q1_0, Q2_0, Q4_0, Q5_0, Q8_0, TQ2_0, Block
from compress.weights.formats.codes import Codes, CodesFormat, Int8Table, Packed
from compress.weights.formats.k_quants import KBlocks, KQuant
from compress.weights.formats.levels import IQ4NL, MXFP4, NVFP4
from compress.weights.formats.ternary import BinaryCodes, TernaryCodes
from compress.weights.number_formats import MIN_BITS
from compress.weights.scheme import Scheme
from compress.weights.terms import Format, StoredTerm

INTEGERS = (Q4_0, Q5_0, Q8_0)
LEVELS = {MXFP4.kind: blocks.MXFP4, NVFP4.kind: blocks.NVFP4, IQ4NL.kind: blocks.IQ4_NL}
SMALLEST = 32  # inputs that share a scale in any block of integers


class Blocks(NamedTuple):
    """A weight in blocks. type: their name in ggml. row: bytes of a row. pack: makes uint8 [N, row]."""

    type: str
    row: int
    pack: Callable[[], Tensor]


class Holder(NamedTuple):
    """The way to hold terms of one format. why_not: (format, inputs) -> the reason why blocks cannot hold it, the end
    of a sentence about a layer; None where they can. blocks: the blocks of a term against which there is none."""

    why_not: Callable[[Format, int], str | None]
    blocks: Callable[[StoredTerm], Blocks]


def why_not(scheme: Scheme, columns: int) -> str | None:
    """The reason why no block holds a layer of this scheme with so many inputs, the end of a sentence about it."""
    if (why := why_not_one_in_order(scheme)) is not None:
        return why
    if scheme.inputs is not None:
        return f"rounds its input ({scheme}); quantize weights alone, like --scheme w4a16"
    (form,) = scheme.terms
    if form.kind not in HOLDERS:
        return f"is stored as {scheme}, for which GGUF has no block; `--to dense` takes it"
    return HOLDERS[form.kind].why_not(form, columns)


def blocks_of(term: StoredTerm) -> Blocks:
    """The blocks that hold a term exactly."""
    return HOLDERS[term.format.kind].blocks(term)


def _block_for(form: CodesFormat, columns: int) -> Block | None:
    """The block for all codes that a grid can have; None where there is none."""
    if isinstance(form, TernaryCodes | BinaryCodes):
        return TQ2_0 if isinstance(form, TernaryCodes) else Q1_0
    if form.grid.ternary and not (form.grid.group_size or columns) % TQ2_0.size:
        return TQ2_0
    if form.grid.symmetric and form.grid.bits == MIN_BITS and not (form.grid.group_size or columns) % Q2_0.size:
        return Q2_0
    low, high = form.grid.qmin, form.grid.qmax
    reach = (low, high) if form.grid.symmetric else (low - high, high - low)
    return next((block for block in INTEGERS if block.least <= reach[0] and reach[1] <= block.most), None)


def _codes_why_not(form: Format, columns: int) -> str | None:
    assert isinstance(form, CodesFormat)
    block = _block_for(form, columns)
    if block is None:
        return f"has asymmetric codes of {form.grid.bits} bits, which no block holds; quantize with symmetric ones"
    if columns % block.size:
        return _unfilled(block, columns)
    group = form.grid.group_size
    if group is not None and group % block.size:
        return (
            f"has groups of {group}; {block.name} takes multiples of {block.size}: quantize with --group-size "
            f"{block.size}"
        )
    return None


def _codes_blocks(held: StoredTerm) -> Blocks:
    assert isinstance(held, Codes)
    rows, columns = held.codes.shape
    block = _block_for(held.format, columns)
    assert block is not None
    zero = held.zero_point

    def codes() -> Tensor:
        found = held.codes.to(torch.int16)
        return found if zero is None else found - _by_block(zero.to(torch.int16), rows, columns, 1)

    if zero is not None and held.grid.bits == 4:
        scale = _by_block(held.scale, rows, columns, blocks.Q4_1_SIZE).to(torch.float16)
        lowest = _by_block(zero.to(torch.float32), rows, columns, blocks.Q4_1_SIZE) - held.grid.qmin
        least = -scale.to(torch.float32) * lowest
        if torch.equal(least.to(torch.float16).to(torch.float32), least):
            unsigned = held.codes.to(torch.int16) - held.grid.qmin
            row = columns // blocks.Q4_1_SIZE * blocks.Q4_1_BYTES
            return Blocks(blocks.Q4_1_NAME, row, lambda: blocks.pack_q4_1(unsigned, scale, least.to(torch.float16)))
    scale = _by_block(held.scale, rows, columns, block.size)
    return Blocks(block.name, block.row(columns), lambda: block.pack(codes(), scale.to(torch.float16)))


def _by_block(numbers: Tensor, rows: int, columns: int, size: int) -> Tensor:
    """Numbers of groups [N, G], or of all rows [1, G], as [N, B] of blocks."""
    return numbers.expand(rows, -1).repeat_interleave(columns // size // numbers.shape[-1], 1)


def _unfilled(block: Block, columns: int) -> str:
    return f"has {columns} inputs; {block.name} takes multiples of {block.size}; leave it out, or use `--to dense`"


def _levels_why_not(form: Format, columns: int) -> str | None:
    block = LEVELS[form.kind]
    return _unfilled(block, columns) if columns % block.size else None


def _levels_blocks(held: StoredTerm) -> Blocks:
    assert isinstance(held, Codes)
    block, stored = LEVELS[held.format.kind], held.parts()["weight_scale"]
    scale = stored.to(torch.float16) if block is blocks.IQ4_NL else stored.view(torch.uint8)
    return Blocks(block.name, block.row(held.codes.shape[1]), lambda: block.pack(held.codes, scale))


def _super_blocks(held: StoredTerm) -> Blocks:
    assert isinstance(held, KBlocks)
    return Blocks(held.format.type.upper(), held.blocks.shape[1], lambda: held.blocks)


_CODES = Holder(_codes_why_not, _codes_blocks)
# By the kind of the format. A format whose tensor is made of blocks already hands them over as they are.
HOLDERS: Mapping[str, Holder] = {
    **dict.fromkeys((Packed.kind, Int8Table.kind, TernaryCodes.kind, BinaryCodes.kind), _CODES),
    **dict.fromkeys(LEVELS, Holder(_levels_why_not, _levels_blocks)),
    KQuant.kind: Holder(lambda form, columns: form.problem(0, columns), _super_blocks),
}
