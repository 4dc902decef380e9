"""Compiles the shipped configurations for absent GPUs (`machine_code`), and holds them against a time budget.

So a machine without a GPU can refuse a kernel that spills, does not fit, misses the matrix instruction or spends more
instructions per weight than memory bandwidth leaves room for. Needs a process in which Triton does not interpret.

    python tests/support/compiled/aot.py --quick    every kernel, every tile of the small product
    python tests/support/compiled/aot.py            a selection of the shipped configurations, one JSON line each
    python tests/support/compiled/aot.py --all      every one of them
"""

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import triton.language as tl
from machine_code import ADA, AMPERE, BLACKWELL, GEFORCE, HOPPER, CompiledCost, compile_for, cost

from compress.kernels.layouts.scale_blocks import BLOCK as SCALE_BLOCK
from compress.kernels.layouts.strips import NIBBLE
from compress.kernels.layouts.trellis import INPUTS, MULTIPLIERS, Code
from compress.kernels.layouts.words import PLANE, planar_block
from compress.kernels.step_functions import Activation, Norm
from compress.kernels.triton.column_sweep import ROWS as COLUMN_ROWS
from compress.kernels.triton.column_sweep import WARP, columns_kernel, search_kernel
from compress.kernels.triton.dequantize_gemm import BLOCK_ROWS, DEQUANTIZE_WARPS, dequantize_kernel
from compress.kernels.triton.fp8_block_gemm import (
    BLOCKS_AT_ONCE,
    QUANTIZE_WARPS,
    fp8_block_kernel,
    quantize_blocks_kernel,
)
from compress.kernels.triton.grouped_gemm import grouped_kernel
from compress.kernels.triton.grouped_int8 import grouped_int8_kernel
from compress.kernels.triton.int8_gemm import w8a8_kernel
from compress.kernels.triton.int8_planar_gemm import int8_planar_kernel
from compress.kernels.triton.int8_quantize import (
    ROW_BLOCK,
    ROW_WARPS,
    STATIC_BLOCK,
    STATIC_WARPS,
    quantize_static_kernel,
    quantize_tokens_kernel,
)
from compress.kernels.triton.level_lookup import FULL, SIGNED
from compress.kernels.triton.planar_gemm import planar_kernel
from compress.kernels.triton.sparse_kernels import BLOCK_E, MAX_BLOCK_M, WARPS, add_kernel, product_kernel
from compress.kernels.triton.steps.activations import NO_ACTIVATION
from compress.kernels.triton.steps.attention import (
    LEAST_ROWS,
    attend_kernel,
    block_of,
    splits_of,
)
from compress.kernels.triton.steps.attention import STAGES as ATTENTION_STAGES
from compress.kernels.triton.steps.attention import WARPS as ATTENTION_WARPS
from compress.kernels.triton.steps.norms import NO_NORM, NORM_CHUNK, norm_kernel
from compress.kernels.triton.steps.one_token import ROWS as TOKEN_ROWS
from compress.kernels.triton.steps.one_token import token_kernel, token_tile
from compress.kernels.triton.steps.products import step_kernel, step_shape
from compress.kernels.triton.tile_gemm import dequantize_tiles_kernel, tile_kernel
from compress.kernels.triton.trellis_gemm import (
    DENSE_ROWS,
    DENSE_WARPS,
    ROWS,
    SLICES,
    code_constants,
    dequantize_trellis_kernel,
    trellis_kernel,
)
from compress.kernels.triton.trellis_paths import STATES_PER_WARP, paths_kernel
from compress.kernels.tuning import table
from compress.kernels.tuning.choose import (
    W8A8_BLOCK_K,
    Device,
    derived,
    fused,
    fused_fp8_blocks,
    fused_trellis,
    fused_w8a8,
    grouped,
    invariant,
)

# Assumed of an H200: nine tenths of its 4.8 TB/s (data sheet) reach 132 processors that run at 1.83 GHz. Each of them
# issues 4 x 32 thread instructions per clock. Not measured on a GPU.
BYTES_PER_CLOCK = 4.3e12 / 132 / 1.83e9
ISSUED_PER_CLOCK = 128
DTYPES = {"fp16": tl.float16, "bf16": tl.bfloat16}
# Of SpQR's tiles.
TILE_ROWS = 16
TABLE_NAMES = {SIGNED: "signed levels", FULL: "levels"}
# Additional arguments of kernels for experts.
EXPERT_TYPES = dict.fromkeys(("pairs", "E", "G", "stride_we"), "i32")
EXPERT_TYPES |= dict.fromkeys(("token_ptr", "start_ptr"), "*i32")
STRIDES = ("stride_q", "stride_k", "stride_v", "stride_turn", "stride_mb")
STRIDES += tuple(f"stride_{of}{along}" for of in "kv" for along in "bht")
# Tokens and outputs that reach every configuration of `fused` for K = 4096: split K, one program per tile, ...
SIZES = ((1, 4096), (1, 28672), (32, 4096), (64, 4096), (128, 4096), (4096, 4096))


def instruction_budget(bits_per_weight: float) -> float:
    """Thread instructions per weight that an H200 can issue while the weight arrives from memory."""
    return ISSUED_PER_CLOCK * bits_per_weight / 8 / BYTES_PER_CLOCK


@dataclass(frozen=True)
class CompileReport:
    """One compiled configuration: its name, its resources, and thread instructions per weight against the budget."""

    name: str
    arch: int
    cost: CompiledCost
    per_weight: float
    budget: float


