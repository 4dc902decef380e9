"""The kernel for a product of given sizes on a device, with the reasons against faster ones; nothing is computed.

triton       the fused kernels                          dequantize   blocks of the weight by Triton, then cuBLAS
cpu rows     C++, few tokens                            cpu slabs    C++, many tokens
cpu strips   C++, of weights that are laid out in strips
torch        blocks of the weight unpacked by torch     reference    plain torch, fp64 integer products
cpu trellis  C++, few tokens multiplied as codes are decoded
cpu trellis, then torch    C++ decodes all rows, torch multiplies
dense blocks C++ unpacks blocks of rows in the cache, torch multiplies: where that was measured to be faster here
dense blocks by AMX    the same, multiplied by the tiles of AMX
scaled_mm    torch's product of float8 matrices

Where sparse rows are added to codes: "KERNEL with entries" is one pass over both, "KERNEL + entries" are two products.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from compress.kernels.cpu import build as cpu
from compress.kernels.cpu import dense
from compress.kernels.cpu import gemm as cpu_gemm
from compress.kernels.cpu.arguments import FEW_TOKENS, TYPES, Operation, strips_operation
from compress.kernels.cpu.dense_thresholds import NEVER
from compress.kernels.cpu.layouts import why_not_lay_in_strips
from compress.kernels.layouts.strips import BYTE, NIBBLE, why_not_strips
from compress.kernels.layouts.strips24 import why_not_strips24
from compress.kernels.layouts.tiles import TileWords
from compress.kernels.layouts.words import CodeWords, LevelTable
from compress.kernels.operators import fp8, fp8_blocks, sparse, sparse24, tiles
from compress.kernels.operators import words as ops
from compress.kernels.operators.devices import path_of
from compress.kernels.operators.int8_rows import why_not_w8a8
from compress.kernels.operators.sparse24 import NO_KERNEL
from compress.kernels.operators.tiles import MANY

TOKENS = (1, 8, 64, 512)  # at which tables show routes
DENSE_BLOCKS, AMX_BLOCKS = "dense blocks", "dense blocks by AMX"
NOT_MEASURED = f"{DENSE_BLOCKS} for many tokens, if the first product of them finds that faster (measured once)"
NUMBERS = 16  # bits of a weight that is no code


class Route(NamedTuple):
    """A kernel, and the reasons against each faster one."""

    kernel: str
    why_not: tuple[str, ...]


def _tokens(M: int, K: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(1, K, dtype=dtype, device=device).expand(M, K)


def planar_route(
    M: int,
    N: int,
    K: int,
    bits: int,
    group_size: int,
    dtype: torch.dtype,
    device: torch.device,
    int8_input: bool = False,
    zero: bool = False,
) -> Route:
    """The route of a weight in planar words of 4 or 8 bits. int8_input: x is rounded to int8; zero: there are zero
    points."""
    if device.type == "cpu":
        return _cpu_route("int8_activation" if int8_input else "weight_only", M, (N, K), bits, group_size, dtype)
    meta = torch.device("meta")
    weight = CodeWords(
        torch.empty(N, 0, dtype=torch.int16, device=meta),
        torch.empty(0, dtype=dtype, device=meta),
        torch.empty(0, dtype=torch.uint8, device=meta) if zero else None,
        group_size,
        bits,
    )
    x_MK = _tokens(M, K, dtype, device)
    if int8_input:
        reasons = ops.why_not_int8(x_MK, weight)
        return Route(path_of(device, reasons), tuple(reasons))
    return _fused_route(x_MK, weight)


def _fused_route(x_MK: torch.Tensor, weight: CodeWords) -> Route:
    """The route of a weight in planar words on a GPU, with x as it is."""
    path, _ = ops.weight_only_path(x_MK, weight)
    fused = tuple(ops.why_not_weight_only(x_MK, weight))
    if path == "dequantize" and not fused:
        fused = (MANY,)
    return Route(path, () if path == "triton" else fused)


def why_not_batch_invariant(
    K: int, bits: int, group_size: int, dtype: torch.dtype, device: torch.device, int8_input: bool = False
) -> list[str]:
    """Reasons why a weight in planar words has no batch-invariant product (`ops`); empty when it has one. With int8
    inputs there always is one: exact sums, whose scales are multiplied one by one."""
    if int8_input:
        return []
    nothing = torch.empty(0, dtype=dtype, device="meta")
    return ops.why_not_batch_invariant(
        _tokens(1, K, dtype, device), CodeWords(nothing, nothing, None, group_size, bits)
    )


def strips_route(
    M: int,
    N: int,
    K: int,
    bits: int,
    group_size: int,
    dtype: torch.dtype,
    device: torch.device,
    int8_input: bool = False,
    zero: bool = False,
) -> Route:
    """The route of a weight that is in planar words, or in strips where those are faster."""
    if device.type != "cpu" or why_not_lay_in_strips(N, K, bits, group_size, int8_input):
        return planar_route(M, N, K, bits, group_size, dtype, device, int8_input, zero)
    return _cpu_route(strips_operation(int8_input, dtype), M, (N, K), bits, group_size, dtype)


def levels_route(
    M: int,
    N: int,
    K: int,
    group_size: int,
    dtype: torch.dtype,
    device: torch.device,
    scales: torch.dtype | None = None,
) -> Route:
    """The route of codes of a table of 16 levels. scales: their dtype, where it is not that of x."""
    if device.type != "cpu":
        meta = torch.device("meta")
        table = LevelTable(torch.empty(0, device=meta), signed=False)
        words, scale = torch.empty(N, 0, device=meta), torch.empty(0, dtype=scales or dtype, device=meta)
        return _fused_route(_tokens(M, K, dtype, device), CodeWords(words, scale, None, group_size, NIBBLE, table))
    return _cpu_route("table_strips", M, (N, K), NIBBLE, group_size, dtype, why_not_strips(N, NIBBLE))


def tiles_route(M: int, N: int, K: int, bits: int, group_size: int, dtype: torch.dtype, device: torch.device) -> Route:
    """The route of codes in tiles, in words of 4 or 8 bits."""
    if device.type == "cpu":
        return _cpu_route("tiles", M, (N, K), bits, group_size, dtype, why_not_strips(N, NIBBLE))
    ranges = torch.empty(0, dtype=dtype, device="meta")
    weight = TileWords(ranges, ranges, ranges, 0, group_size, 1)
    x_MK = _tokens(M, K, dtype, device)
    refused, fused = tiles.why_not_dequantize_tiles(x_MK, weight), tiles.why_not_tiles(x_MK, weight)
    if refused:
        return Route("reference", tuple(refused))
    return Route("dequantize" if fused else "triton", tuple(fused))


def sparse24_route(
    M: int, N: int, K: int, group_size: int, dtype: torch.dtype, device: torch.device, zero: bool = False
) -> Route:
    """The route of 2:4 codes of 4 bits: in strips, or in planar words with their zeros."""
    if device.type != "cpu" or sparse24.why_not_lay_in_strips24(N, K, group_size):
        return planar_route(M, N, K, NIBBLE, group_size, dtype, device, False, zero)
    return _cpu_route("sparse24", M, (N, K), NIBBLE, group_size, dtype)


def pairs24_route(
    M: int, N: int, K: int, bits: int, group_size: int, dtype: torch.dtype, device: torch.device
) -> Route:
    """The route of 2:4 pairs, of numbers (16 bits) or codes (8)."""
    if device.type == "cpu":
        return _cpu_route("sparse24", M, (N, K), bits, group_size, dtype, why_not_strips24(N))
    return Route("torch", (NO_KERNEL,))


def sparse_route(M: int, N: int, K: int, dtype: torch.dtype, device: torch.device) -> Route:
    """The route of sparse rows alone."""
    if device.type == "cpu":
        return _cpu_route("sparse_rows", M, (N, K), NUMBERS, -1, dtype)
    reasons = sparse.why_not_sparse(_tokens(M, K, dtype, device), torch.empty(0, dtype=dtype, device="meta"))
    if reasons:
        return Route("reference", tuple(reasons))
    return Route("triton", ()) if M <= sparse.DECODE_TOKENS else Route("dequantize", (MANY,))


def with_entries(codes: Route, M: int) -> Route:
    """The route of a weight whose codes have the given route and to which sparse rows are added. M: tokens."""
    if codes.kernel == "triton" and M > sparse.DECODE_TOKENS:
        return Route("dequantize with entries", (*codes.why_not, MANY))
    if codes.kernel in ("dequantize", "cpu rows", "cpu strips", "cpu slabs", DENSE_BLOCKS, AMX_BLOCKS):
        return Route(f"{codes.kernel} with entries", codes.why_not)
    own = ("entries are added by a product of their own",)
    return Route(f"{codes.kernel} + entries", (*codes.why_not, *own))


def w8a8_route(M: int, N: int, K: int, dtype: torch.dtype, device: torch.device) -> Route:
    """The route of int8 rows, with x rounded to int8."""
    if device.type == "cpu":
        return _cpu_route("w8a8", M, (N, K), BYTE, -1, dtype)
    x_MK = _tokens(M, K, dtype, device)
    reasons = why_not_w8a8(x_MK, torch.empty(0, K, dtype=torch.int8, device="meta"))
    return Route(path_of(device, reasons), tuple(reasons))


def fp8_route(M: int, N: int, K: int, dtype: torch.dtype, device: torch.device) -> Route:
    """The route of float8 rows, with x rounded to float8."""
    weight = torch.empty(N, K, dtype=fp8.E4M3, device="meta")
    reasons = fp8.why_not_fp8(_tokens(M, K, dtype, device), weight)
    return Route("torch" if reasons else "scaled_mm", tuple(reasons))


def fp8_block_route(M: int, N: int, K: int, dtype: torch.dtype, device: torch.device) -> Route:
    """The route of float8 with scales of blocks, with x rounded likewise."""
    reasons = fp8_blocks.why_not_fp8_blocks(_tokens(M, K, dtype, device))
    return Route("torch" if reasons else "triton", tuple(reasons))


def _cpu_route(
    operation: Operation,
    M: int,
    shape: tuple[int, int],
    bits: int,
    group_size: int,
    dtype: torch.dtype,
    rows: Sequence[str] = (),
) -> Route:
    """The route of a product on the CPU. shape: (N, K); rows: reasons why there is no loop for so many outputs."""
    N, K = shape
    name = "torch" if rows else cpu_gemm.cpu_route(operation, M, N, K, group_size)
    reasons = [*rows, *cpu_gemm.why_not_sizes(operation, K, group_size), *cpu.why_not()]
    if dtype not in TYPES:
        name, reasons = "torch", [f"x is {dtype}; allowed: float32, float16, bfloat16"]
    if name not in ("rows", "strips", "slabs"):
        return Route(name, tuple(reasons))
    loop = f"cpu {name}"
    first = dense.taken_from(operation, N, K, bits, dtype, group_size) if M > FEW_TOKENS else NEVER
    if first is None:
        return Route(loop, (*reasons, NOT_MEASURED))
    if first > M:
        return Route(loop, tuple(reasons))
    name = AMX_BLOCKS if dense.by_amx(operation, dtype) else DENSE_BLOCKS
    return Route(name, (*reasons, f"{DENSE_BLOCKS} from {first} tokens on, measured to be faster here"))
