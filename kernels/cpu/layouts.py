"""Layouts of codes by `cpu_laying.cpp`, bit for bit those of `layouts`: by torch they take most of the time of a load.
Whatever is not on a CPU, or has other widths, torch lays out.
"""

import ctypes

import torch
from torch import Tensor

from compress.kernels.cpu import build
from compress.kernels.layouts import strips, words
from compress.kernels.layouts.strips import BYTE, LINE_BYTES, NIBBLE, ROWS, Strips, by_strip, lines_of
from compress.kernels.layouts.words import Planar, planar_words


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


def pack_strips(weight: Planar, columns: int) -> Strips:
    """`layouts.strips.pack_strips`."""
    if not _lays(weight.words, weight.bits):
        return strips.pack_strips(weight, columns)
    planar, bits = weight.words.contiguous(), weight.bits
    lines = lines_of(columns, bits)
    out = torch.empty(len(planar) // ROWS, lines, LINE_BYTES, dtype=torch.uint8, device=planar.device)
    _call("strips_of_planar", planar, out, len(out), planar.shape[1] * planar.element_size(), lines, bits)
    zero = None if weight.zero is None else by_strip(weight.zero)
    return Strips(out, by_strip(weight.scale), zero, weight.group_size, bits)
