"""Layouts of codes by `cpu_laying.cpp`, bit for bit those of `layouts`: by torch they take most of the time of a load.
Whatever is not on a CPU, or has other widths, torch lays out. `why_not_lay_in_strips` says which weights a CPU is
better off with in strips.
"""

import ctypes

import torch
from torch import Tensor

from compress.kernels.cpu import build
from compress.kernels.cpu.arguments import Operation
from compress.kernels.cpu.gemm import why_not_sizes
from compress.kernels.layouts import strips, words
from compress.kernels.layouts.strips import BYTE, NIBBLE, by_strip, lines_of
from compress.kernels.layouts.words import LINE_BYTES, ROWS, CodeWords, planar_words


def _lays(codes: Tensor, bits: int) -> bool:
    return codes.device.type == "cpu" and bits in (NIBBLE, BYTE) and not build.why_not("laying")


def _call(name: str, codes: Tensor, out: Tensor, *sizes: int) -> Tensor:
    *counts, bits = sizes
    pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (codes, out))
    getattr(build.library("laying"), name)(*pointers, *map(ctypes.c_int64, counts), ctypes.c_int32(bits))
    return out


def planar_from_rows(stored: Tensor, bits: int, columns: int, container: int) -> Tensor:
    """`layouts.words.planar_from_rows` of centred codes."""
    if bits != container or not _lays(stored, bits):
        return words.planar_from_rows(stored, bits, columns, container)
    stored = stored.contiguous()
    out = torch.empty(len(stored), planar_words(columns, bits), dtype=torch.int16, device=stored.device)
    return _call("planar_of_rows", stored, out, len(stored), stored.shape[1] * stored.element_size(), columns, bits)


def pack_strips(weight: CodeWords, columns: int) -> CodeWords:
    """`layouts.strips.pack_strips`."""
    if not _lays(weight.words, weight.bits):
        return strips.pack_strips(weight, columns)
    planar, bits = weight.words.contiguous(), weight.bits
    lines = lines_of(columns, bits)
    out = torch.empty(len(planar) // ROWS, lines, LINE_BYTES, dtype=torch.uint8, device=planar.device)
    _call("strips_of_planar", planar, out, len(out), planar.shape[1] * planar.element_size(), lines, bits)
    zero = None if weight.zero is None else by_strip(weight.zero)
    return weight._replace(words=out, scale=by_strip(weight.scale), zero=zero)


def why_not_lay_in_strips(rows: int, columns: int, bits: int, group_size: int, int8_input: bool) -> list[str]:
    """Reasons why codes of so many bits are not better off in strips on this CPU; empty when they are."""
    operation: Operation = "int8_strips" if int8_input else "strips"
    reasons = strips.why_not_strips(rows, bits) + why_not_sizes(operation, columns, group_size)
    if int8_input and bits == BYTE:
        reasons.append("int8 inputs times codes of 8 bits are multiplied from planar words")
    return reasons or [*build.why_not()]


def why_not_levels(rows: int, columns: int, group_size: int) -> list[str]:
    """Reasons why no loop of this CPU multiplies codes of a table, of so many rows and columns; empty when one does."""
    reasons = strips.why_not_strips(rows, NIBBLE) + why_not_sizes("table_strips", columns, group_size)
    return reasons or [*build.why_not()]


def lay_in_strips(weight: CodeWords, columns: int, int8_input: bool) -> CodeWords | None:
    """A weight of `columns` columns on a CPU in strips; None where it is better off in planar words."""
    if weight.words.device.type != "cpu":
        return None
    sizes = (len(weight.words), columns, weight.bits, weight.group_size)
    return None if why_not_lay_in_strips(*sizes, int8_input) else pack_strips(weight, columns)