def weight_only(
    arch: int,
    bits: int,
    group: int,
    zero: bool,
    dtype: str,
    M: int | None,
    N: int,
    K: int = 4096,
    experts: int = 0,
    table_kind: int = 0,
    measured: table.Shape | None = None,
) -> CompileReport:
    """Compile the weight-only kernel as it would run for these sizes; M None: batch-invariant; experts: that of so
    many, for M pairs of each; table_kind: of codes of a table (`look_up`); measured: a configuration in place of the
    derived one."""
    device = Device(capability=arch)
    if measured is not None:
        shape = measured
    elif M is None:
        shape = invariant(table.ProductKind("weight_only", bits, group, zero, dtype), N, K, device)
    else:
        shape = fused(M, N, K, bits, group, device)
    if experts and M is not None:
        shape = grouped(shape, M * experts, experts, N, -(-K // planar_block(bits)), device)
    types = dict.fromkeys(("M", "N", "K", "stride_xm", "stride_wn", "blocks_per_split"), "i32") | EXPERT_TYPES
    types |= dict.fromkeys(("x_ptr", "scale_ptr", "bias_ptr", "out_ptr"), f"*{dtype}")
    types |= {"words_ptr": "*i16", "zero_ptr": "*u8", "partial_ptr": "*fp32", "counter_ptr": "*i32"}
    constants = {
        "BITS": bits,
        "PLANE": PLANE,
        "GROUP": group,
        "BLOCK_M": shape.block_m,
        "BLOCK_N": shape.block_n,
        "SPLIT_K": shape.split_k,
        "DT": DTYPES[dtype],
        "HAS_ZERO": zero,
        "HAS_BIAS": True,
        "SCALE_SUMS": shape.scales_sums(group, bits),
        "EVEN_K": True,
        "ASM": True,
    }
    types["table_ptr"] = "*fp32"
    if not experts:
        constants |= {"TABLE": table_kind} | ({} if table_kind else {"table_ptr": None})
    aligned: tuple[str, ...] = ("N", "K", "stride_xm", "stride_wn")
    kernel = planar_kernel
    if experts:
        kernel, aligned = grouped_kernel, (*aligned, "stride_we")
        constants["EXPERTS"] = table.bucket(experts + 1)
    read = cost(compile_for(kernel, arch, types, constants, aligned, shape.num_warps, shape.num_stages))
    per_weight = read.per_element(shape.num_warps, shape.block_n * planar_block(bits))
    overhead = 0 if group == -1 else (16 + 8 * zero) / group
    kind = f"{dtype} group {group}{' zero points' if zero else ''}"
    whose = f"{experts} experts " if experts else ""
    codes = TABLE_NAMES[table_kind] if table_kind else f"w{bits}a16"
    name = f"{whose}{codes} {kind} tile {shape.block_m}x{shape.block_n} split {shape.split_k}"
    name += " batch-invariant" if M is None else ""
    return CompileReport(name, arch, read, round(per_weight, 2), round(instruction_budget(bits + overhead), 2))


def int8_activation(
    arch: int, bits: int, group: int, zero: bool, M: int | None, N: int = 4096, K: int = 4096, x_group: int = -1
) -> CompileReport:
    """Compile the product of planar words with int8 tokens as it would run for these sizes; M None: batch-invariant;
    x_group: columns of a token that share a scale."""
    device = Device(capability=arch)
    kind = table.ProductKind("int8_activation", bits, group, zero, "bf16")
    shape = invariant(kind, N, K, device) if M is None else derived(kind, M, N, K, device)
    sizes = ("M", "N", "K", "stride_xm", "stride_wn", "stride_sm", "blocks_per_split")
    types = dict.fromkeys(sizes, "i32") | dict.fromkeys(("scale_ptr", "bias_ptr", "out_ptr"), "*bf16")
    types |= {"x_ptr": "*i8", "words_ptr": "*i16", "zero_ptr": "*u8", "x_scale_ptr": "*fp32"}
    types |= {"partial_ptr": "*fp32", "counter_ptr": "*i32"}
    constants = {
        "BITS": bits,
        "PLANE": PLANE,
        "GROUP": group,
        "X_GROUP": x_group,
        "BLOCK_M": shape.block_m,
        "BLOCK_N": shape.block_n,
        "SPLIT_K": shape.split_k,
        "HAS_ZERO": zero,
        "HAS_BIAS": True,
        "EVEN_K": True,
        "ASM": True,
    }
    aligned = ("N", "K", "stride_xm", "stride_wn")
    read = cost(compile_for(int8_planar_kernel, arch, types, constants, aligned, shape.num_warps, shape.num_stages))
    per_weight = round(read.per_element(shape.num_warps, shape.block_n * planar_block(bits)), 2)
    overhead = 0 if group == -1 else (16 + 8 * zero) / group
    name = (
        f"int8 inputs{'' if x_group == -1 else f' by {x_group}'} w{bits} group {group}{' zero points' if zero else ''}"
    )
    name += f" tile {shape.block_m}x{shape.block_n} split {shape.split_k}{' batch-invariant' if M is None else ''}"
    return CompileReport(name, arch, read, per_weight, round(instruction_budget(bits + overhead), 2))


def w8a8(arch: int, M: int, N: int = 4096, K: int = 4096, experts: int = 0) -> CompileReport:
    """Compile the w8a8 kernel, asymmetric activations and bias, as it would run for these sizes; experts: that of so
    many, for M pairs of each."""
    device = Device(capability=arch)
    shape = fused_w8a8(M, N, K, device)
    if experts:
        shape = grouped(shape, M * experts, experts, N, -(-K // W8A8_BLOCK_K), device)
    types = dict.fromkeys(("M", "N", "K", "stride_xm", "stride_wn", "stride_sm", "steps_per_split"), "i32")
    types |= EXPERT_TYPES
    types |= dict.fromkeys(("x_ptr", "weight_ptr"), "*i8")
    types |= dict.fromkeys(("x_zero_ptr", "row_sum_ptr", "partial_ptr", "counter_ptr"), "*i32")
    types |= dict.fromkeys(("x_scale_ptr", "weight_scale_ptr", "bias_ptr"), "*fp32") | {"out_ptr": "*bf16"}
    constants = {"BLOCK_M": shape.block_m, "BLOCK_N": shape.block_n, "BLOCK_K": W8A8_BLOCK_K}
    constants |= dict.fromkeys(("HAS_ZERO", "HAS_BIAS", "EVEN_K"), True) | {"SPLIT_K": shape.split_k}
    aligned: tuple[str, ...] = ("N", "K", "stride_xm", "stride_wn")
    kernel = w8a8_kernel
    if experts:
        kernel, aligned = grouped_int8_kernel, (*aligned, "stride_we")
        constants["EXPERTS"] = table.bucket(experts + 1)
    read = cost(compile_for(kernel, arch, types, constants, aligned, shape.num_warps, shape.num_stages))
    per_weight = round(read.per_element(shape.num_warps, shape.block_n * W8A8_BLOCK_K), 2)
    whose = f"{experts} experts " if experts else ""
    name = f"{whose}w8a8 tile {shape.block_m}x{shape.block_n} split {shape.split_k}"
    return CompileReport(name, arch, read, per_weight, round(instruction_budget(8), 2))


def quantize_rows(arch: int, symmetric: bool) -> CompileReport:
    """Compile the per-token quantization; the instructions are per element of x, of 16 bits."""
    types = {"x_ptr": "*bf16", "codes_ptr": "*i8", "scale_ptr": "*fp32", "zero_ptr": "*i32"}
    types |= {"K": "i32", "stride_xm": "i32"}
    constants = {"BLOCK_K": ROW_BLOCK, "SYMMETRIC": symmetric}
    read = cost(compile_for(quantize_tokens_kernel, arch, types, constants, ("K", "stride_xm"), ROW_WARPS))
    per_element = round(read.per_element(ROW_WARPS, ROW_BLOCK), 2)
    name = f"quantize tokens {'symmetric' if symmetric else 'asymmetric'}"
    return CompileReport(name, arch, read, per_element, round(instruction_budget(16 + 8), 2))


def quantize_fixed(arch: int) -> CompileReport:
    """Compile the static quantization; the program has no loop, so all of its instructions are counted."""
    types = {"x_ptr": "*bf16", "codes_ptr": "*i8", "scale_ptr": "*fp32", "zero_ptr": "*i32"}
    types |= {"K": "i32", "stride_xm": "i32"}
    constants = {"BLOCK_K": STATIC_BLOCK, "HAS_ZERO": True}
    read = cost(compile_for(quantize_static_kernel, arch, types, constants, ("K", "stride_xm"), STATIC_WARPS))
    per_element = round(read.per_element(STATIC_WARPS, STATIC_BLOCK), 2)
    return CompileReport("quantize static", arch, read, per_element, round(instruction_budget(16 + 8), 2))


def fp8_blocks(
    arch: int, M: int, dtype: str = "bf16", N: int = 4096, K: int = 4096, even: bool = True
) -> CompileReport:
    """Compile the float8 product with scales of blocks, with bias, as it would run for these sizes; even: of whole
    blocks of columns, else of units of 16."""
    shape = fused_fp8_blocks(M, N, K, Device(capability=arch))
    sizes = ("M", "N", "K", "blocks", "stride_xm", "stride_wn", "stride_sm", "stride_sb", "steps_per_split")
    types = dict.fromkeys(sizes, "i32") | dict.fromkeys(("x_ptr", "weight_ptr"), "*fp8e4nv")
    types |= dict.fromkeys(("x_scale_ptr", "weight_scale_ptr", "partial_ptr"), "*fp32") | {"counter_ptr": "*i32"}
    types |= dict.fromkeys(("bias_ptr", "out_ptr"), f"*{dtype}")
    constants = {"BLOCK_M": shape.block_m, "BLOCK_N": shape.block_n, "BLOCK_K": SCALE_BLOCK}
    constants |= {"SPLIT_K": shape.split_k, "HAS_BIAS": True, "EVEN_K": even}
    aligned = ("N", "K", "stride_xm", "stride_wn")
    read = cost(compile_for(fp8_block_kernel, arch, types, constants, aligned, shape.num_warps, shape.num_stages))
    per_weight = round(read.per_element(shape.num_warps, shape.block_n * SCALE_BLOCK), 2)
    edge = "" if even else " and an edge"
    name = f"fp8 blocks{edge} {dtype} tile {shape.block_m}x{shape.block_n} split {shape.split_k}"
    return CompileReport(name, arch, read, per_weight, round(instruction_budget(8), 2))


def quantize_fp8_blocks(arch: int) -> CompileReport:
    """Compile the rounding of inputs to float8 in blocks of columns; the program has no loop, so all of its
    instructions are counted."""
    types = {"x_ptr": "*bf16", "codes_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
    types |= dict.fromkeys(("K", "blocks", "stride_xm", "stride_sm", "stride_sb"), "i32")
    constants = {"BLOCK_K": SCALE_BLOCK, "COUNT": BLOCKS_AT_ONCE}
    read = cost(compile_for(quantize_blocks_kernel, arch, types, constants, ("K", "stride_xm"), QUANTIZE_WARPS))
    per_element = round(read.per_element(QUANTIZE_WARPS, BLOCKS_AT_ONCE * SCALE_BLOCK), 2)
    return CompileReport("quantize fp8 blocks", arch, read, per_element, round(instruction_budget(16 + 8), 2))


def dequantize(arch: int, bits: int, group: int, dtype: str, table: bool = False) -> CompileReport:
    """Compile the dequantization, with zero points or a table of levels; all instructions, per weight that is read and
    written."""
    types = dict.fromkeys(("first_row", "first_block", "rows", "N", "K", "stride_wn", "stride_on"), "i32")
    types |= {"words_ptr": "*i16", "scale_ptr": f"*{dtype}", "zero_ptr": "*u8", "out_ptr": f"*{dtype}"}
    constants: dict[str, int | None] = {"BITS": bits, "PLANE": PLANE, "GROUP": group, "BLOCK_N": BLOCK_ROWS}
    constants |= {"HAS_ZERO": not table, "TABLE": table} | ({} if table else {"table_ptr": None})
    types |= {"table_ptr": "*fp32"}
    aligned = ("N", "K", "stride_wn", "stride_on")
    read = cost(compile_for(dequantize_kernel, arch, types, constants, aligned, DEQUANTIZE_WARPS))
    per_weight = round(read.per_element(DEQUANTIZE_WARPS, BLOCK_ROWS * planar_block(bits)), 2)
    name = f"dequantize {'levels' if table else f'w{bits}'} {dtype} group {group}"
    return CompileReport(
        name, arch, read, per_weight, round(instruction_budget(bits + DTYPES[dtype].primitive_bitwidth), 2)
    )


def sparse_product(arch: int, dtype: str, M: int) -> CompileReport:
    """Compile the product with sparse rows; the instructions of its loop are per entry, of 32 bits."""
    types = dict.fromkeys(("M", "N", "stride_xm"), "i32") | dict.fromkeys(
        ("x_ptr", "value_ptr", "out_ptr"), f"*{dtype}"
    )
    types |= {"row_start_ptr": "*i32", "column_ptr": "*i16"}
    constants = {"BLOCK_M": M, "BLOCK_E": BLOCK_E}
    read = cost(compile_for(product_kernel, arch, types, constants, ("N", "stride_xm"), WARPS))
    per_entry = round(read.per_element(WARPS, BLOCK_E), 2)
    return CompileReport(f"sparse rows {dtype} {M} tokens", arch, read, per_entry, round(instruction_budget(32), 2))


def sparse_add(arch: int, dtype: str) -> CompileReport:
    """Compile the addition of entries to dense blocks; per entry, of which 32 bits are read, and 32 for its place."""
    types = dict.fromkeys(("first_row", "first_column", "last_column", "stride_on"), "i32")
    types |= {"row_start_ptr": "*i32", "column_ptr": "*i16", "value_ptr": f"*{dtype}", "out_ptr": f"*{dtype}"}
    read = cost(compile_for(add_kernel, arch, types, {"BLOCK_E": BLOCK_E}, ("stride_on",), WARPS))
    per_entry = round(read.per_element(WARPS, BLOCK_E), 2)
    return CompileReport(f"entries added {dtype}", arch, read, per_entry, round(instruction_budget(64), 2))


def _tile_constants(bits: int, group: int) -> dict[str, int]:
    return {"BITS": bits, "PLANE": PLANE, "GROUP": group, "TILE_ROWS": TILE_ROWS, "LEVEL_BITS": NIBBLE}


def tiles(arch: int, dtype: str, M: int, N: int = 4096, K: int = 4096, bits: int = 4, group: int = 16) -> CompileReport:
    """Compile the product with codes in tiles as it would run for these sizes."""
    shape = fused(M, N, K, bits, PLANE, Device(capability=arch))
    types = dict.fromkeys(("M", "N", "K", "stride_xm", "stride_wn", "blocks_per_split"), "i32")
    types |= dict.fromkeys(("x_ptr", "ranges_ptr", "bias_ptr", "out_ptr"), f"*{dtype}")
    types |= {"words_ptr": "*i16", "levels_ptr": "*u8", "partial_ptr": "*fp32", "counter_ptr": "*i32"}
    constants = {
        **_tile_constants(bits, group),
        "BLOCK_M": shape.block_m,
        "BLOCK_N": shape.block_n,
        "SPLIT_K": shape.split_k,
        "DT": DTYPES[dtype],
        "HAS_BIAS": True,
    }
    aligned = ("N", "K", "stride_xm", "stride_wn")
    read = cost(compile_for(tile_kernel, arch, types, constants, aligned, shape.num_warps, shape.num_stages))
    per_weight = round(read.per_element(shape.num_warps, shape.block_n * planar_block(bits)), 2)
    name = f"tiles w{bits} {dtype} group {group} tile {shape.block_m}x{shape.block_n} split {shape.split_k}"
    return CompileReport(name, arch, read, per_weight, round(instruction_budget(bits + 12 / group), 2))


def dequantize_tiles(arch: int, dtype: str, bits: int = 4, group: int = 16) -> CompileReport:
    """Compile the dequantization of codes in tiles; all instructions, per weight that is read and written."""
    sizes = ("first_row", "first_block", "rows", "last_column", "N", "K", "stride_wn", "stride_on")
    types = dict.fromkeys(sizes, "i32") | {"words_ptr": "*i16", "levels_ptr": "*u8"}
    types |= {"ranges_ptr": f"*{dtype}", "out_ptr": f"*{dtype}"}
    constants = {**_tile_constants(bits, group), "BLOCK_N": BLOCK_ROWS}
    aligned = ("N", "K", "stride_wn", "stride_on")
    read = cost(compile_for(dequantize_tiles_kernel, arch, types, constants, aligned, DEQUANTIZE_WARPS))
    per_weight = round(read.per_element(DEQUANTIZE_WARPS, BLOCK_ROWS * planar_block(bits)), 2)
    need = bits + 12 / group + DTYPES[dtype].primitive_bitwidth
    return CompileReport(
        f"dequantize tiles w{bits} {dtype} group {group}", arch, read, per_weight, round(instruction_budget(need), 2)
    )


def trellis(arch: int, bits: int, M: int, N: int = 4096, K: int = 4096) -> CompileReport:
    """Compile the product with trellis codes of states of 12 bits as it would run for these sizes."""
    shape = fused_trellis(M, N, -(-K // (SLICES * INPUTS)), Device(capability=arch))
    types = dict.fromkeys(("M", "N", "K", "stored", "stride_xm", "stride_w", "steps_per_split"), "i32")
    types |= dict.fromkeys(("x_ptr", "scale_ptr", "bias_ptr", "out_ptr"), "*bf16")
    types |= {"words_ptr": "*i32", "partial_ptr": "*fp32", "counter_ptr": "*i32"}
    segments = shape.block_n // ROWS
    constants = {**code_constants(_code(bits), True), "SEGMENTS": segments, "SLICES": SLICES, "HAS_BIAS": True}
    constants |= {"BLOCK_M": shape.block_m, "SPLIT_K": shape.split_k, "DT": tl.bfloat16}
    aligned = ("K", "stride_xm")
    read = cost(compile_for(trellis_kernel, arch, types, constants, aligned, shape.num_warps, shape.num_stages))
    per_weight = round(read.per_element(shape.num_warps, shape.block_n * SLICES * INPUTS), 2)
    name = f"trellis {bits} bits tile {shape.block_m}x{shape.block_n} split {shape.split_k}"
    return CompileReport(name, arch, read, per_weight, round(instruction_budget(bits), 2))


def dequantize_trellis(arch: int, bits: int) -> CompileReport:
    """Compile the decoding of trellis codes to dense blocks; all instructions, per weight."""
    types = dict.fromkeys(("first_row", "first_column", "rows", "stride_w", "stride_on"), "i32")
    types |= {"words_ptr": "*i32", "scale_ptr": "*bf16", "out_ptr": "*bf16"}
    constants = {**code_constants(_code(bits), True), "BLOCK_N": DENSE_ROWS}
    read = cost(compile_for(dequantize_trellis_kernel, arch, types, constants, ("stride_on",), DENSE_WARPS))
    per_weight = round(read.per_element(DENSE_WARPS, DENSE_ROWS * INPUTS), 2)
    name = f"decode trellis {bits} bits"
    return CompileReport(name, arch, read, per_weight, round(instruction_budget(bits + 16), 2))


def trellis_paths(arch: int, bits: int) -> CompileReport:
    """Compile the search for paths of 2^12 states; the instructions of its loop are per state, and nothing bounds
    them."""
    types = dict.fromkeys(("x_ptr", "d_ptr", "level_ptr"), "*fp32") | {"from_ptr": "*u8", "states_ptr": "*i16"}
    types |= dict.fromkeys(("count", "length"), "i32")
    code, warps = _code(bits), 2**12 // STATES_PER_WARP
    constants = {"BITS": bits, "STATE_BITS": code.state_bits, "REST": 256}
    read = cost(compile_for(paths_kernel, arch, types, constants, (), warps))
    return CompileReport(f"paths {bits} bits", arch, read, round(read.per_element(warps, 2**12), 2), 0.0)


def columns(arch: int, tile: int, factors: int = 0, descent: bool = False, exact: bool = False) -> CompileReport:
    """Compile a sweep over columns, or descent on their codes, in bfloat16 scales; the instructions of its longest loop
    are per number of a tile, and nothing bounds them. factors: shares of a range that are tried."""
    numbers = ("weight", "target", "value", "change", "matrix", "diagonal", "loss", "codes", "scale", "zero", "cost")
    numbers += ("price", "table", "importance", "factors")
    types = {f"{name}_ptr": "*fp32" for name in numbers} | {"group_ptr": "*i32", "extra_ptr": "*bf16"}
    types |= {"kept_ptr": "*u8", "exact_ptr": "*u8"}
    types |= dict.fromkeys(("N", "begin", "end", "step", "stride_before", "stride_after"), "i32")
    constants = {"DESCENT": descent, "TILE": tile, "ROWS": COLUMN_ROWS}
    constants |= {"CODES": (0, 15, 0, exact, 2), "RANGE": (factors, 0, 15.0, 2.0**-126, 2.0**127, 2)}
    absent = ["table_ptr", *(["weight_ptr", "loss_ptr"] if descent else [])]
    absent += [] if factors else ["importance_ptr", "factors_ptr"]
    absent += [] if exact else ["kept_ptr", "exact_ptr", "extra_ptr", "price_ptr"]
    warps = max(1, tile * COLUMN_ROWS // WARP)
    read = cost(compile_for(columns_kernel, arch, types, constants | dict.fromkeys(absent), ("N",), warps))
    words = ["descent" if descent else "sweep", f"tile {tile}", *(["exact"] if exact else [])]
    name = f"columns {' '.join(words)}{f', {factors} ranges' if factors else ''}"
    return CompileReport(name, arch, read, round(read.per_element(warps, tile * COLUMN_ROWS), 2), 0.0)


def range_search(arch: int) -> CompileReport:
    """Compile the search for scales of large groups; the instructions are per number and range."""
    types = {f"{name}_ptr": "*fp32" for name in ("x", "importance", "factors", "scale", "zero")}
    types |= dict.fromkeys(("N", "members", "stride_xg", "stride_xn"), "i32")
    tile = WARP // COLUMN_ROWS
    constants = {"CODES": (0, 15, 0, False, 2), "RANGE": (40, 0, 15.0, 2.0**-126, 2.0**127, 2), "TILE": tile}
    constants |= {"ROWS": COLUMN_ROWS}
    read = cost(compile_for(search_kernel, arch, types, constants, ("stride_xn",), 1))
    return CompileReport("columns search", arch, read, round(read.per_element(1, WARP), 2), 0.0)


def columns_and_ranges(arch: int) -> Iterator[CompileReport]:
    """Compile a sweep with known scales, sweeps that search scales of small and large groups, and descent."""
    yield columns(arch, 64)
    for tile in (32, 128, 512):
        yield columns(arch, tile, factors=40)
    yield columns(arch, 64, descent=True, exact=True)
    yield range_search(arch)


def _code(bits: int) -> Code:
    return Code(bits, 12, MULTIPLIERS[12], 1024)


def step_products(
    arch: int, M: int, role: str, bits: int = 4, group: int = 128, zero: bool = True, dtype: str = "bf16", K: int = 4096
) -> CompileReport:
    """Compile the product of a step. role: "normed" (behind a norm), "gated" (so, before an activation of a gate) or
    "added" (to a residual)."""
    N = {"normed": 6144, "gated": 28672, "added": 4096}[role]
    types = dict.fromkeys(("M", "N", "K", "stride_wn", "blocks_per_split"), "i32") | {"epsilon": "fp32"}
    types |= dict.fromkeys(("x_ptr", "scale_ptr", "out_ptr", "norm_weight_ptr", "residual_ptr"), f"*{dtype}")
    types |= {"words_ptr": "*i16", "zero_ptr": "*u8", "partial_ptr": "*fp32", "counter_ptr": "*i32"}
    types |= {"length_ptr": "*i64"}
    constants: dict[str, object] = {"BITS": bits, "PLANE": PLANE, "GROUP": group, "DT": DTYPES[dtype], "ASM": True}
    constants |= {"HAS_ZERO": zero, "ACTIVATION": int(Activation.SILU) if role == "gated" else NO_ACTIVATION}
    constants |= {"GATED": role == "gated", "bias_ptr": None, "norm_bias_ptr": None}
    if role != "added":
        constants |= {"residual_ptr": None, "length_ptr": None}
    aligned = ("N", "K", "stride_wn")
    overhead = 0 if group == -1 else (16 + 8 * zero) / group
    budget = round(instruction_budget(bits + overhead), 2)
    if M == 1:
        words, warps = token_tile(K, bits)
        constants |= {
            "ROWS": TOKEN_ROWS,
            "WORDS": words,
            "CHUNK": min(NORM_CHUNK, table.bucket(K)),
        }
        constants |= {"NORM": NO_NORM} if role == "added" else {"NORM": int(Norm.RMS)}
        constants |= {"norm_weight_ptr": None} if role == "added" else {}
        read = cost(compile_for(token_kernel, arch, types, constants, aligned, warps))
        per_weight = round(read.per_element(warps, TOKEN_ROWS * words * 16 // bits), 2)
        name = f"steps w{bits}a16 {role} {dtype} group {group} one token"
        return CompileReport(name, arch, read, per_weight, budget)
    del constants["norm_bias_ptr"]
    shape = step_shape(table.ProductKind("weight_only", bits, group, zero, dtype), M, N, K, Device(capability=arch))
    constants |= {"BLOCK_M": shape.block_m, "BLOCK_N": shape.block_n, "SPLIT_K": shape.split_k}
    constants |= {"SCALE_SUMS": shape.scales_sums(group, bits), "EVEN_K": True}
    read = cost(compile_for(step_kernel, arch, types, constants, aligned, shape.num_warps, shape.num_stages))
    per_weight = round(read.per_element(shape.num_warps, shape.block_n * planar_block(bits)), 2)
    name = f"steps w{bits}a16 {role} {dtype} group {group} tokens {M} tile {shape.block_m}x{shape.block_n}"
    return CompileReport(name, arch, read, per_weight, budget)


def step_norm(arch: int, K: int = 4096) -> CompileReport:
    """Compile the norm of several tokens of a step."""
    constants = {"CHUNK": min(NORM_CHUNK, table.bucket(K)), "NORM": int(Norm.RMS), "DT": DTYPES["bf16"]}
    constants |= {"bias_ptr": None}
    types = dict.fromkeys(("x_ptr", "weight_ptr", "out_ptr"), "*bf16") | {"K": "i32", "epsilon": "fp32"}
    read = cost(compile_for(norm_kernel, arch, types, constants, ("K",), 4))
    return CompileReport("steps norm", arch, read, round(read.per_element(4, NORM_CHUNK), 2), 0.0)


def step_attention(arch: int, size: int = 128, sharing: int = 4) -> CompileReport:
    """Compile the attention of a step over a cache of fixed size, with norms of heads; instructions of its loop per
    number of a key, which is read with one of a value, and no budget."""
    types = dict.fromkeys(("place", "first", "count", *STRIDES), "i32")
    types |= dict.fromkeys(("query_epsilon", "key_epsilon", "scale"), "fp32")
    types |= dict.fromkeys(("query_ptr", "key_ptr", "value_ptr", "query_weight_ptr", "key_weight_ptr"), "*bf16")
    types |= dict.fromkeys(("cos_ptr", "sin_ptr", "keys_ptr", "values_ptr", "out_ptr"), "*bf16")
    types |= {"mask_ptr": "*i1", "length_ptr": "*i64", "counter_ptr": "*i32"}
    types |= dict.fromkeys(("partial_ptr", "top_ptr"), "*fp32")
    block = block_of(size)
    constants = {
        "SHARING": sharing,
        "ROWS": max(LEAST_ROWS, table.bucket(sharing)),
        "SIZE": size,
        "WIDTH": size,
        "VALUE_SIZE": size,
        "VALUE_WIDTH": size,
        "ROTATED": size,
        "QUERY_NORM": int(Norm.RMS),
        "KEY_NORM": int(Norm.RMS),
        "BLOCK": block,
        "SPLIT": splits_of(8, Device().processors),
        "DT": DTYPES["bf16"],
    }
    aligned = [name for name in STRIDES if name != "stride_mb"]
    read = cost(compile_for(attend_kernel, arch, types, constants, aligned, ATTENTION_WARPS, ATTENTION_STAGES))
    per_number = round(read.per_element(ATTENTION_WARPS, block * size), 2)
    return CompileReport(f"steps attention of {size}", arch, read, per_number, 0.0)


def float4(arch: int) -> Iterator[CompileReport]:
    """Compile products with tables of levels: those of NVFP4, MXFP4 and NF4, for few tokens and for many."""
    for (kind, group), M in itertools.product(((SIGNED, 16), (SIGNED, 32), (FULL, 64)), (1, 64, 128)):
        yield weight_only(arch, NIBBLE, group, False, "bf16", M, 4096, table_kind=kind)


def sums(arch: int) -> Iterator[CompileReport]:
    """Compile the additional kernels for sums of codes and sparse rows, beside the products of the codes."""
    for M in (1, MAX_BLOCK_M):
        yield sparse_product(arch, "bf16", M)
        yield tiles(arch, "bf16", M)
    yield sparse_add(arch, "bf16")
    yield dequantize_tiles(arch, "bf16")


def steps(archs: tuple[int, ...], tokens: tuple[int, ...]) -> Iterator[CompileReport]:
    """Compile the launches of a step of a block."""
    for arch in archs:
        for M, role in itertools.product(tokens, ("normed", "gated", "added")):
            yield step_products(arch, M, role)
        yield step_norm(arch)
        yield step_attention(arch)


def shipped() -> Iterator[tuple[table.ProductKind, int, int, int, table.Shape]]:
    """(Kind of product, M, N, K, configuration) of the weight-only kernel, from the table that is shipped."""
    for entry in table.read(table.SHIPPED):
        if entry.kind.op == "weight_only" and isinstance(entry.run, table.Shape):
            yield entry.kind, entry.M, entry.N, entry.K, entry.run


def selection() -> Iterator[CompileReport]:
    """Every shape once, the variants of the kernels where they cost most; under a minute to compile."""
    for M, N in SIZES:
        yield weight_only(HOPPER, 4, 128, True, "bf16", M, N)
    for M in (1, 64):
        yield weight_only(HOPPER, 4, 128, False, "fp16", M, 4096)
    for M, group, zero in ((1, 32, True), (4096, 32, True), (1, 64, False), (1, -1, False)):
        yield weight_only(HOPPER, 4, group, zero, "bf16", M, 4096)
    for M in (1, 4096):
        yield weight_only(HOPPER, 8, 128, True, "bf16", M, 4096)
    for dtype, M, N in (("fp16", 1, 4096), ("bf16", 1, 4096), ("bf16", 16, 4096), ("bf16", 64, 28672)):
        yield weight_only(HOPPER, 8, -1, False, dtype, M, N)
    for kind, M, N, K, run in shipped():
        yield weight_only(HOPPER, kind.bits, kind.group_size, kind.zero, "bf16", M, N, K, measured=run)
    for arch, M in itertools.product((AMPERE, ADA, BLACKWELL, GEFORCE), (1, 32, 64, 128)):
        yield weight_only(arch, 4, 128, True, "bf16", M, 4096)
    for arch in (AMPERE, ADA, HOPPER, BLACKWELL, GEFORCE):
        yield weight_only(arch, 4, 128, True, "bf16", None, 4096)
        for few_or_many in (1, 128, None):
            yield int8_activation(arch, 4, 128, True, few_or_many)
    for M, group, x_group in ((1, 32, -1), (1, -1, 128), (64, 128, 128)):
        yield int8_activation(HOPPER, 4, group, M == 1, M, x_group=x_group)
    yield int8_activation(HOPPER, 8, 128, False, 1)
    for arch, M in itertools.product((ADA, BLACKWELL, GEFORCE), (1, 4096)):
        yield w8a8(arch, M)
    yield weight_only(AMPERE, 8, 64, True, "bf16", 128, 4096)
    for arch, M in ((HOPPER, 1), (HOPPER, 64), (HOPPER, 128), (HOPPER, 4096), (AMPERE, 1), (AMPERE, 4096)):
        yield w8a8(arch, M)
    for arch, M in itertools.product((AMPERE, ADA, HOPPER, BLACKWELL, GEFORCE), (1, 64, 256)):
        yield weight_only(arch, 4, 128, True, "bf16", M, 1536, 2048, experts=128)
        yield w8a8(arch, M, 1536, 2048, experts=128)
    for M in (1, 16):
        yield weight_only(HOPPER, 4, 128, True, "bf16", M, 1536, 2048, experts=8)  # K is split
    yield quantize_rows(HOPPER, False)
    yield quantize_fixed(HOPPER)
    for arch, M in itertools.product((ADA, HOPPER, BLACKWELL, GEFORCE), (1, 32, 64, 4096)):
        yield fp8_blocks(arch, M)
        yield fp8_blocks(arch, M, "fp16", even=False)
    for arch in (ADA, HOPPER, BLACKWELL, GEFORCE):
        yield quantize_fp8_blocks(arch)
    for group in (128, 96):
        yield dequantize(HOPPER, 4, group, "bf16")
    for arch in (HOPPER, AMPERE):
        yield from sums(arch)
    for arch in (AMPERE, ADA, HOPPER, BLACKWELL, GEFORCE):
        yield from float4(arch)
        yield trellis(arch, 2, 1)
    for bits in (1, 3, 4):
        yield trellis(HOPPER, bits, 64)
        yield trellis_paths(HOPPER, bits)
    for arch in (AMPERE, ADA, HOPPER, BLACKWELL, GEFORCE):
        yield from columns_and_ranges(arch)
    yield dequantize(HOPPER, NIBBLE, 16, "bf16", table=True)
    yield dequantize_trellis(HOPPER, 2)
    yield from steps((AMPERE, ADA, HOPPER, BLACKWELL, GEFORCE), (1, 16))
    for size, sharing in ((64, 1), (256, 20)):
        yield step_attention(HOPPER, size, sharing)
    yield step_products(HOPPER, 1, "gated", 8, -1, False, "fp16")


def quick() -> Iterator[CompileReport]:
    """Every kernel on both architectures, every tile of the small product once; half of the selection's time."""
    for M, N in SIZES:
        yield weight_only(HOPPER, 4, 128, True, "bf16", M, N)
    yield weight_only(HOPPER, 4, 128, False, "fp16", 1, 4096)
    yield weight_only(HOPPER, 4, 32, True, "bf16", 4096, 4096)
    yield weight_only(HOPPER, 8, 128, True, "bf16", 1, 4096)
    yield weight_only(HOPPER, 8, -1, False, "bf16", 64, 28672)
    yield weight_only(HOPPER, 4, 128, True, "bf16", None, 4096)
    for arch, M in ((HOPPER, 1), (HOPPER, 128), (BLACKWELL, 64)):
        yield int8_activation(arch, 4, 128, True, M)
    yield weight_only(AMPERE, 4, 128, True, "bf16", 64, 4096)
    yield weight_only(ADA, 4, 128, True, "bf16", 1, 4096)
    yield weight_only(BLACKWELL, 4, 128, True, "bf16", 1, 4096)
    yield w8a8(BLACKWELL, 4096)
    yield weight_only(GEFORCE, 4, 128, True, "bf16", 128, 4096)
    for arch in (HOPPER, AMPERE):
        yield w8a8(arch, 4096)
    yield weight_only(HOPPER, 4, 128, True, "bf16", 1, 1536, 2048, experts=128)
    yield w8a8(HOPPER, 16, 1536, 2048, experts=128)
    for arch, M in ((HOPPER, 1), (HOPPER, 64), (HOPPER, 4096), (ADA, 1)):
        yield fp8_blocks(arch, M, even=M != 64)
    yield quantize_rows(HOPPER, False)
    yield quantize_fixed(HOPPER)
    yield quantize_fp8_blocks(HOPPER)
    yield dequantize(HOPPER, 4, 96, "bf16")
    yield from sums(HOPPER)
    yield from float4(HOPPER)
    for arch in (AMPERE, GEFORCE):
        yield weight_only(arch, NIBBLE, 16, False, "bf16", 1, 4096, table_kind=SIGNED)
        yield trellis(arch, 2, 1)
    yield trellis(HOPPER, 3, 64)
    yield trellis_paths(HOPPER, 2)
    yield from columns_and_ranges(HOPPER)
    yield dequantize(HOPPER, NIBBLE, 16, "bf16", table=True)
    yield dequantize_trellis(HOPPER, 2)
    yield from steps((HOPPER,), (1,))
    for arch in (AMPERE, ADA, BLACKWELL, GEFORCE):
        yield step_products(arch, 16, "gated")
        yield step_norm(arch)
        yield step_attention(arch)


def everything() -> Iterator[CompileReport]:
    """The product of all shapes and variants, on both architectures."""
    for arch, bits, group, zero, dtype, (M, N) in itertools.product(
        (HOPPER, AMPERE), (4, 8), (32, 64, 128, -1), (False, True), DTYPES, SIZES
    ):
        yield weight_only(arch, bits, group, zero, dtype, M, N)
    for arch in (HOPPER, AMPERE):
        for M in (1, 32, 64, 128, 4096):
            yield w8a8(arch, M)
        for symmetric in (False, True):
            yield quantize_rows(arch, symmetric)
        yield quantize_fixed(arch)
        for M, dtype, even in itertools.product((1, 32, 64, 128), (*DTYPES, "fp32"), (False, True)):
            yield from [fp8_blocks(arch, M, dtype, even=even)] if arch != AMPERE else []
        for bits, group, dtype in itertools.product((4, 8), (16, 32, 128, -1), DTYPES):
            yield dequantize(arch, bits, group, dtype)
        yield from sums(arch)
        yield tiles(arch, "fp16", 1, bits=8, group=128)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compile the kernels without a GPU and report what they take.")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--all", action="store_true", help="every configuration, not only the selection")
    chosen.add_argument("--quick", action="store_true", help="less than the selection")
    given = parser.parse_args()
    for report in everything() if given.all else quick() if given.quick else selection():
        print(json.dumps(asdict(report)), flush=True)
